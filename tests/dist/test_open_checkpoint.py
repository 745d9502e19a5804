"""Checkpoints are open: PyTorch's DCP and the safetensors library read them, without titan.

Which versions of PyTorch it was run on: docs/reliability.md.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tests.checkpoints import (
    assert_same,
    checkpointer_of,
    copied,
    known,
    made,
    model_on,
    save,
)
from titan.checkpoint import rng_state
from titan.testing.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "reliability.md"
STEP = "step-00000007"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def wanted(layout: str) -> dict[str, Tensor]:
    """What `tests.checkpoints.save` saves of a model on a layout."""
    return copied(*known(model_on(layout)))


def _read_by_dcp(folder: Path, layout: str) -> None:
    expected = wanted(layout)
    found = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert_same(found, expected)


@pytest.mark.parametrize("saved", ["both", "hybrid"])
def test_dcp_reads_what_ranks_saved_whole_and_resharded(tmp_path: Path, saved: str) -> None:
    run_ranks(save, 4, tmp_path, saved)
    _read_by_dcp(tmp_path / STEP, "one rank")
    run_ranks(_read_by_dcp, 4, tmp_path / STEP, "tensor")
    run_ranks(_read_by_dcp, 4, tmp_path / STEP, saved)


def test_the_readme_reads_a_model(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, "both")
    model, expected = model_on("one rank"), wanted("one rank")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(-1)
    [code] = re.findall(r"```python\n(import torch.distributed.checkpoint.*?)```", README.read_text(), re.S)
    code, found = re.subn(r'folder = ".*"', f"folder = {str(tmp_path / STEP)!r}", code)
    assert found == 1
    exec(code, {"model": model})
    assert_same(model.state_dict(), {name: expected[name] for name in model.state_dict()})


def test_a_run_of_one_rank_is_one_file(tmp_path: Path) -> None:
    save(tmp_path, "one rank")
    [file] = (tmp_path / STEP).glob("**/*.safetensors")
    assert_same(load_file(file), wanted("one rank"))


def test_state_of_techniques_lies_apart(tmp_path: Path) -> None:
    """DCP takes each safetensors file of a folder for a part of one state."""
    parts, optimizer = made()
    average = {"weights": {"norm.weight": torch.ones(6)}}
    rest = {"techniques": {"average": average}, "rng": rng_state(torch.device("cpu"))}
    checkpointer_of(tmp_path).save(7, parts, optimizer, rest)
    apart = load_file(tmp_path / STEP / "techniques" / "rank-00000.safetensors")
    assert_same(apart, {"average.weights.norm.weight": torch.ones(6)})
    others = load_file(tmp_path / STEP / "rank-00000.safetensors")
    assert_same(others, {**copied(parts, optimizer), "rng.0.cpu": torch.get_rng_state()})


def test_the_docs_read_with_safetensors_and_json_alone(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run_ranks(save, 4, tmp_path, "both")
    [script] = re.findall(r"```python\n(import json\n.*?)```", PAGE.read_text(), re.S)
    assert len(script.splitlines()) <= 20 and "titan" not in script
    monkeypatch.setattr("sys.argv", ["read.py", str(tmp_path / STEP)])
    names: dict[str, Any] = {}
    exec(script, names)
    assert_same(names["tensors"], wanted("one rank"))
    assert "step 7" in capsys.readouterr().out
