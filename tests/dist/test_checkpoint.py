"""Checkpoints of many ranks: bit-equal on any layout, one outcome on all ranks, training undisturbed."""

import resource
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoints import (
    LAYOUTS,
    SCALED,
    adamw,
    assert_same,
    assert_same_rest,
    checkpointer_of,
    copied,
    flip,
    known,
    local_part,
    model_on,
    names_in,
    save,
    train,
)
from tests.jobs import stored
from tests.sweeps import but_sweep
from titan.checkpoint import rng_state, storage
from titan.checkpoint.disk import manifest, plan
from titan.contracts import ModelPart
from titan.errors import CheckpointError, ConfigError
from titan.testing.jobs import saved_tensors
from titan.testing.ranks import RankError, run_ranks

STEP = "step-00000007"


def _load_and_compare(folder: Path, layout: str, saved: str) -> None:
    model = model_on(layout)
    expected = copied(*known(model))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(-1)
    parts, optimizer = [ModelPart(model)], adamw(model)
    assert checkpointer_of(folder).load(folder / STEP, parts, optimizer) == {"layout": saved}
    assert_same(copied(parts, optimizer), expected)
    for parameter, state in optimizer.state.items():
        sharded = dict.fromkeys(SCALED, isinstance(parameter, DTensor)) | {"step": False}
        assert {slot: isinstance(value, DTensor) for slot, value in state.items()} == sharded


def _save_and_load_on_others(folder: Path, saved: str) -> None:
    if saved != "one rank":
        save(folder, saved, asynchronous=True)
    for layout in ("sharded", "hybrid", "tensor", "both"):
        _load_and_compare(folder, layout, saved)


@pytest.mark.parametrize("saved", but_sweep(LAYOUTS, "one rank", "hybrid", "both"))
def test_saved_on_one_layout_loads_bit_equal_on_another(tmp_path: Path, saved: str) -> None:
    if saved == "one rank":
        save(tmp_path, saved)
    run_ranks(_save_and_load_on_others, 4, tmp_path, saved)
    _load_and_compare(tmp_path, "one rank", saved)


def _wrong_boxes(shards: int, slices: int, most: int) -> list[int]:
    """Rows of which this rank holds others than `box_of` says, where FSDP shards slices of tensor parallelism."""
    mesh, wrong = init_device_mesh("cpu", (shards, slices), mesh_dim_names=("shard", "tensor")), []
    for rows in range(1, most):
        linear, values = nn.Linear(2, rows, bias=False), torch.arange(2.0 * rows).view(rows, 2)
        linear.weight = nn.Parameter(distribute_tensor(values, mesh["tensor"], [Shard(0)], src_data_rank=None))
        fully_shard(linear, mesh=mesh["shard"])
        (begin, _), sizes = storage.box_of(linear.weight)
        if not torch.equal(local_part(linear.weight), values[begin : begin + sizes[0]]):
            wrong.append(rows)
    return wrong


def test_uneven_shards_of_uneven_slices_are_where_they_are() -> None:
    assert run_ranks(_wrong_boxes, 6, 3, 2, 20) == [[]] * 6


def _save_after_validation(folder: Path) -> None:
    model = model_on("one rank")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    parts, optimizer = [ModelPart(model)], adamw(model)
    train(parts, optimizer)
    with torch.no_grad():
        model(torch.arange(8))
    assert not isinstance(model.up.weight, DTensor), "validation leaves gathered parameters behind"
    checkpointer_of(folder).save(1, parts, optimizer, {})


def test_save_after_a_forward_without_backward(tmp_path: Path) -> None:
    run_ranks(_save_after_validation, 2, tmp_path)
    tensors = stored(tmp_path / "step-00000001").tensors
    assert tensors["model.up.weight"].chunks == 2
    assert {"optimizer.up.weight.exp_avg", "optimizer.up.weight.step"} <= tensors.keys()


def _random_state(folder: Path, load: bool) -> dict[str, Any]:
    """What this rank saves, or what it is given back."""
    checkpointer, optimizer = checkpointer_of(folder), torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    if load:
        return dict(checkpointer.load(folder / "step-00000001", [], optimizer)["rng"])
    torch.manual_seed(dist.get_rank())
    state = rng_state(torch.device("cpu"))
    checkpointer.save(1, [], optimizer, {"rng": state})
    return dict(state)


def test_each_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:
    saved = run_ranks(_random_state, 2, tmp_path, False)
    assert not torch.equal(saved[0]["cpu"], saved[1]["cpu"])
    assert_same_rest(run_ranks(_random_state, 2, tmp_path, True), saved)
    assert run_ranks(_random_state, 3, tmp_path, True) == [{}, {}, {}]


def _find(folder: Path, resume: str) -> str:
    if dist.get_rank() == 1:
        folder = folder / "not-looked-at"
    try:
        return str(checkpointer_of(folder).find(resume))
    except ConfigError as error:
        return f"refused: {error}"


