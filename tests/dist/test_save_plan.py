"""The plan of a save: what the ranks agree on, which of them writes what."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoints import HYBRID, SHARDED, adamw, checkpointer_of, model_on, save
from tests.jobs import stored
from titan.checkpoint.disk import plan
from titan.checkpoint.storage import box_of
from titan.contracts import ModelPart
from titan.errors import CheckpointError
from titan.testing.jobs import saved_tensors
from titan.testing.ranks import run_ranks


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, HYBRID)
    written = [path.stat().st_size for path in (tmp_path / "step-00000007").glob("rank-*.safetensors")]
    assert len(written) == 4 and max(written) < 1.2 * min(written)


def _save_three(folder: Path) -> list[int]:
    """How many tables rank 0 gathers for three saves, the last of a model with one tensor more."""
    made, make = [], plan.make
    plan.make = lambda tables: (made.append(len(tables)), make(tables))[1]
    model, checkpointer = model_on(SHARDED), checkpointer_of(folder)
    for step in (1, 2):
        checkpointer.save(step, [ModelPart(model)], adamw(model), {})
    if dist.get_rank() == 1:
        model.register_buffer("more", torch.ones(5))
    checkpointer.save(3, [ModelPart(model)], adamw(model), {})
    plan.make = make
    return made


def test_a_save_is_planned_again_only_when_tensors_change(tmp_path: Path) -> None:
    assert run_ranks(_save_three, 4, tmp_path) == [[4, 4], [], [], []]
    assert "model.more" in stored(tmp_path / "step-00000003").tensors
    assert torch.equal(saved_tensors(tmp_path / "step-00000003")["model.more"], torch.ones(5))
    assert "model.more" not in stored(tmp_path / "step-00000002").tensors


def _save_other_shapes(folder: Path) -> str:
    model = nn.Linear(3, 4 + dist.get_rank())
    with pytest.raises(CheckpointError) as refused:
        checkpointer_of(folder).save(1, [ModelPart(model)], adamw(model), {})
    return str(refused.value)


def test_ranks_whose_tensors_differ_in_shape_are_refused(tmp_path: Path) -> None:
    told = run_ranks(_save_other_shapes, 2, tmp_path)
    assert told[0] == told[1] and "model.weight is [4, 3] of F32 and [5, 3] of F32" in told[0]
    assert list(tmp_path.iterdir()) == []


def _box_of_three_rows_of_ten() -> str:
    mesh = init_device_mesh("cpu", (2,))
    fits = DTensor.from_local(torch.zeros(5, 2), mesh, [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1))
    assert box_of(fits) == ((5 * dist.get_rank(), 0), (5, 2))
    short = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1))
    with pytest.raises(CheckpointError) as refused:
        box_of(short)
    return str(refused.value)


def test_a_part_that_is_not_what_its_placements_say_is_refused() -> None:
    said = "a rank holds [3, 2] of a tensor, but its placements give it [5, 2]"
    assert run_ranks(_box_of_three_rows_of_ten, 2) == [said] * 2
