"""The private names of PyTorch in the code are those of the table in docs/versions.md, where each has its reason."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = str(getattr(node.args[1], "value", ""))
            if _is_private(name) and name not in own:
                yield name
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            full = _full(node, imported)
            if full or node.attr not in own:
                yield full or node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield str(node.value)


def _found() -> dict[str, Path]:
    """Name -> a file that has it."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    # Attributes of modules of PyTorch that our classes name alike are not seen, but for these.
    own = {name for tree in trees for name in _own(tree)} - {"_parameters", "_threads", "_timeout", "_type"}
    names = {name: file for file, tree in zip(files, trees, strict=True) for name in _names(tree, own)}
    torchs = {name for name in names if not name.startswith("titan.")} - PYTHONS - TORCHAOS
    whole = (name for name in torchs if not any(other.startswith(f"{name}.") for other in torchs))
    return {name: names[name].relative_to(ROOT) for name in whole}


def _rows() -> list[tuple[str, str]]:
    """(name, what for) of the table."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").partition("## Private names of PyTorch")[2]
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", page.partition("\n## ")[0], re.MULTILINE)
    return [(name, what_for) for names, what_for in rows for name in re.findall(r"`(.+?)`", names)]


def test_every_private_name_of_pytorch_has_a_reason() -> None:
    listed, found = [name for name, _ in _rows()], _found()
    assert len(listed) == len(set(listed))
    new = [f"{name} ({file})" for name, file in found.items() if name not in listed]
    gone = [name for name in listed if name not in found]
    assert not new, f"look for public ways to {', '.join(new)}; else give the reason in docs/versions.md"
    assert not gone, f"no code uses {', '.join(gone)} any more: take them out of the table in docs/versions.md"


def _node() -> object:
    return torch.ones(1, requires_grad=True).exp().grad_fn


OWNERS: dict[str, Callable[[], object]] = {
    "_version": lambda: torch.ones(1),
    "_parameters": nn.Module,
    "_flatten": lambda: DeviceMesh,
    "_unflatten": lambda: DeviceMesh,
    "_Options": lambda: dist.ProcessGroupGloo,
    "_devices": lambda: dist.ProcessGroupGloo._Options(),
    "_threads": lambda: dist.ProcessGroupGloo._Options(),
    "_spec": lambda: SimpleNamespace(**DTensor.__annotations__),
    "_dump_snapshot": lambda: torch.cuda.memory,
    "_record_memory_history": lambda: torch.cuda.memory,
    "_get_fsdp_state": lambda: FSDPModule,
    "_root_post_backward_final_callback": lambda: resolve_name(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
    ),
    "_sequence_nr": _node,
}
"""Names that stand for an attribute -> what has it; else an operation of ATen has the name."""


@pytest.mark.parametrize(("name", "what_for"), _rows())
def test_this_pytorch_has_the_name(name: str, what_for: str) -> None:
    """What breaks where PyTorch has dropped it is `what_for`."""
    assert _is_there(name), f"PyTorch {torch.__version__} has no {name}, which titan needs: {what_for}"


def _is_there(name: str) -> bool:
    if not name.startswith("torch."):
        return hasattr(OWNERS.get(name, lambda: torch.ops.aten)(), name)
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
