"""Imports run downward, plugins import contracts only, files and functions stay small.

The order of the units stands in docs/design.md; `python -m bench.house` lists and draws them. Each rule reads the
source alone (nothing is imported) and returns sentences; each has a test that a planted violation is found.
"""

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.house import (
    FOLDERS,
    TABLE,
    circles,
    dotted_package_of,
    files_of,
    graph_of,
    imports,
    imports_of_files,
    parsed,
    picture,
    unit_of,
    units_of,
)

ROOT = Path(__file__).parents[2]

OPEN_TO_PLUGINS = ("titan.contracts", "titan.layers", "titan.errors", "titan.terminal", "titan.packages")
OPEN_TO_PLUGINS += ("titan.paths", "titan.data.tokens")
"""What plugins may import of titan."""

ORDINARY_WORDS = {
    ("inference/commands/generate.py", "text"): "a key of the command's JSON",
    ("inference/commands/convert.py", "hf"): "a format",
    ("titan/contracts/technique.py", "compile"): "a phase",
    ("planner/doctor/device.py", "float8"): "a dtype",
    ("titan/config/groups.py", "expert"): "a stack of weights, to the match of a group",
    ("planner/dryrun/run.py", "compile"): "a phase",
    ("planner/dryrun/result.py", "bytes_sent"): "a key of the JSON",
    ("planner/machine/cluster.py", "float8"): "a dtype",
    ("titan/contracts/base/parts.py", "compile"): "the moment when a wrapper is put around a forward",
    ("titan/training/init.py", "constant"): "a way to fill a new weight",
    ("titan/contracts/base/spec.py", "constant"): "a way to fill a new weight",
    ("plugins/memory/activation_checkpoint.py", "compile"): "a phase",
    ("plugins/data/jsonl.py", "jsonl"): "the ending of a file's name",
    ("plugins/data/jsonl.py", "text"): "a key of a line",
    ("plugins/data/parquet.py", "text"): "a column",
    ("plugins/precision/float8.py", "compile"): "a phase",
    ("plugins/schedules/wsd.py", "linear"): "the shape of a decay",
    ("testing/jobs.py", "text"): "a folder of the jobs",
    ("titan/train.py", "tensorboard"): "the program of that name",
    ("titan/contracts/base/cost/__init__.py", "attention"): "what a collective belongs to",
    ("planner/doctor/cluster_file.py", "attention"): "a kernel that is timed",
    ("planner/doctor/device.py", "attention"): "a kernel that is timed",
    ("planner/picture/traffic.py", "attention"): "what a collective belongs to",
    ("planner/step/work.py", "attention"): "what a collective belongs to",
    ("plugins/memory/activation_checkpoint.py", "attention"): "a mode",
    ("plugins/parallel/context/costs.py", "attention"): "what a collective belongs to",
}
"""Words that are a plugin's name too, or another plugin's, reviewed: (file, word) -> the ordinary meaning there."""

BANNED = re.compile(r"(?i)(utils?|commons?|helpers?|misc)(\.py)?")
MOST_LINES = 400
MOST_LINES_WITH_A_REASON = 430
LONG = {
    "plugins/attention/cpu_kernel.py": "a library that is compiled, and the operations that call it by one struct",
}
"""Files of more than `MOST_LINES` -> why each is one file."""
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_THE_LOOP = 40
MEDIAN_LINES = 200
MOST_FILES = 10
WITHOUT_METHODS = {"ABC", "Enum", "Exception", "Generic", "NamedTuple", "Protocol"}


