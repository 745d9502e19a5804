"""The house keeps its shape: imports run downward, plugins stay guests, files and functions stay small.

Each rule reads the source alone (nothing is imported) and returns sentences; each has a test that a planted violation
is found.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = (
    ("errors", "log", "configs", "cost"),
    ("device", "options", "place", "preemption", "slurm", "watchdog"),
    ("registry", "nodes"),
    ("plan", "mesh", "batch"),
    ("cache", "parts"),
    ("contracts",),
    ("config", "init"),
    ("data", "checkpoint", "metrics", "engine", "gradients", "guard", "ranks", "planner"),
    ("phases", "resume", "doctor"),
    ("build",),
    ("generation", "trained", "validation"),
    ("evaluation", "trainer"),
    ("children", "dryrun", "train"),
    ("launch", "tuning"),
    ("commands",),
    ("cli",),
)
"""Rooms of `titan/`, lowest first. A room imports from lower floors and from itself, not from others on its own."""

OPEN_TO_PLUGINS = ("contracts", "cost", "errors", "plan", "options", "mesh", "data")

ORDINARY_WORDS = {
    ("titan/commands/generate.py", "text"): "a key of the command's JSON",
    ("titan/commands/convert.py", "hf"): "a format",
    ("titan/contracts.py", "compile"): "a phase",
    ("titan/doctor/device.py", "float8"): "a dtype",
    ("titan/dryrun/run.py", "compile"): "a phase",
    ("titan/planner/cluster.py", "float8"): "a dtype",
    ("titan/parts.py", "compile"): "the moment when a wrapper is put around a forward",
    ("titan/init.py", "constant"): "a way to fill a new weight",
    ("titan/plan.py", "constant"): "a way to fill a new weight",
}
"""Words of `titan/` that are also a plugin's name, reviewed: (file, word) -> the ordinary meaning it has there."""

BANNED = re.compile(r"(?i)(utils?|commons?|helpers?|misc)(\.py)?")
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60


# --- reading ------------------------------------------------------------------------------------------------------


