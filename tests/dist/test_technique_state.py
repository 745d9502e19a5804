"""Techniques' state comes from every rank that has some, and goes to every rank that needs it, at any layout."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoints import assert_same, assert_same_rest, checkpointer_of
from tests.jobs import FOUR_LAYERS, SAVING, mesh
from tests.sweeps import swept_case
from titan.testing.jobs import Outcome, assert_same_curve, saved_tensors, train_job
from titan.testing.ranks import RankError, run_ranks

ECHO = ("--plugins.path", str(Path(__file__).parents[1] / "plugins"), "--plugins.echo.enabled", "true")
HALF = ("--train.steps", "2")


def train(folder: Path, degrees: dict[str, int], *words: str, name: str = "run") -> Outcome:
    every = (*mesh(**degrees), *ECHO, "--train.steps", "4", *SAVING, "--checkpoint.every", "2")
    return train_job(folder, torch.Size(degrees.values()).numel(), *every, *words, name=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("alone"), {})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2}, {}),
        swept_case(({}, {"pp": 2})),
        swept_case(({"dp_shard": 2, "pp": 2}, {"tp": 2})),
        swept_case(({"tp": 2}, {"dp_shard": 2, "pp": 2})),
    ],
    ids=str,
)
def test_on_another_layout(before: dict[str, int], after: dict[str, int], alone: Outcome, tmp_path: Path) -> None:
    train(tmp_path, before, *HALF)
    assert_same_curve(alone, train(tmp_path, after))


def test_on_the_same_layout_bit_for_bit(alone: Outcome, tmp_path: Path) -> None:
    whole = train(tmp_path, {"dp_shard": 2, "pp": 2}, name="whole")
    assert_same_curve(alone, whole)
    train(tmp_path, {"dp_shard": 2, "pp": 2}, *HALF, name="pieces")
    pieces = train(tmp_path, {"dp_shard": 2, "pp": 2}, name="pieces")
    ours, theirs = (saved_tensors(run.folder / "checkpoints" / "step-00000004") for run in (whole, pieces))
    assert {f"rest.techniques.echo.kept.{name}" for name in whole.weights} < ours.keys()
    assert_same(ours, theirs)


def test_tensors_that_no_rank_names_yet_go_to_all(tmp_path: Path) -> None:
    late = (*FOUR_LAYERS, "--plugins.echo.late", "true")
    alone = train(tmp_path, {}, *FOUR_LAYERS, name="alone")
    train(tmp_path, {"pp": 2}, *late, *HALF)
    train(tmp_path, {"pp": 4}, *late, "--train.steps", "3")
    assert_same_curve(alone, train(tmp_path, {}, *late))


SGD = torch.optim.SGD([nn.Parameter(torch.zeros(1))])


def _save(folder: Path, states: list[Any], sharded: bool = False) -> None:
    """Each rank gives its state. sharded: ranks 2 r and 2 r + 1 share one."""
    mine, size = states[dist.get_rank()], dist.get_world_size()
    if sharded:
        shards = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("stage", "shard"))["shard"]
        mine = {key: distribute_tensor(value, shards, [Shard(0)]) for key, value in mine.items()}
    checkpointer = checkpointer_of(folder, asynchronous=True)
    checkpointer.save(1, [], SGD, {"techniques": {"echo": mine}})
    checkpointer.wait()


ONES, TWOS = torch.ones(3), torch.full((3,), 2.0)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([{"a": {"b": ONES}}, {"a": {"b": TWOS}}], "the tensor 'a.b' has other values on rank 1 than on rank 0"),
        ([{"a": ONES}, {"a": ONES.double()}], "the tensor 'a' has other values on rank 1 than on rank 0"),
        ([{"a": ONES}, {"a": ONES[None]}], "the tensor 'a' is [3] on rank 0 and [1, 3] on rank 1"),
        ([{}, {"a": {"b": 1}}, {"a": {"b": True}}], "'a.b' is 1 on rank 1 and true on rank 2"),
        ([{"a": [{"b": 2}]}, {"a": [{"b": 3}]}], """'a' is [{"b": 2}] on rank 0 and [{"b": 3}] on rank 1"""),
        ([{"a": {"b": 1}}, {"a": ONES}], """'a' is {"b": 1} on rank 0 and {"$tensor": "rest.techniques.echo.a"} on"""),
        ([{"a": ONES}, {"a": ONES}, {"a": TWOS}, {"a": TWOS}], "the tensor 'a' has other values on rank 2 than on"),
    ],
    ids=["values", "types", "shapes", "numbers", "lists", "kinds", "shards"],
)
def test_what_ranks_give_otherwise_under_one_name_is_refused(states: list[Any], told: str, tmp_path: Path) -> None:
    message = f"saving step 1 to {tmp_path} failed: technique echo: {told}"
    with pytest.raises(RankError, match=f"(?s){re.escape(message)}.*must be equal on all ranks"):
        run_ranks(_save, len(states), tmp_path, states, len(states) == 4)
    assert list(tmp_path.iterdir()) == []


def _load(folder: Path, states: list[dict[str, Any]] | None, sharded: bool = False) -> Any:
    own = None if states is None else states[dist.get_rank() if dist.is_initialized() else 0]
    if sharded:
        ranks = init_device_mesh("cpu", (dist.get_world_size(),))
        own = {"echo": {key: distribute_tensor(value, ranks, [Shard(0)]) for key, value in own["echo"].items()}}
    found = checkpointer_of(folder).load(folder / "step-00000001", [], SGD, own)["techniques"]
    return {key: value.to_local() for key, value in found["echo"].items()} if sharded else found


def test_ranks_are_given_what_they_name_and_all_are_given_what_nobody_names(tmp_path: Path) -> None:
    states = [{"n": 1, "a": ONES, "x": {"deep": [ONES]}, "y": [ONES, 3]}, {"n": 1, "b": TWOS}, {"m": None, "c": ONES}]
    run_ranks(_save, 3, tmp_path, states)
    whole = {"n": 1, "m": None, "a": ONES, "b": TWOS, "c": ONES, "x": {"deep": [ONES]}, "y": [ONES, 3]}
    assert_same_rest(_load(tmp_path, None), {"echo": whole})
    assert_same_rest(_load(tmp_path, [{"echo": {}, "another": {}}]), {"echo": whole})
    assert _load(tmp_path, [{"another": {}}]) == {}
    named = {"a": TWOS, "x": {"deep": [TWOS]}, "y": [TWOS, 4]}
    first, second = run_ranks(_load, 2, tmp_path, [{"echo": named}, {"echo": {"b": ONES}}])
    common = {"n": 1, "m": None, "c": ONES, "y": [ONES, 3]}  # of a list that has more than tensors, all of it
    assert_same_rest(first, {"echo": {**common, "a": ONES, "x": {"deep": [ONES]}}})
    assert_same_rest(second, {"echo": {**common, "b": TWOS}})


def test_a_plain_tensor_comes_back_in_the_shards_of_a_rank_s_own(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path, [{"a": torch.arange(5.0)}] * 2)
    shards = run_ranks(_load, 2, tmp_path, [{"echo": {"a": torch.zeros(5)}}] * 2, True)
    assert [shard["a"].tolist() for shard in shards] == [[0, 1, 2], [3, 4]]
    with pytest.raises(RankError, match=r"does not fit: rest\.techniques\.echo\.a \(\[5\] there, \[6\] here\)"):
        run_ranks(_load, 2, tmp_path, [{"echo": {"a": torch.zeros(6)}}] * 2, True)