# --- reading ------------------------------------------------------------------------------------------------------


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string literal that is not a statement by itself, as docstrings are."""
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            yield node.lineno, node.value


def _plugin_names(root: Path) -> dict[str, Path]:
    """Name -> file of every registered plugin."""
    return {
        ast.literal_eval(statement.value): file
        for file, tree in files_of(root, "plugins")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "register" in map(ast.unparse, node.decorator_list)
        for statement in node.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "name"
    }


def _host(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """All that knows no plugin."""
    for folder in FOLDERS:
        yield from files_of(root, folder)


# --- rules --------------------------------------------------------------------------------------------------------


def imports_run_downward(root: Path) -> Iterator[str]:
    """From a unit to those listed above it; `titan/__init__.py` imports nothing of titan."""
    units = units_of(root)
    for file, others in imports_of_files(root).items():
        unit = unit_of(file, units)
        if unit is None and not _only_says_what_it_is(root / file):
            yield f"{file}: is in no unit; give it one in {TABLE}"
        for other, line in others.items():
            theirs = unit_of(other, units)
            if unit and theirs and theirs != unit and units.index(theirs) > units.index(unit):
                yield f"{file}:{line}: imports {other}, but {theirs} stands below {unit} in {TABLE}"
    for file, tree in _host(root):
        for line, name in imports(file, tree):
            if name[:2] == ["titan", "plugins"]:
                yield f"{file}:{line}: imports {'.'.join(name)}, a plugin's"


def _only_says_what_it_is(file: Path) -> bool:
    """Whether a file is the `__init__` of a package and holds nothing but assignments and its docstring."""
    body = parsed(file.read_text()).body
    return file.name == "__init__.py" and all(isinstance(node, ast.Expr | ast.Assign) for node in body)


def units_exist(root: Path) -> Iterator[str]:
    """Every unit of the table exists."""
    for unit in units_of(root):
        if not (root / unit).exists():
            yield f"{TABLE}: {unit} does not exist"


def no_two_files_import_each_other(root: Path) -> Iterator[str]:
    """Neither directly nor through others, types included."""
    for group in circles(imports_of_files(root)):
        yield f"import each other: {', '.join(group)}"


def plugins_import_contracts_only(root: Path) -> Iterator[str]:
    """A plugin imports the contracts, and nothing of another plugin."""
    for file, tree in files_of(root, "plugins"):
        home = [*dotted_package_of(file), *([] if file.name == "__init__.py" else [file.stem])]
        for line, name in imports(file, tree):
            own = len(home) > 3 and name[:4] == home[:4]
            if name[0] == "plugins" or (name[:2] == ["titan", "plugins"] and not own):
                yield f"{file}:{line}: imports {'.'.join(name)}, another plugin's"
            elif name[0] == "titan" and name[1:2] != ["plugins"] and not _is_open(".".join(name)):
                yield f"{file}:{line}: imports {'.'.join(name)}; open to plugins: {', '.join(OPEN_TO_PLUGINS)}"


def _is_open(name: str) -> bool:
    return any(f"{name}.".startswith(f"{unit}.") for unit in OPEN_TO_PLUGINS)


def nobody_spells_a_plugin(root: Path) -> Iterator[str]:
    """No string is the name of a plugin but in its own file, and outside of `plugins/` none is a module of that."""
    names = _plugin_names(root)
    for folder in (*FOLDERS, "plugins"):
        for file, tree in files_of(root, folder):
            for line, text in _strings(tree):
                if folder != "plugins" and re.fullmatch(r"(titan\.)?plugins(\.\w+)+", text):
                    yield f"{file}:{line}: spells {text!r}, a module of plugins/"
                if text in names and not _is_of(file, names[text]) and (file.as_posix(), text) not in ORDINARY_WORDS:
                    yield f"{file}:{line}: spells {text!r}, the name of the plugin in {names[text]}"


def _is_of(file: Path, owner: Path) -> bool:
    """Whether a file is a plugin's own, or lies in the folder that the plugin fills."""
    return file == owner or (owner.name == "__init__.py" and owner.parent in file.parents)


def ordinary_words_are_needed(root: Path) -> Iterator[str]:
    """A word on the reviewed list is a plugin's name, and the file does spell it."""
    spelt = {
        (file.as_posix(), text)
        for folder in (*FOLDERS, "plugins")
        for file, tree in files_of(root, folder)
        for _, text in _strings(tree)
    }
    names = _plugin_names(root)
    for file, word in ORDINARY_WORDS:
        if word not in names or (file, word) not in spelt:
            yield f"({file}, {word!r}) need no longer stand in ORDINARY_WORDS"


