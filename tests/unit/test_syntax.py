"""Code is found by its syntax in a function, whatever its names, and replaced; so planted faults survive renames."""

import ast
import builtins
import warnings
from collections.abc import Callable
from functools import cache

import pytest

from tests.faults import FAULTS
from tests.faults.trial import ROOT
from titan.testing.faults import Fault
from titan.testing.syntax import Piece, replaced

SOURCE = """
LIMIT = 3

class Scale:
    rate = 2.0

    def __call__(self, x):  # a comment
        if x > self.rate:
            x = x - self.rate
            x = max(x, LIMIT)
        try:
            return x * self.rate
        finally:
            done(x)

def done(y):
    print(y > LIMIT)
"""


def _changed(function: str, old: str, new: str, *nth: int, source: str = SOURCE) -> list[str]:
    """The lines that differ, as "old -> new"."""
    before = ast.unparse(ast.parse(source)).splitlines()
    after = replaced(source, function, Piece(old, new, *nth)).splitlines()
    pairs = zip(before, after, strict=True)
    return [f"{line.strip()} -> {other.strip()}" for line, other in pairs if line != other]


@pytest.mark.parametrize(
    ("function", "old", "new", "lines"),
    [
        ("Scale.__call__", "x * self.rate", "x", ["return x * self.rate -> return x"]),
        ("Scale.__call__", "a * this.factor", "a / this.factor", ["return x * self.rate -> return x / self.rate"]),
        (
            "Scale.__call__",
            "if x > self.rate: ...",
            "if x < self.rate: ...",
            ["if x > self.rate: -> if x < self.rate:"],
        ),
        ("Scale.__call__", "x = x - self.rate\nx = max(x, LIMIT)", "a = 0\nx = a", None),
        ("Scale.__call__", "done(x)", "", ["done(x) -> pass"]),
        ("Scale.__call__", "max(x, LIMIT)", "min(x, LIMIT)", ["x = max(x, LIMIT) -> x = min(x, LIMIT)"]),
        ("Scale", "rate = 2.0", "rate = 3.0", ["rate = 2.0 -> rate = 3.0"]),
        ("", "limit = 3", "limit = 4", ["LIMIT = 3 -> LIMIT = 4"]),
    ],
)
def test_code_is_found_by_its_syntax(function: str, old: str, new: str, lines: list[str] | None) -> None:
    assert _changed(function, old, new) == (lines or ["x = x - self.rate -> a = 0", "x = max(x, LIMIT) -> x = a"])


def test_a_function_has_another_name_by_now() -> None:
    with pytest.warns(UserWarning, match="there is no finished: 'y > LIMIT' is changed in done"):
        assert _changed("finished", "y > LIMIT", "y < LIMIT") == ["print(y > LIMIT) -> print(y < LIMIT)"]


def test_code_that_is_no_other_program_is_refused() -> None:
    with pytest.raises(ValueError, match="'a > b' in place of 'a > b' changes nothing"):
        _changed("done", "a > b", "a > b")


def test_the_second_of_two() -> None:
    assert _changed("f", "a(b)", "b", 2, 2, source="def f(): one(two); two(one)") == ["two(one) -> one"]


def test_the_bodies_are_kept_in_their_order() -> None:
    old, new = "try: ...\nfinally: ...", "if True: ...\nelse: ..."
    assert _changed("Scale.__call__", old, new) == ["try: -> if True:", "finally: -> else:"]


@pytest.mark.parametrize(
    ("function", "old", "says"),
    [
        ("Scale.__call__", "x * x", "has it 0 times, whatever its names, required: 1"),  # one name, two in the source
        ("Scale.__call__", "x * self.x", "Scale.__call__ has it 1 times, whatever its names, required: 2"),
        ("Scale.__call__", "min(x, LIMIT)", "Scale.__call__ has it 0 times"),  # builtins are what they are
        ("Scale", "x * self.rate", "Scale has it 0 times"),
        ("gone", "a > b", "there is no function gone, and others have it: done (1), other (1)"),
        ("gone", "x > self.rate > 1", "there is no function gone, and others have it: none"),
    ],
)
def test_what_is_not_there_once_is_refused(function: str, old: str, says: str) -> None:
    source, of = SOURCE + "\ndef other(n):\n    n > LIMIT\n", 2 if says.endswith("required: 2") else 1
    with pytest.raises(ValueError, match="name another function") as caught:
        replaced(source, function, Piece(old, "0", 1, of))
    assert says in str(caught.value)


def test_code_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'x >' is not Python"):
        replaced(SOURCE, "done", Piece("x >", "x"))
    with pytest.raises(SyntaxError):
        replaced(SOURCE, "", Piece("LIMIT = 3", "return"))


TWINS = {"gradients scaled by tp"}
"""Faults of a function that, but for names of functions, is another one of the file."""


@cache
def _names(file: str, *, functions: bool) -> frozenset[str]:
    """Names of a file that are functions' and classes', or all others; builtins keep theirs."""
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = {value for node in nodes for key, value in ast.iter_fields(node) if key in ("id", "attr", "arg", "name")}
    found = defined if functions else names - defined
    return frozenset(name for name in found if isinstance(name, str)) - {*dir(builtins), "annotations"}


def _renamed(source: str, names: frozenset[str]) -> str:
    def new(value: object) -> object:
        if isinstance(value, list):  # of nonlocal
            return [new(item) for item in value]
        return f"{value}_2" if value in names else value

    tree = ast.parse(source)
    for node in ast.walk(tree):
        for key, value in ast.iter_fields(node):
            if key in ("id", "attr", "arg", "name", "asname", "names"):
                setattr(node, key, new(value))
    return ast.unparse(tree)


def _differ(fault: Fault, renamed: Callable[[str], str]) -> bool:
    """Whether the fault makes another program of the renamed file than it makes of the file, renamed."""
    source, function = (ROOT / fault.file).read_text(encoding="utf-8"), fault.place.partition("::")[2]
    piece = Piece(fault.old, fault.new, *fault.nth)
    warnings.simplefilter("ignore")  # of other names of functions; pytest takes it back
    try:
        # Renamed once more, names of the new code alone are as in the other program.
        return renamed(replaced(renamed(source), function, piece)) != renamed(fault.planted(ROOT))
    except ValueError as error:
        assert "no function" in str(error), error
        return True


@pytest.mark.sweep
@pytest.mark.parametrize("functions", [False, True], ids=["all but functions and classes", "functions and classes"])
def test_planted_faults_survive_renames(functions: bool) -> None:
    differing = {
        fault.name
        for fault in FAULTS
        if _differ(fault, lambda source, f=fault: _renamed(source, _names(f.file, functions=functions)))
    }
    assert differing == (TWINS if functions else set())
