"""Steps of a pipeline in simulated time (planner/step/schedule.py, steady_state.py)."""

import random
from collections.abc import Callable

import pytest

from bench.published_schedules import schedule_rows, step_s, zero_bubble
from titan.contracts.base.cost import Action, Order
from titan.errors import PluginError
from titan.planner.step import steady_state
from titan.planner.step.schedule import Timeline, Times, most_kept, simulate
from titan.planner.step.steady_state import Rounds, Steps
from titan.plugins.parallel.pipeline.orders import order

REPEATING = {"1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
STAGES = {"GPipe": 1, "LoopedBFS": 2, **REPEATING}


def _order(*ranks: str) -> Order:
    """An order written as `F0.1`: forward of micro batch 1 in stage 0."""
    return [[Action(a[0], *map(int, a[1:].split("."))) for a in rank.split()] for rank in ranks]  # type: ignore[arg-type]


def _even(stages: int, **seconds: float) -> Times:
    return {kind: [each] * stages for kind, each in seconds.items()}


def _rest(timeline: Timeline) -> list[float]:
    return [*timeline.busy, *timeline.idle, *timeline.exposed, *timeline.ends, timeline.makespan]


TWO = _order("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")
UNEVEN: Times = {"F": [1.0, 2.0], "B": [2.0, 3.0]}


def test_two_ranks_by_hand() -> None:
    timeline = simulate(TWO, UNEVEN, keep=True)
    assert timeline.makespan == 13.0  # 1, then 2 + 3 + 2 + 3 on the last rank, then 2
    assert timeline.busy == (6.0, 10.0) and timeline.idle == (7.0, 3.0) and timeline.exposed == (0.0, 0.0)
    assert timeline.ends == (13.0, 11.0)
    assert [(start, end) for _, start, end in timeline.actions[0]] == [(0, 1), (1, 2), (6, 8), (11, 13)]
    assert [action for action, _, _ in timeline.actions[1]] == list(TWO[1])
    assert simulate(TWO, UNEVEN).actions == ()


def test_a_transfer_beside_the_work_delays_only_what_waits_for_it() -> None:
    timeline = simulate(TWO, UNEVEN, 0.5)
    assert timeline.makespan == 14.0  # once down, once up; the second tensor comes while the rank works
    assert timeline.exposed == (1.0, 0.5) and timeline.idle == (7.0, 3.5)


def test_a_blocking_transfer_holds_both_ranks() -> None:
    timeline = simulate(TWO, UNEVEN, 0.5, blocking=True)
    # The last rank receives from 1 to 1.5, works for 5, sends till 7, receives again, works till 12.5, sends till 13.
    assert timeline.ends == (15.0, 13.0)
    assert timeline.exposed == (2.0, 2.0)  # two sent and two received on each
    assert timeline.busy == (6.0, 10.0)


def test_transfers_differ_by_boundary_and_cost_nothing_within_a_rank() -> None:
    made = _order("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0")
    for blocking in (False, True):
        timeline = simulate(made, _even(4, F=1.0, B=1.0), [0.25, 100.0, 0.5], blocking=blocking)
        assert timeline.makespan == 8 + 2 * 0.25 + 2 * 0.5
    weights_alone = simulate(_order("F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0"), _even(2, F=1.0, I=1.0, W=5.0), 0.5)
    assert weights_alone.ends == (10.0, 8.5), "which need only their own rank"


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("schedule", STAGES)
def test_time_of_every_rank_adds_up(schedule: str, blocking: bool) -> None:
    stages = 4 * STAGES[schedule]
    timeline = simulate(order(schedule, 4, stages, 12), _even(stages, F=1, B=2, I=1, W=1), 0.1, blocking=blocking)
    assert timeline.busy == pytest.approx([36 * STAGES[schedule]] * 4)
    assert min(timeline.idle) >= -1e-9 and min(timeline.exposed) > 0
    for parts in zip(timeline.busy, timeline.idle, timeline.exposed, strict=True):
        assert sum(parts) == pytest.approx(timeline.makespan, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize(
    ("schedule", "idle"),
    [
        # As the plugin's docstring has it: of p ranks, m micro batches; F 1, B 2 and W 1 seconds per stage, v stages.
        ("GPipe", lambda p, m: (p - 1) / m),
        ("1F1B", lambda p, m: (p - 1) / m),
        ("LoopedBFS", lambda p, m: (p - 1) / (2 * m)),
        ("Interleaved1F1B", lambda p, m: (p - 1) / (2 * m)),
        ("InterleavedZeroBubble", lambda p, m: (p - 1) * (1 + 2 - 2) / (2 * m * 3)),
        ("ZBVZeroBubble", lambda p, m: (p - 1) * 1 / (2 * m * 3)),
        ("DualPipeV", lambda p, m: (p - 1) * 1 / (2 * m * 3)),
    ],
)
def test_idle_share_is_that_of_the_closed_form(schedule: str, idle: Callable[[int, int], float], ranks: int) -> None:
    stages, micro_batches = ranks * STAGES[schedule], 4 * ranks
    timeline = simulate(order(schedule, ranks, stages, micro_batches), _even(stages, F=1, B=2, I=1, W=1))
    assert timeline.makespan / timeline.busy[0] - 1 == pytest.approx(idle(ranks, micro_batches), rel=1e-12)


def test_the_worst_moment_is_by_weight() -> None:
    made = _order("F0.0 F1.0 I1.0 F0.1 F0.2 W1.0 F0.3")
    found = [most_kept(made)[0], most_kept(made, [1.0, 9.0], 0.5)[0], most_kept(made, pending=0.0)[0]]
    assert [alive.whole for alive in found] == [{0: 3, 1: 0}, {0: 1, 1: 1}, {0: 4, 1: 0}]
    assert [alive.pending for alive in found] == [{0: 0, 1: 1}, {0: 0, 1: 0}, {0: 0, 1: 0}]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("B0.0 F0.0", "F1.0 B1.0"), "rank 0 would run B of micro batch 0 in stage 0"),
        (("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"), "rank 0 would run B of micro batch 0 in stage 0"),
        (("F0.0", "B1.0 F1.0"), "rank 1 would run B of micro batch 0 in stage 1"),
        (("F0.0 W0.0 I0.0", "F1.0 I1.0 W1.0"), "rank 0 would run W of micro batch 0 in stage 0"),
        (("F0.0 B0.0", "F1.0"), "rank 0 would run B of micro batch 0 in stage 0"),
    ],
)
def test_an_order_that_cannot_proceed_is_refused(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        simulate(_order(*ranks), _even(2, F=1, B=2, I=1, W=1))


def _times(stages: int, spread: float, seed: int) -> Times:
    draw = random.Random(seed)
    slow = [1 + spread * draw.random() for _ in range(stages)]
    return {kind: [share * each for each in slow] for kind, share in (("F", 1.0), ("B", 1.9), ("I", 1.1), ("W", 0.8))}


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 64), (3, 50), (4, 100)])
@pytest.mark.parametrize("schedule", STAGES)
def test_leaving_out_rounds_changes_nothing(schedule: str, ranks: int, micro_batches: int, blocking: bool) -> None:
    stages = ranks * STAGES[schedule]
    if schedule.startswith("Interleaved") and micro_batches % (micro_batches // ranks):
        micro_batches = 48
    steps = Steps(lambda count: order(schedule, ranks, stages, count), ranks)
    made = order(schedule, ranks, stages, micro_batches)
    for seed, (spread, send_s) in enumerate([(0, 0), (0, 0.05), (0.3, 0), (0.3, 0.05), (0.03, 0.02)]):
        times = _times(stages, spread, seed)
        whole = simulate(made, times, send_s, blocking=blocking)
        assert _rest(steps.simulate(micro_batches, times, send_s, blocking=blocking)) == pytest.approx(
            _rest(whole), rel=1e-9, abs=1e-9 * whole.makespan
        )


@pytest.mark.parametrize("schedule", REPEATING)
def test_few_micro_batches_stand_for_many(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An even pipeline is never simulated in full, and orders of all micro batches are not even made."""
    stages, made = 4 * REPEATING[schedule], []

    def make(count: int) -> Order:
        made.append(count)
        return order(schedule, 4, stages, count)

    monkeypatch.setattr(steady_state, "simulate", None)
    steps, times = Steps(make, 4), _times(stages, 0, 0)
    timeline = steps.simulate(4000, times)
    assert max(made) < 60
    monkeypatch.undo()
    assert timeline.busy[0] == pytest.approx(4000 * sum(times[kind][0] for kind in "FB") * REPEATING[schedule])
    assert steps.most_kept(4000) == most_kept(order(schedule, 4, stages, 200))


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS"])
def test_orders_without_rounds_are_simulated_in_full(schedule: str) -> None:
    stages = 4 * STAGES[schedule]
    steps = Steps(lambda count: order(schedule, 4, stages, count), 4)
    assert steps.rounds(100) is None
    assert sum(steps.most_kept(100)[0].whole.values()) == 100 * STAGES[schedule]


def test_a_step_that_is_not_even_yet_is_simulated_in_full() -> None:
    """A last stage a trifle slower than the others: they run ahead of it for long."""
    steps = Steps(lambda count: order("ZBVZeroBubble", 4, 8, count), 4)
    times = {kind: [1.0] * 7 + [1.003] for kind in "FIW"}
    found = steps.rounds(200)
    assert isinstance(found, Rounds) and found.simulate(times) is None
    assert steps.simulate(200, times) == simulate(order("ZBVZeroBubble", 4, 8, 200), times)


def test_a_round_is_even_only_if_what_is_on_its_way_is_too() -> None:
    """Here all clocks advance alike before what they wait for does."""
    times = {"F": [3, 3, 3, 1], "B": [2, 3, 2, 2]}
    steps = Steps(lambda count: order("1F1B", 4, 4, count), 4)
    assert steps.simulate(80, times, 3).makespan == simulate(order("1F1B", 4, 4, 80), times, 3).makespan == 774


@pytest.mark.parametrize("limit", [4, 8])
def test_the_zero_bubble_orders_that_are_found_keep_to_their_memory(limit: int) -> None:
    """For F = B = W: hardly a bubble with 2 p micro batches kept, (p - 1) (F + B - W) with p (arXiv 2401.10241)."""
    times = _even(4, F=1, I=1, W=1)
    made = zero_bubble(4, 16, times, 0.0, limit, 0.5)
    for alive in most_kept(made, pending=0.5):
        assert sum(alive.whole.values()) + 0.5 * sum(alive.pending.values()) <= limit
    assert step_s(made, times, 0.0) == 48 + (3 if limit == 4 else 0)


def test_measured_times_give_the_measured_step_and_the_printed_bubble() -> None:
    """The 1F1B run of GPT 6.2B, 24 micro batches on 8 ranks (arXiv 2401.10241, tables 4, 5 and 9)."""
    row = {"id": "6.2B", "schedule": "1F1B", "pp": 8, "grad_accum": 24, "layers": 30}
    row |= {"hidden": 4096, "step_time_s": 2.5714, "bubble_frac": 0.2347}
    row |= {"extra": {"T_F_ms": 29.718, "T_B_ms": 29.444, "T_W_ms": 19.927, "T_comm_ms": 0.527}}
    (found,) = schedule_rows([row, {"id": "no times", "schedule": "1F1B"}])
    assert found["predicted_bubble"] == pytest.approx(0.2347, abs=1e-4)
    assert abs(found["error"]) < 0.06
