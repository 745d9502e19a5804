"""Checkpoints of many ranks: bit-equal on any layout, one outcome on all ranks, training undisturbed."""

import os
import resource
import signal
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoints import (
    BOTH,
    HYBRID,
    ONE,
    SCALED,
    SHARDED,
    TENSOR,
    Layout,
    UnevenToy,
    adamw,
    assert_same,
    assert_same_rest,
    checkpointer_of,
    copied,
    flip,
    local_part,
    model_on,
    names_in,
    save,
    set_known_state,
    train,
)
from tests.jobs import stored
from titan.checkpoint import rng_state, storage
from titan.checkpoint.disk import manifest
from titan.contracts import ModelPart
from titan.errors import CheckpointError, ConfigError
from titan.testing.ranks import RankError, run_ranks


def _load_and_compare(folder: Path, layout: Layout, saved: Layout) -> None:
    model = model_on(layout)
    expected = {name: local_part(tensor).clone() for name, tensor in model.state_dict().items()}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(-1)
    optimizer = adamw(model)
    rest = checkpointer_of(folder).load(folder / "step-00000007", [ModelPart(model)], optimizer)
    assert rest == {"layout": list(saved)}
    assert torch.equal(model.seen, expected["seen"])
    for name, parameter in model.named_parameters():
        assert torch.equal(local_part(parameter), expected[name]), name
        state = optimizer.state[parameter]
        assert state.keys() == SCALED.keys() | {"step"}
        assert type(state["step"]) is Tensor and state["step"].item() == 7
        for slot, factor in SCALED.items():
            assert isinstance(state[slot], DTensor) == isinstance(parameter, DTensor)
            assert torch.equal(local_part(state[slot]), expected[name] * factor), (name, slot)


def _save_and_load_on_others(folder: Path, saved: Layout) -> None:
    if saved != ONE:
        save(folder, saved, asynchronous=True)
    for layout in (SHARDED, HYBRID, TENSOR, BOTH):
        _load_and_compare(folder, layout, saved)


SWEPT = [pytest.param(layout, marks=pytest.mark.sweep) for layout in (ONE, HYBRID, BOTH)]


@pytest.mark.parametrize("saved", [SHARDED, TENSOR, *SWEPT], ids=str)
def test_saved_on_one_layout_loads_bit_equal_on_another(tmp_path: Path, saved: Layout) -> None:
    if saved == ONE:
        save(tmp_path, saved)
    run_ranks(_save_and_load_on_others, 4, tmp_path, saved)
    _load_and_compare(tmp_path, ONE, saved)


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


def _held(parts: list[ModelPart], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of what this rank has of the model and of the optimizer's state."""
    return {name: local_part(tensor) for name, tensor in copied(parts, optimizer).items()}


def _train_while_saving(folder: Path) -> None:
    model = model_on(SHARDED)
    parts, optimizer = [ModelPart(model)], adamw(model)
    train(parts, optimizer)
    before = _held(parts, optimizer)
    trained, write = Event(), storage.write

    def late(*args: Any) -> Any:
        assert trained.wait(30)
        return write(*args)

    storage.write = late
    checkpointer = checkpointer_of(folder, asynchronous=True)
    rest: dict[str, Any] = {"list": [1], "tensor": torch.ones(2)}
    checkpointer.save(1, parts, optimizer, rest)
    rest["list"].append(2)
    rest["tensor"].zero_()
    train(parts, optimizer, 3)
    assert names_in(folder) in ([], ["step-00000001.tmp"])
    trained.set()
    train(parts, optimizer)
    checkpointer.wait()
    assert not torch.equal(local_part(model.up.weight), before["up.weight"])
    loaded = checkpointer.load(folder / "step-00000001", parts, optimizer)
    assert_same(_held(parts, optimizer), before)
    assert_same_rest(loaded, {"list": [1], "tensor": torch.ones(2)})
    train(parts, optimizer)
    assert optimizer.state[model.scale]["step"].item() == 2


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    run_ranks(_train_while_saving, 4, tmp_path)


def _model_of(*names: str) -> nn.Module:
    """Of these layers, whose weights are the same each time."""
    torch.manual_seed(1)
    layers = {"embed": nn.Embedding(7, 5), "first": nn.Linear(5, 3), "second": nn.Linear(3, 5)}
    return nn.Sequential(OrderedDict((name, layers[name]) for name in names))


def _save_stages(folder: Path, sharded: bool) -> None:
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = _model_of(*[("embed", "first"), ("second", "embed")][stage])
    if sharded:
        fully_shard(model, mesh=mesh["shard"])
    optimizer = adamw(model)
    set_known_state(model, optimizer)
    checkpointer_of(folder).save(7, [ModelPart(model, stage, 2)], optimizer, {})


@pytest.mark.parametrize("sharded", [False, True])
def test_stages_save_one_model_and_a_tied_tensor_once(tmp_path: Path, sharded: bool) -> None:
    run_ranks(_save_stages, 4, tmp_path, sharded)
    assert stored(tmp_path / "step-00000007").tensors["model.embed.weight"].chunks == (2 if sharded else 1)
    expected, whole = (_model_of("embed", "first", "second") for _ in range(2))
    for parameter in whole.parameters():
        parameter.detach().zero_()
    optimizer = adamw(whole)
    checkpointer_of(tmp_path).load(tmp_path / "step-00000007", [ModelPart(whole)], optimizer)
    for parameter, wanted in zip(whole.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], wanted * SCALED["exp_avg"])