def _files(root: Path, folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted((root / folder).rglob("*.py")):
        yield file.relative_to(root), _parsed(file.read_text())


@functools.cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _package(file: Path) -> list[str]:
    """The dotted name, in parts, of the package a file lies in; `plugins/` is `titan.plugins`."""
    parts = [*file.parent.parts]
    return parts if parts[0] == "titan" else ["titan", *parts]


def _imports(file: Path, tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name in parts) of everything imported, in functions too; not what only a type checker sees."""
    unseen = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            package = _package(file)
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                yield node.lineno, [*module, alias.name]


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string literal that is not a statement by itself, as docstrings are."""
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            yield node.lineno, node.value


def _plugin_names(root: Path) -> dict[str, Path]:
    """Name -> file of every registered plugin."""
    names = {}
    for file, tree in _files(root, "plugins"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or "register" not in [ast.unparse(d) for d in node.decorator_list]:
                continue
            for statement in node.body:
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "name":
                    names[ast.literal_eval(statement.value)] = file
    return names


# --- rules --------------------------------------------------------------------------------------------------------


def imports_run_downward(root: Path) -> Iterator[str]:
    """Within `titan/`, from a floor to lower ones only; `titan/__init__.py` imports nothing of it."""
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    for file, tree in _files(root, "titan"):
        room = file.with_suffix("").parts[1]
        if room != "__init__" and room not in floor_of:
            yield f"{file}: stands on no floor; give it one in FLOORS"
            continue
        floor = floor_of.get(room, -1)
        for line, name in _imports(file, tree):
            if name[0] != "titan" or len(name) == 1 or name[1] == room or name[1].startswith("__"):
                continue
            if name[1] == "plugins" or floor_of.get(name[1], len(FLOORS)) >= floor:
                yield f"{file}:{line}: imports {'.'.join(name)}, which does not lie below {room}"


def plugins_are_guests(root: Path) -> Iterator[str]:
    """A plugin imports the contracts, and nothing of another plugin."""
    for file, tree in _files(root, "plugins"):
        home = [*_package(file), *([] if file.name == "__init__.py" else [file.stem])]
        for line, name in _imports(file, tree):
            own = len(home) > 3 and name[:4] == home[:4]
            if name[0] == "plugins" or (name[:2] == ["titan", "plugins"] and not own):
                yield f"{file}:{line}: imports {'.'.join(name)}, another plugin's"
            elif name[0] == "titan" and name[1:2] not in [[room] for room in (*OPEN_TO_PLUGINS, "plugins")]:
                yield f"{file}:{line}: imports {'.'.join(name)}; open to plugins: {', '.join(OPEN_TO_PLUGINS)}"


def the_host_spells_no_plugin(root: Path) -> Iterator[str]:
    """No string of `titan/` is a plugin's name or a module of `plugins/`."""
    names = _plugin_names(root)
    for file, tree in _files(root, "titan"):
        for line, text in _strings(tree):
            if re.fullmatch(r"(titan\.)?plugins(\.\w+)+", text):
                yield f"{file}:{line}: spells {text!r}, a module of plugins/"
            if text in names and (file.as_posix(), text) not in ORDINARY_WORDS:
                yield f"{file}:{line}: spells {text!r}, the name of the plugin in {names[text]}"


def ordinary_words_are_needed(root: Path) -> Iterator[str]:
    """A word on the reviewed list is a plugin's name, and the file does spell it."""
    spelt = {(file.as_posix(), text) for file, tree in _files(root, "titan") for _, text in _strings(tree)}
    names = _plugin_names(root)
    for file, word in ORDINARY_WORDS:
        if word not in names or (file, word) not in spelt:
            yield f"({file}, {word!r}) need no longer stand in ORDINARY_WORDS"


def files_and_functions_are_small(root: Path) -> Iterator[str]:
    """In `titan/` and `plugins/`; the lines of a function include its docstring."""
    for folder in ("titan", "plugins"):
        for file, tree in _files(root, folder):
            lines = len((root / file).read_text().splitlines())
            if lines > MOST_LINES:
                yield f"{file}: {lines} lines; at most {MOST_LINES}"
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MOST_LINES_OF_A_FUNCTION:
                        place = f"{file}:{node.lineno}: {node.name}()"
                        yield f"{place} has {length} lines; at most {MOST_LINES_OF_A_FUNCTION}"


def names_say_what_is_inside(root: Path) -> Iterator[str]:
    """No drawer for everything, whether a file or a folder."""
    for folder in ("titan", "plugins", "tests", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if (path.suffix == ".py" or path.is_dir()) and BANNED.fullmatch(path.name):
                yield f"{path.relative_to(root)}: name it after what it does"


def folders_are_packages(root: Path) -> Iterator[str]:
    """Setup installs packages: a folder of Python files without `__init__.py` would be left out of the wheel."""
    for folder in ("titan", "plugins", "configs"):
        for file in sorted((root / folder).rglob("*.py")):
            if not (file.parent / "__init__.py").is_file():
                yield f"{file.parent.relative_to(root)}: has no __init__.py"


RULES: list[Callable[[Path], Iterator[str]]] = [
    imports_run_downward,
    plugins_are_guests,
    the_host_spells_no_plugin,
    ordinary_words_are_needed,
    files_and_functions_are_small,
    names_say_what_is_inside,
    folders_are_packages,
]


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house(rule: Callable[[Path], Iterator[str]]) -> None:
    faults = list(rule(ROOT))
    assert not faults, "\n" + "\n".join(faults)


def test_the_house_has_plugins() -> None:
    assert {"llama", "adamw", "fsdp", "bf16"} <= set(_plugin_names(ROOT))


PLUGIN = "@register\nclass C:\n    name = 'llama'\n"
PLANTED = [
    (imports_run_downward, "titan/mesh.py", "import titan.config", "titan/mesh.py:1: imports titan.config, which"),
    (imports_run_downward, "titan/mesh.py", "from titan import config", "imports titan.config"),
    (imports_run_downward, "titan/mesh.py", "from titan.plan import X", "imports titan.plan.X"),
    (imports_run_downward, "titan/mesh.py", "def f():\n    import titan.trainer", "titan/mesh.py:2"),
    (imports_run_downward, "titan/data/a.py", "from ..build import Run", "imports titan.build.Run"),
    (imports_run_downward, "titan/cli.py", "import titan.plugins.models", "imports titan.plugins.models"),
    (imports_run_downward, "titan/__init__.py", "from titan.log import log", "which does not lie below __init__"),
    (imports_run_downward, "titan/attic.py", "", "titan/attic.py: stands on no floor"),
    (plugins_are_guests, "plugins/a/b.py", "from titan.build import Run", "imports titan.build.Run; open to plugins"),
    (plugins_are_guests, "plugins/a/b.py", "import titan", "imports titan; open to plugins"),
    (plugins_are_guests, "plugins/a/b.py", "from titan.plugins.a.c import C", "imports titan.plugins.a.c.C, another"),
    (plugins_are_guests, "plugins/a/b.py", "from .c import C", "imports titan.plugins.a.c.C, another"),
    (plugins_are_guests, "plugins/a/b.py", "import plugins.a.c", "imports plugins.a.c, another"),
    (plugins_are_guests, "plugins/a/b/d.py", "from ..c import C", "imports titan.plugins.a.c.C, another"),
    (the_host_spells_no_plugin, "titan/a.py", "if x == 'llama': y()", "titan/a.py:1: spells 'llama'"),
    (the_host_spells_no_plugin, "titan/a.py", "i('titan.plugins.a.b')", "spells 'titan.plugins.a.b'"),
    (files_and_functions_are_small, "titan/a.py", "x = 1\n" * 401, "titan/a.py: 401 lines"),
    (files_and_functions_are_small, "plugins/a/b.py", "def f():\n" + "    x = 1\n" * 60, "f() has 61 lines"),
    (names_say_what_is_inside, "titan/data/utils.py", "", "titan/data/utils.py: name it"),
    (names_say_what_is_inside, "plugins/common/a.py", "", "plugins/common: name it"),
    (folders_are_packages, "plugins/new/a.py", "", "plugins/new: has no __init__.py"),
]


@pytest.mark.parametrize(("rule", "file", "source", "fault"), PLANTED)
def test_a_planted_violation_is_found(
    rule: Callable[[Path], Iterator[str]], file: str, source: str, fault: str, tmp_path: Path
) -> None:
    _write(tmp_path, "plugins/models/llama.py", PLUGIN)
    _write(tmp_path, "plugins/models/__init__.py", "")
    _write(tmp_path, file, source)
    [found] = rule(tmp_path)
    assert fault in found


def test_a_word_that_is_spelt_no_more_leaves_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "plugins/models/llama.py", PLUGIN)
    _write(tmp_path, "titan/a.py", "x = 'llama'")
    monkeypatch.setattr(f"{__name__}.ORDINARY_WORDS", {("titan/a.py", "llama"): "a pet"})
    assert list(the_host_spells_no_plugin(tmp_path)) == list(ordinary_words_are_needed(tmp_path)) == []
    _write(tmp_path, "titan/a.py", "x = 'alpaca'")
    assert list(ordinary_words_are_needed(tmp_path)) == ["(titan/a.py, 'llama') need no longer stand in ORDINARY_WORDS"]


@pytest.mark.parametrize(
    ("rule", "file", "source"),
    [
        (imports_run_downward, "titan/config/a.py", "from titan.config.b import B\nfrom titan.mesh import Mesh"),
        (imports_run_downward, "titan/contracts.py", "if TYPE_CHECKING:\n    from titan.config import Job"),
        (imports_run_downward, "titan/cli.py", "from titan import __version__"),
        (plugins_are_guests, "plugins/a/b.py", "import torch\nfrom titan.contracts import Model"),
        (plugins_are_guests, "plugins/a/b/__init__.py", "from .c import C\nfrom titan.plugins.a.b.d import D"),
        (plugins_are_guests, "plugins/a/b/e.py", "from .c import C"),
        (the_host_spells_no_plugin, "titan/a.py", "'llama'\nx = 'a llama'"),
    ],
)
def test_what_is_allowed_passes(rule: Callable[[Path], Iterator[str]], file: str, source: str, tmp_path: Path) -> None:
    _write(tmp_path, "plugins/models/llama.py", PLUGIN)
    _write(tmp_path, file, source)
    assert list(rule(tmp_path)) == []


def _write(root: Path, file: str, source: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source)