def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    absent = run_ranks(_find, 2, tmp_path, "required")
    assert absent == [f'refused: checkpoint.resume = "required": there is no complete checkpoint in {tmp_path}'] * 2


def _find_and_count(folder: Path) -> tuple[str, list[str], int]:
    hashed: list[str] = []
    read = manifest.entry_of
    manifest.entry_of = lambda file, *more: hashed.append(file.name) or read(file, *more)  # type: ignore[func-returns-value]
    found, files = _find(folder, "auto"), [*hashed]
    save(folder, "sharded")
    return found, files, len(hashed) - len(files)


def test_ranks_share_what_they_verify_and_read_nothing_they_wrote(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, "sharded", False, (6, 7))
    flip(tmp_path / STEP / "rank-00002.safetensors")
    found, hashed, written = zip(*run_ranks(_find_and_count, 4, tmp_path), strict=True)
    files = [*(f"rank-0000{rank}.safetensors" for rank in range(4)), "state.json", "titan.index"]
    assert found == (str(tmp_path / "step-00000006"),) * 4
    hashed[0].remove("state.json"), hashed[0].remove("state.json")  # which of all is the newest, it was asked first
    assert sorted(chain(*hashed)) == sorted(files * 2) and [len(names) for names in hashed] == [4, 4, 2, 2]
    assert written == (1, 0, 0, 0), "all but state.json is hashed while it is written"


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, "hybrid")
    written = [path.stat().st_size for path in (tmp_path / STEP).glob("rank-*.safetensors")]
    assert len(written) == 4 and max(written) < 1.2 * min(written)


def _save_three(folder: Path) -> list[int]:
    """How many tables rank 0 gathers for three saves, the last of a model with one tensor more."""
    made, make = [], plan.make
    plan.make = lambda tables: (made.append(len(tables)), make(tables))[1]
    model, checkpointer = model_on("sharded"), checkpointer_of(folder)
    for step in (1, 2, 3):
        if step == 3 and dist.get_rank() == 1:
            model.register_buffer("more", torch.ones(5))
        checkpointer.save(step, [ModelPart(model)], adamw(model), {})
    plan.make = make
    return made


def test_a_save_is_planned_again_only_when_tensors_change(tmp_path: Path) -> None:
    assert run_ranks(_save_three, 4, tmp_path) == [[4, 4], [], [], []]
    assert torch.equal(saved_tensors(tmp_path / "step-00000003")["model.more"], torch.ones(5))
    assert "model.more" not in stored(tmp_path / "step-00000002").tensors


def _box_of_three_rows_of_ten() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    short = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=(10, 2), stride=(2, 1))
    return storage.box_of(short)


def test_a_part_that_is_not_what_its_placements_say_is_refused() -> None:
    with pytest.raises(RankError, match=r"holds \[3, 2\] of a tensor, but its placements give it \[5, 2\]"):
        run_ranks(_box_of_three_rows_of_ten, 2)


def _fill_disk(folder: Path, asynchronous: bool, full_rank: int) -> tuple[str, list[str], list[str]]:
    """What is told, what is left, and what there is after the next save."""
    # Its shard is larger than any buffer: the disk fills in the middle of a tensor.
    model = nn.Linear(128, 256)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    checkpointer = checkpointer_of(folder, asynchronous)

    def save_whole(step: int) -> list[str]:
        dist.barrier()  # the other rank has seen what there was
        checkpointer.save(step, [ModelPart(model)], adamw(model), {})
        checkpointer.wait()
        return names_in(folder)

    save_whole(1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    with pytest.raises(CheckpointError) as refused:
        save_whole(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    left = names_in(folder)
    return str(refused.value), left, save_whole(3)


@pytest.mark.parametrize(("asynchronous", "full_rank"), [(False, 1), (True, 0)])
def test_disk_full_on_one_rank_is_told_by_all(tmp_path: Path, asynchronous: bool, full_rank: int) -> None:
    outcomes = run_ranks(_fill_disk, 2, tmp_path, asynchronous, full_rank)
    last = "step-00000001"
    told = f"disk full while saving step 2 to {tmp_path}; the last complete checkpoint is {tmp_path / last}"
    assert outcomes == [(told, [last], [last, "step-00000003"])] * 2


def _lose_a_peer(folder: Path, asynchronous: bool) -> str:
    checkpointer = checkpointer_of(folder, asynchronous)
    if dist.get_rank() == 1:
        return "gone"
    model = model_on("one rank")
    with pytest.raises(CheckpointError) as refused:
        checkpointer.save(1, [ModelPart(model)], adamw(model), {})
        checkpointer.wait()
    return str(refused.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_gone_ends_the_save(tmp_path: Path, asynchronous: bool) -> None:
    told, _ = run_ranks(_lose_a_peer, 2, tmp_path, asynchronous)
    assert told.startswith(f"saving step 1 to {tmp_path} failed: ") and "\n" not in told