def _load_stages_without_second(folder: Path) -> str:
    model = _model_of(["embed", "first"][dist.get_rank()])
    with pytest.raises(CheckpointError) as refused:
        checkpointer_of(folder).load(folder / "step-00000007", [ModelPart(model)], adamw(model))
    return str(refused.value)


def test_names_no_rank_wants_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save_stages, 4, tmp_path, True)
    told = run_ranks(_load_stages_without_second, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0].endswith("does not fit the model: the model lacks second.bias, second.weight")


def _save_after_validation(folder: Path) -> None:
    torch.manual_seed(1)
    model = UnevenToy()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    parts, optimizer = [ModelPart(model)], adamw(model)
    train(parts, optimizer)
    with torch.no_grad():
        model(torch.arange(8))
    assert not isinstance(model.up.weight, DTensor), "validation leaves gathered parameters behind"
    checkpointer_of(folder).save(1, parts, optimizer, {})
    names = stored(folder / "step-00000001").tensors
    assert names["model.up.weight"].chunks == 2
    assert {"optimizer.up.weight.exp_avg", "optimizer.up.weight.step"} <= names.keys()


def test_save_after_a_forward_without_backward(tmp_path: Path) -> None:
    run_ranks(_save_after_validation, 2, tmp_path)


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
    save(tmp_path, ONE)
    assert run_ranks(_find, 2, tmp_path, "auto") == [str(tmp_path / "step-00000007")] * 2


def _find_and_count(folder: Path) -> tuple[str, list[str], int]:
    hashed: list[str] = []
    read = manifest.entry_of
    manifest.entry_of = lambda file, *more: hashed.append(file.name) or read(file, *more)  # type: ignore[func-returns-value]
    found = _find(folder, "auto")
    files = list(hashed)
    save(folder, SHARDED)
    return found, files, len(hashed) - len(files)


def test_ranks_share_what_they_verify_and_read_nothing_they_wrote(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path, SHARDED, False, (6, 7))
    data = tmp_path / "step-00000007" / "rank-00002.safetensors"
    flip(data)
    outcomes = run_ranks(_find_and_count, 4, tmp_path)
    files = [*(f"rank-0000{rank}.safetensors" for rank in range(4)), "state.json", "titan.index"]
    assert [found for found, *_ in outcomes] == [str(tmp_path / "step-00000006")] * 4
    assert sorted(name for _, names, _ in outcomes for name in names) == sorted(files * 2)
    assert [len(names) for _, names, _ in outcomes] == [4, 4, 2, 2]
    assert [written for *_, written in outcomes] == [1, 0, 0, 0], "all but state.json is hashed while it is written"


def _fill_disk(folder: Path, asynchronous: bool, full_rank: int) -> Mapping[str, Any]:
    # Its shard is larger than any buffer: the disk fills in the middle of a tensor.
    model = nn.Linear(128, 256)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adamw(model)
    checkpointer = checkpointer_of(folder, asynchronous)
    checkpointer.save(1, [ModelPart(model)], optimizer, {})
    checkpointer.wait()
    set_known_state(model, optimizer)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    with pytest.raises(CheckpointError) as refused:
        checkpointer.save(2, [ModelPart(model)], optimizer, {})
        checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    dist.barrier()
    left = names_in(folder)
    dist.barrier()
    checkpointer.save(3, [ModelPart(model)], optimizer, {})
    checkpointer.wait()
    return {"told": str(refused.value), "left": left, "then": names_in(folder)}


@pytest.mark.parametrize(("asynchronous", "full_rank"), [(False, 1), (True, 0)])
def test_disk_full_on_one_rank_is_told_by_all(tmp_path: Path, asynchronous: bool, full_rank: int) -> None:
    outcomes = run_ranks(_fill_disk, 2, tmp_path, asynchronous, full_rank)
    last = tmp_path / "step-00000001"
    told = f"disk full while saving step 2 to {tmp_path}; the last complete checkpoint is {last}"
    assert [outcome["told"] for outcome in outcomes] == [told] * 2
    assert [outcome["left"] for outcome in outcomes] == [["step-00000001"]] * 2
    assert outcomes[0]["then"] == ["step-00000001", "step-00000003"]


def _die_while_writing(folder: Path) -> None:
    save(folder, (1, 2, 1))
    write = storage.write

    def half(*args: Any) -> Any:
        written = write(*args)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    storage.write = half
    model = model_on((1, 2, 1))
    checkpointer_of(folder, asynchronous=True).save(8, [ModelPart(model)], adamw(model), {})
    signal.pause()


def test_killed_while_writing_the_last_one_stands(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 ended with exit code -9"):
        run_ranks(_die_while_writing, 2, tmp_path)
    assert (tmp_path / "step-00000008.tmp").is_dir()
    assert run_ranks(_find, 2, tmp_path, "auto") == [str(tmp_path / "step-00000007")] * 2
    assert not (tmp_path / "step-00000008.tmp").exists()
    _load_and_compare(tmp_path, ONE, (1, 2, 1))


def _lose_a_peer(folder: Path, asynchronous: bool) -> str:
    checkpointer = checkpointer_of(folder, asynchronous)
    if dist.get_rank() == 1:
        return "gone"
    model = model_on(ONE)
    with pytest.raises(CheckpointError) as refused:
        checkpointer.save(1, [ModelPart(model)], adamw(model), {})
        checkpointer.wait()
    return str(refused.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_gone_ends_the_save(tmp_path: Path, asynchronous: bool) -> None:
    told, _ = run_ranks(_lose_a_peer, 2, tmp_path, asynchronous)
    assert told.startswith(f"saving step 1 to {tmp_path} failed: ") and "\n" not in told
