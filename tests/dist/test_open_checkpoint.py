"""Checkpoints are open: PyTorch's DCP and the safetensors library read them, without titan.

Run on each version of PyTorch that pyproject admits (docs/versions.md).
"""

import contextlib
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tests.checkpoints import (
    BOTH,
    HYBRID,
    ONE,
    SCALED,
    TENSOR,
    Layout,
    adamw,
    checkpointer_of,
    local_part,
    model_on,
    save,
)
from titan.checkpoint import rng_state
from titan.contracts import ModelPart
from titan.testing.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "reliability.md"
STEP = "step-00000007"


def wanted(layout: Layout) -> dict[str, Tensor]:
    """What `tests.checkpoints.save` saves of a model on a layout, by the names in the files."""
    model = model_on(layout)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        slots = {f"optimizer.{name}.{slot}": parameter.detach() * factor for slot, factor in SCALED.items()}
        tensors |= slots | {f"optimizer.{name}.step": torch.tensor(7.0)}
    return tensors


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(local_part(found[name]), local_part(tensor)), name


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _read_by_dcp(folder: Path, layout: Layout) -> None:
    expected = wanted(layout)
    found = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert_equal(found, expected)


@pytest.mark.parametrize("saved", [BOTH, HYBRID], ids=str)
def test_dcp_reads_what_ranks_saved_whole_and_resharded(tmp_path: Path, saved: Layout) -> None:
    run_ranks(save, 4, tmp_path, saved)
    _read_by_dcp(tmp_path / STEP, ONE)
    run_ranks(_read_by_dcp, 4, tmp_path / STEP, TENSOR)
    run_ranks(_read_by_dcp, 4, tmp_path / STEP, saved)


def test_the_readme_reads_a_model(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, BOTH)
    model = model_on(ONE)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(-1)
    [code] = re.findall(r"```python\n(import torch.distributed.checkpoint.*?)```", README.read_text(), re.S)
    code, found = re.subn(r'folder = ".*"', f"folder = {str(tmp_path / STEP)!r}", code)
    assert found == 1
    exec(code, {"model": model})
    expected = wanted(ONE)
    assert_equal(model.state_dict(), {name: expected[name] for name in model.state_dict()})


def test_a_run_of_one_rank_is_one_file(tmp_path: Path) -> None:
    save(tmp_path, ONE)
    [file] = (tmp_path / STEP).glob("**/*.safetensors")
    tensors = load_file(file)
    assert_equal(tensors, wanted(ONE))
    model = model_on(ONE)
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")})


def test_state_of_techniques_lies_apart(tmp_path: Path) -> None:
    """DCP takes each safetensors file of a folder for a part of one state."""
    model = model_on(ONE)
    optimizer, state = adamw(model), {"average": {"weights": {"norm.weight": torch.ones(6)}, "count": 3}}
    rest = {"techniques": state, "rng": rng_state(torch.device("cpu"))}
    checkpointer_of(tmp_path).save(7, [ModelPart(model)], optimizer, rest)
    techniques = load_file(tmp_path / STEP / "techniques" / "rank-00000.safetensors")
    assert_equal(techniques, {"average.weights.norm.weight": torch.ones(6)})
    others = load_file(tmp_path / STEP / "rank-00000.safetensors")
    assert_equal(others, {**model.state_dict(), "rng.0.cpu": torch.get_rng_state()})
    told = json.loads((tmp_path / STEP / "state.json").read_text())["rest"]["techniques"]["average"]
    assert told["count"] == 3


def test_the_docs_read_a_checkpoint_with_safetensors_and_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(save, 4, tmp_path, BOTH)
    [script] = re.findall(r"```python\n(import json\n.*?)```", PAGE.read_text(), re.S)
    assert len(script.splitlines()) <= 20 and "titan" not in script
    monkeypatch.setattr("sys.argv", ["read.py", str(tmp_path / STEP)])
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(script, names)
    assert_equal(names["tensors"], wanted(ONE))
    assert "step 7" in said.getvalue()