def files_and_functions_are_small(root: Path) -> Iterator[str]:
    """The lines of a function include its docstring."""
    for folder in (*FOLDERS, "plugins"):
        for file, tree in files_of(root, folder):
            lines = len((root / file).read_text().splitlines())
            most = MOST_LINES_WITH_A_REASON if file.as_posix() in LONG else MOST_LINES
            if lines > most:
                yield f"{file}: {lines} lines; at most {most}"
            elif file.as_posix() in LONG and lines <= MOST_LINES:
                yield f"{file} need no longer stand in LONG"
            yield from _longer_functions(file, tree, MOST_LINES_OF_A_FUNCTION)


def _longer_functions(file: Path, tree: ast.Module, most: int, *names: str) -> Iterator[str]:
    """Those with more lines than `most`, of these names if any are given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (not names or node.name in names):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > most:
                yield f"{file}:{node.lineno}: {node.name}() has {length} lines; at most {most}"


def methods_have_docstrings(root: Path) -> Iterator[str]:
    """Public ones of public classes, but for overrides: the method that they override has one, here or in a library."""
    trees = [found for folder in (*FOLDERS, "plugins") for found in files_of(root, folder)]
    classes = {node.name: node for _, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def inherited(node: ast.ClassDef) -> set[str] | None:
        """Names of the methods of all bases; None: a base is of a library."""
        names = set[str]()
        for base in {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} - WITHOUT_METHODS:
            more = inherited(classes[base]) if base in classes and base != node.name else None
            if more is None:
                return None
            names |= more | {each.name for each in classes[base].body if isinstance(each, ast.FunctionDef)}
        return names

    for file, tree in trees:
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or (above := inherited(node)) is None:
                continue
            for each in node.body:
                documented = not isinstance(each, ast.FunctionDef) or ast.get_docstring(each) or each.name in above
                if not documented and not each.name.startswith("_"):
                    yield f"{file}:{each.lineno}: {node.name}.{each.name}() has no docstring, and overrides nothing"


def folders_hold_few_files(root: Path) -> Iterator[str]:
    """Not counting `__init__.py`; half of the files are short."""
    lengths = [len((root / file).read_text().splitlines()) for file, _ in _host(root)]
    if statistics.median(lengths) > MEDIAN_LINES:
        yield f"half of the files of {', '.join(FOLDERS)} are longer than {MEDIAN_LINES} lines"
    for folder in {file.parent for file, _ in _host(root)}:
        files = [file for file in (root / folder).glob("*.py") if file.name != "__init__.py"]
        if len(files) > MOST_FILES:
            yield f"{folder}: {len(files)} files; at most {MOST_FILES}"


def the_loop_is_short(root: Path) -> Iterator[str]:
    """The training loop, and the step."""
    for file, tree in files_of(root, "titan/training"):
        if file.stem == "trainer":
            yield from _longer_functions(file, tree, MOST_LINES_OF_THE_LOOP, "train", "step")


def names_say_what_is_inside(root: Path) -> Iterator[str]:
    """No drawer for everything, whether a file or a folder."""
    for folder in (*FOLDERS, "plugins", "tests", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if (path.suffix == ".py" or path.is_dir()) and BANNED.fullmatch(path.name):
                yield f"{path.relative_to(root)}: name it after what it does"


def folders_are_packages(root: Path) -> Iterator[str]:
    """Setup installs packages: a folder of Python files without `__init__.py` would be left out of the wheel."""
    for folder in (*FOLDERS, "plugins", "configs"):
        for file in sorted((root / folder).rglob("*.py")):
            if not (file.parent / "__init__.py").is_file():
                yield f"{file.parent.relative_to(root)}: has no __init__.py"


RULES: list[Callable[[Path], Iterator[str]]] = [
    imports_run_downward,
    units_exist,
    no_two_files_import_each_other,
    plugins_import_contracts_only,
    nobody_spells_a_plugin,
    ordinary_words_are_needed,
    files_and_functions_are_small,
    methods_have_docstrings,
    folders_hold_few_files,
    the_loop_is_short,
    names_say_what_is_inside,
    folders_are_packages,
]


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rules(rule: Callable[[Path], Iterator[str]]) -> None:
    faults = list(rule(ROOT))
    assert not faults, "\n" + "\n".join(faults)


def test_the_picture_in_the_docs_is_up_to_date() -> None:
    drawn = picture(graph_of(ROOT, units_of(ROOT)))
    again = "python -m bench.house --plot docs/house.svg"
    assert (ROOT / "docs/house.svg").read_text() == drawn, f"draw it again: {again}"


def test_there_are_plugins() -> None:
    assert {"llama", "adamw", "fsdp", "bf16"} <= set(_plugin_names(ROOT))


PLUGIN = "@register\nclass C:\n    name = 'llama'\n"
UNITS = "".join(f"| `titan/{unit}` | x |\n" for unit in ("low.py", "inner/base/", "inner/", "high/", "cli.py"))
"""The table of a small checkout, in which each file with a fault stands."""
ANOTHERS = "imports titan.plugins.a.c.C, another"
PLANTED = [
    (imports_run_downward, "titan/low.py", "import titan.high", "titan/low.py:1: imports titan/high/__init__.py, but"),
    (imports_run_downward, "titan/low.py", "from titan import high", "imports titan/high/__init__.py"),
    (imports_run_downward, "titan/low.py", "from titan.high import X", "imports titan/high/__init__.py"),
    (imports_run_downward, "titan/low.py", "def f():\n    import titan.high", "titan/low.py:2"),
    (imports_run_downward, "titan/low.py", "if TYPE_CHECKING:\n    from titan.high import X", "titan/low.py:2"),
    (imports_run_downward, "titan/inner/base/a.py", "from ..b import X", "imports titan/inner/b.py, but titan/inner/"),
    (imports_run_downward, "titan/inner/a.py", "from ..high import X", "imports titan/high/__init__.py"),
    (imports_run_downward, "titan/cli.py", "import titan.plugins.models", "imports titan.plugins.models, a plugin's"),
    (imports_run_downward, "titan/unlisted.py", "", "titan/unlisted.py: is in no unit"),
    (imports_run_downward, "titan/unlisted/__init__.py", "from titan.low import X", "is in no unit"),
    (units_exist, TABLE, UNITS + "| `titan/gone/` | x |\n", "titan/gone/ does not exist"),
    (no_two_files_import_each_other, "titan/inner/b.py", "from titan.inner.c import C", "titan/inner/b.py, titan/"),
    (plugins_import_contracts_only, "plugins/a/b.py", "from titan.build import B", "imports titan.build.B; open to"),
    (plugins_import_contracts_only, "plugins/a/b.py", "import titan", "imports titan; open to plugins"),
    (plugins_import_contracts_only, "plugins/a/b.py", "from titan.plugins.a.c import C", ANOTHERS),
    (plugins_import_contracts_only, "plugins/a/b.py", "from .c import C", ANOTHERS),
    (plugins_import_contracts_only, "plugins/a/b.py", "import plugins.a.c", "imports plugins.a.c, another"),
    (plugins_import_contracts_only, "plugins/a/b/d.py", "from ..c import C", ANOTHERS),
    (nobody_spells_a_plugin, "plugins/a/b.py", "if x == 'llama': y()", "plugins/a/b.py:1: spells 'llama'"),
    (nobody_spells_a_plugin, "titan/a.py", "if x == 'llama': y()", "titan/a.py:1: spells 'llama'"),
    (nobody_spells_a_plugin, "titan/a.py", "i('titan.plugins.a.b')", "spells 'titan.plugins.a.b'"),
    (files_and_functions_are_small, "titan/a.py", "x = 1\n" * 401, "titan/a.py: 401 lines"),
    (files_and_functions_are_small, "plugins/a/b.py", "def f():\n" + "    x = 1\n" * 60, "f() has 61 lines"),
    (methods_have_docstrings, "plugins/a/b.py", "class C(D):\n def f(self): ...\nclass D: ...", "b.py:2: C.f() has no"),
    (the_loop_is_short, "titan/training/trainer.py", "def train():\n" + "    x = 1\n" * 40, "train() has 41 lines"),
    (names_say_what_is_inside, "titan/data/utils.py", "", "titan/data/utils.py: name it"),
    (names_say_what_is_inside, "plugins/common/a.py", "", "plugins/common: name it"),
    (folders_are_packages, "plugins/new/a.py", "", "plugins/new: has no __init__.py"),
]


@pytest.mark.parametrize(("rule", "file", "source", "fault"), PLANTED)
def test_a_planted_violation_is_found(
    rule: Callable[[Path], Iterator[str]], file: str, source: str, fault: str, tmp_path: Path
) -> None:
    if rule is not folders_are_packages:  # which would find the small checkout itself
        _checkout(tmp_path)
    _write(tmp_path, file, source)
    [found] = rule(tmp_path)
    assert fault in found


def test_a_folder_of_many_files_is_found(tmp_path: Path) -> None:
    _checkout(tmp_path)
    for number in range(11):
        _write(tmp_path, f"titan/high/f{number}.py", "x = 1\n" * 201)
    assert sorted(folders_hold_few_files(tmp_path)) == [
        "half of the files of titan, inference, planner, testing are longer than 200 lines",
        "titan/high: 11 files; at most 10",
    ]


def test_a_word_that_is_spelt_no_more_leaves_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "plugins/models/llama.py", PLUGIN)
    _write(tmp_path, "titan/a.py", "x = 'llama'")
    monkeypatch.setattr(f"{__name__}.ORDINARY_WORDS", {("titan/a.py", "llama"): "a pet"})
    assert list(nobody_spells_a_plugin(tmp_path)) == list(ordinary_words_are_needed(tmp_path)) == []
    _write(tmp_path, "titan/a.py", "x = 'alpaca'")
    assert list(ordinary_words_are_needed(tmp_path)) == ["(titan/a.py, 'llama') need no longer stand in ORDINARY_WORDS"]


@pytest.mark.parametrize(
    ("rule", "file", "source"),
    [
        (imports_run_downward, "titan/inner/a.py", "from titan.inner.b import B\nfrom titan.low import X"),
        (imports_run_downward, "titan/high/a.py", "from titan.inner import b"),
        (imports_run_downward, "titan/cli.py", "from titan import __version__"),
        (imports_run_downward, "titan/unlisted/__init__.py", '"""Says what it is."""\nNAMES = ("a",)'),
        (no_two_files_import_each_other, "titan/inner/a.py", "from titan.inner.c import C"),
        (plugins_import_contracts_only, "plugins/a/b.py", "import torch\nfrom titan.contracts import Model"),
        (plugins_import_contracts_only, "plugins/a/b/__init__.py", "from .c import C\nimport titan.plugins.a.b.d"),
        (plugins_import_contracts_only, "plugins/a/b/e.py", "from .c import C"),
        (nobody_spells_a_plugin, "plugins/models/llama.py", "x = 'llama'\n" + PLUGIN),
        (nobody_spells_a_plugin, "titan/a.py", "'llama'\nx = 'a llama'"),
        (methods_have_docstrings, "titan/a.py", "class D:\n def f(s):\n  'Why.'\nclass C(D):\n def f(s): ..."),
        (methods_have_docstrings, "titan/a.py", "class C(Module):\n def forward(s): ..."),
    ],
)
def test_what_is_allowed_passes(rule: Callable[[Path], Iterator[str]], file: str, source: str, tmp_path: Path) -> None:
    _checkout(tmp_path)
    _write(tmp_path, file, source)
    assert list(rule(tmp_path)) == []


def _checkout(root: Path) -> None:
    """A small checkout without a fault, with one plugin."""
    for file in ("low", "inner/__init__", "inner/base/__init__", "inner/b", "high/__init__", "cli"):
        _write(root, f"titan/{file}.py", "")
    _write(root, "titan/inner/c.py", "from titan.inner.b import B")
    _write(root, TABLE, UNITS)
    _write(root, "plugins/models/llama.py", PLUGIN)
    _write(root, "plugins/models/__init__.py", "")


def _write(root: Path, file: str, source: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source)
