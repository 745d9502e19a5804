"""Plain optimizer state of parameters that are DTensors: saved where every rank holds it alike, refused otherwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoints import checkpointer_of
from tests.jobs import SAVING
from titan.contracts import ModelPart
from titan.errors import CheckpointError, PluginError
from titan.testing.jobs import train_job
from titan.testing.ranks import RankError, run_ranks

OUTSIDE = Path(__file__).parents[1] / "configs" / "outside.toml"


def _save_and_load(folder: Path, values: list[Tensor]) -> Any:
    """Each rank keeps its value as state of a weight [6, 4] that two ranks share: what comes back, or what is told."""
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    saving, loading = (torch.optim.SGD(model.parameters()) for _ in range(2))
    saving.state[model.weight]["kept"] = values[dist.get_rank()]
    checkpointer = checkpointer_of(folder)
    try:
        checkpointer.save(1, [ModelPart(model)], saving, {})
    except (PluginError, CheckpointError) as refused:
        dist.barrier()  # each rank refuses alone, maybe before its peer has connected to it
        return str(refused)
    checkpointer.load(folder / "step-00000001", [ModelPart(model)], loading)
    return loading.state[model.weight]["kept"]


@pytest.mark.parametrize("shape", [(3, 4), (6, 4)], ids=["shard", "whole"])
def test_plain_state_of_a_sharded_shape_is_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    told = {*run_ranks(_save_and_load, 2, tmp_path, [torch.ones(shape), torch.zeros(shape)])}
    what = f"SGD keeps 'kept' of weight as a plain tensor {list(shape)}, but the parameter [6, 4] is a DTensor"
    why = "a checkpoint keeps one rank's plain state; make it with torch.zeros_like(parameter)"
    assert told == {f"{what}, of which this rank holds [3, 4]: {why}"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.tensor(7), torch.arange(5.0)], ids=["scalar", "history"])
def test_plain_state_that_ranks_hold_alike_comes_back(value: Tensor, tmp_path: Path) -> None:
    for found in run_ranks(_save_and_load, 2, tmp_path, [value, value]):
        assert type(found) is Tensor and torch.equal(found, value)


def test_plain_state_that_ranks_hold_differently_is_refused(tmp_path: Path) -> None:
    told = run_ranks(_save_and_load, 2, tmp_path, [torch.ones(3), torch.zeros(3)])
    assert told[0] == told[1]
    assert "optimizer: the state 'weight.kept' has other values on rank 1 than on rank 0" in told[0]


def test_it_is_refused_after_the_first_step(tmp_path: Path) -> None:
    words = ("--optimizer.name", "slabs", "--mesh.dp_shard", "2")
    told = r"PluginError: _Slabs keeps 'mean' of embed\.weight as a plain tensor \[12[89], 24\]"
    with pytest.raises(RankError, match=told):
        train_job(tmp_path, 2, *words, *SAVING, config=OUTSIDE)
    assert len(train_job(tmp_path, 2, *words, "--train.steps", "2", config=OUTSIDE, name="unsaved").rows) == 2
