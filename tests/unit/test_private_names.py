"""The private names of PyTorch in the code are those of the table in docs/versions.md, where each has its reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("titan", "plugins", "planner", "inference", "testing")
PYTHONS = {"_asdict", "_replace", "_fields", "os._exit", "argparse._ArgumentGroup", "argparse._SubParsersAction"}
PYTHONS |= {"_actions", "_option_string_actions"}
TORCHAOS = {"_precomputed_scale"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to functions, classes, variables and attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node).removeprefix("self.")


def _imported(tree: ast.Module) -> dict[str, str]:
    """Names of a module for what it imports -> full names."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names | {name.partition(".")[0]: name.partition(".")[0] for name in names if name in names.values()}


def _full(node: ast.expr, imported: dict[str, str]) -> str:
    """The full name of something imported, or of an attribute of it; else empty."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    above = _full(node.value, imported) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if above else ""


def _names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    imported = _imported(tree)
    yield from (full for full in imported.values() if any(map(_is_private, full.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            full = _full(node, imported)
            if full or node.attr not in own:
                yield full or node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield str(node.value)


def _found() -> set[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    # Attributes of modules of PyTorch that our classes name alike are not seen, but for these.
    own = {name for tree in trees for name in _own(tree)} - {"_parameters", "_threads", "_timeout", "_type"}
    names = {name for tree in trees for name in _names(tree, own) if not name.startswith("titan.")} - PYTHONS - TORCHAOS
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_every_private_name_of_pytorch_has_a_reason() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").partition("## Private names of PyTorch")[2]
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", page.partition("\n## ")[0], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert len(listed) == len(set(listed))
    assert set(listed) == _found()
