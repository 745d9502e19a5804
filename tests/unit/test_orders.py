"""Our lists of what a pipeline's ranks run, against PyTorch's own (plugins/parallel/pipeline/orders.py)."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from titan.contracts.base.cost import Order
from titan.planner.step.schedule import most_kept
from titan.plugins.parallel.pipeline.orders import order
from titan.plugins.parallel.pipeline.stages import V_SHAPED, placement, takes

LETTERS = {
    torch_schedules.FORWARD: "F",
    torch_schedules.FULL_BACKWARD: "B",
    torch_schedules.BACKWARD_INPUT: "I",
    torch_schedules.BACKWARD_WEIGHT: "W",
}
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MICRO_BATCHES = (*range(1, 19), 24, 40)


def _plain(made: Order) -> list[list[tuple[str, int, int]]]:
    return [[tuple(action) for action in actions] for actions in made]


def _torchs(schedule: str, ranks: int, each: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    kind: Any = torch_schedules.get_schedule_class(schedule)
    stages = [
        SimpleNamespace(num_stages=ranks * each, group_size=ranks, group_rank=0, submod=None) for _ in range(each)
    ]
    made = kind(stages, micro_batches).pipeline_order
    found = []
    for rank in range(ranks):
        actions = [part for action in made[rank] if action is not None for part in action.sub_actions or (action,)]
        found.append([(LETTERS[a.computation_type], a.stage_index, a.microbatch_index) for a in actions])
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("schedule", MULTI)
def test_orders_are_those_of_torch(schedule: str, ranks: int) -> None:
    compared = 0
    for each in (2,) if schedule in V_SHAPED else (1, 2, 3):
        for micro_batches in MICRO_BATCHES:
            if takes(schedule, ranks, micro_batches):
                ours = _plain(order(schedule, ranks, ranks * each, micro_batches))
                assert ours == _torchs(schedule, ranks, each, micro_batches), (each, micro_batches)
                compared += 1
    assert compared >= 6


CHUNKS = {"forward_one_chunk": "F", "backward_one_chunk": "B"}


def _recorder(rank: int, ranks: int) -> Mock:
    """A stage that notes what torch's own loop calls, in place of one that computes and sends."""
    place = {"stage_index": rank, "num_stages": ranks, "group_size": ranks, "group_rank": rank}
    nothing = {f"get_{which}_ops.return_value": [] for which in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")}
    return Mock(**place, **nothing, is_first=rank == 0, is_last=rank == ranks - 1, submod=None, has_backward=True)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_single_stage_orders_are_what_torch_runs(schedule: str, ranks: int) -> None:
    kind: Any = torch_schedules.get_schedule_class(schedule)
    for micro_batches in MICRO_BATCHES:
        if not takes(schedule, ranks, micro_batches):
            continue
        theirs = []
        for rank in range(ranks):
            stage = _recorder(rank, ranks)
            running = kind(stage, micro_batches)
            running._stage_forward_initialized = running._stage_backward_initialized = True
            running._initialize_stage = lambda *_: None
            running._step_microbatches([()] * micro_batches, [{}] * micro_batches)
            theirs.append([(CHUNKS[name], rank, args[0]) for name, args, _ in stage.mock_calls if name in CHUNKS])
        assert _plain(order(schedule, ranks, ranks, micro_batches)) == theirs


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *MULTI])
def test_every_action_is_run_once_and_where_its_stage_lives(schedule: str) -> None:
    ranks, each, micro_batches = 4, 1 if schedule in ("GPipe", "1F1B") else 2, 16
    made, at = order(schedule, ranks, ranks * each, micro_batches), placement(schedule, ranks, ranks * each)
    actions = [action for of_rank in made for action in of_rank]
    assert all(at[action.stage] == rank for rank, of_rank in enumerate(made) for action in of_rank)
    assert len(set(actions)) == len(actions)
    every = {(stage, i) for stage in range(ranks * each) for i in range(micro_batches)}
    of_kind = {kind: {(a.stage, a.micro_batch) for a in actions if a.kind == kind} for kind in "FBIW"}
    assert of_kind["F"] == of_kind["B"] | of_kind["I"] == every
    assert of_kind["I"] == of_kind["W"] and not of_kind["I"] & of_kind["B"]


@pytest.mark.parametrize(
    ("schedule", "each", "kept"),
    [
        ("GPipe", 1, [24, 24, 24, 24]),
        ("1F1B", 1, [4, 3, 2, 1]),
        ("LoopedBFS", 2, [48, 48, 48, 48]),
        ("Interleaved1F1B", 2, [11, 9, 7, 5]),
        ("InterleavedZeroBubble", 2, [8, 8, 8, 8]),
        ("ZBVZeroBubble", 2, [8, 8, 8, 8]),
        ("DualPipeV", 2, [9, 9, 9, 9]),
    ],
)
def test_ranks_keep_as_many_micro_batches_as_the_plugin_says(schedule: str, each: int, kept: list[int]) -> None:
    """The column `kept` of the plugin's table, for 4 ranks and 24 micro batches."""
    found = most_kept(order(schedule, 4, 4 * each, 24))
    assert [sum(alive.whole.values()) + sum(alive.pending.values()) for alive in found] == kept
