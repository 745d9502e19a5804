"""Long pipeline steps from short ones: the steady state of a schedule is simulated once and repeated.

A pipeline schedule has a warm-up, a middle that repeats, and a cool-down. A round is one repetition of the middle:
about as many micro batches as the pipeline has ranks. With thousands of micro batches, almost all rounds are alike, and
simulating each of them would dominate the cost of planning.

Idea. Between two rounds, the rest of the step depends on a state: each rank's clock, and the end times of results that
a rank still waits for. Every start time is a maximum over such times, plus constants (a max-plus linear system; the
repeated round is its periodic regime: Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992). If
one round shifts all of the state by the same time d, the next round computes maxima of times that are all later by d,
and so shifts the state by d too. By induction, n rounds take n d: they are skipped, and n d is added.

Algorithm.

1. Find the repetition (`find_rounds`). Make the order of fewer micro batches, and the order of one round more: the
   longer one must be the shorter one with a round inserted in its middle. That still longer orders go on in this way is
   the assumption about a schedule (`Steps`).
2. Simulate the short order round by round. At each cut, compare the state with that of the cut before.
3. All times shifted equally: skip the remaining rounds (`Rounds._skip`), then simulate the cool-down.
4. Not shifted equally within `LOOKED_AT` rounds (a slow stage delays the others only gradually): simulate the whole
   order.

Invariants. Skipping adds the same time to every clock and to every awaited end time, and the same busy and exposed time
per round to each rank. The result equals the full simulation to rounding: 1e-9 of the time, tested in
tests/unit/test_schedule.py.

Cost. Finding rounds is linear in the actions of the short order, about (3 + LOOKED_AT) * ranks micro batches, and is
done once per order and number of micro batches. Simulating is linear in the same, instead of in all micro batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub

from titan.contracts.base.cost import Action, Order

from .schedule import Alive, Run, Timeline, Times, most_kept, simulate

SAME = 1e-12
"""Times that differ by less than this share of the step are equal; skipped rounds multiply the difference."""

LOOKED_AT = 6
"""Rounds of backward simulated, at most, before the whole order is simulated instead."""

Pending = tuple[str, int, int, int]


class Steps:
    """Steps of one pipeline schedule, for any number of micro batches. Orders are made once and kept.

    order: number of micro batches -> order of actions per rank. For `steady_state` to apply, the order of more micro
        batches is that of fewer with rounds inserted in its middle; otherwise the whole order is simulated.
    ranks: of the pipeline.
    """

    def __init__(self, order: Callable[[int], Order], ranks: int) -> None:
        self._order, self._ranks = order, ranks
        self._whole: dict[int, Order] = {}
        self._rounds: dict[int, Rounds | None] = {}

    def simulate(
        self, micro_batches: int, times: Times, send_s: float | Sequence[float] = 0.0, *, blocking: bool = False
    ) -> Timeline:
        """The timeline of a step; equal to `schedule.simulate` to 1e-9 of the time.

        times: seconds of each kind of action, by stage.
        send_s: seconds of a transfer between neighboring stages, one number or one per stage boundary.
        blocking: whether transfers hold the sender and the receiver.
        """
        rounds = self.rounds(micro_batches)
        timeline = rounds.simulate(times, send_s, blocking=blocking) if rounds else None
        return timeline or simulate(self.order(micro_batches), times, send_s, blocking=blocking)

    def most_kept(self, micro_batches: int, weight: Sequence[float] | None = None, pending: float = 1.0) -> list[Alive]:
        """Micro batches whose activations each rank holds at its worst moment; see `schedule.most_kept`."""
        rounds = self.rounds(micro_batches)
        return most_kept(rounds.order if rounds else self.order(micro_batches), weight, pending)

    def order(self, micro_batches: int) -> Order:
        """All actions of a step of this many micro batches, per rank."""
        if micro_batches not in self._whole:
            self._whole[micro_batches] = self._order(micro_batches)
        return self._whole[micro_batches]

    def rounds(self, micro_batches: int) -> "Rounds | None":
        """The repetition of the order; None: too few rounds, or the order does not repeat."""
        if micro_batches not in self._rounds:
            self._rounds[micro_batches] = find_rounds(self.order, self._ranks, micro_batches)
        return self._rounds[micro_batches]


@dataclass(frozen=True)
class Rounds:
    """An order whose middle repeats.

    order: a shorter order, with rounds removed.  left_out: number of rounds removed.  size: micro batches per round.
    cuts: round after round, the position in each rank's actions where the round begins.
    pending: (kind, stage, first, end): at the first cut, the results of micro batches first to end - 1 are awaited.
    """

    order: Order
    left_out: int
    size: int
    cuts: tuple[tuple[int, ...], ...]
    pending: tuple[Pending, ...]

    def simulate(
        self, times: Times, send_s: float | Sequence[float] = 0.0, *, blocking: bool = False
    ) -> Timeline | None:
        """The timeline of the whole step; None: no steady state by the last cut. Arguments as in `Steps.simulate`."""
        run = Run(self.order, times, send_s, blocking=blocking)
        before: list[float] = []
        for number, cut in enumerate(self.cuts):
            busy, exposed = list(run.busy), list(run.exposed)
            run.until(cut)
            now = self._state(run, number)
            steps = list(map(sub, now, before))
            if steps and max(steps) - min(steps) <= SAME * max(now):
                self._skip(run, number, steps[0], busy, exposed)
                break
            before = now
        else:
            return None
        run.until([len(actions) for actions in self.order])
        return run.timeline()

    def _state(self, run: Run, number: int) -> list[float]:
        """All times on which the rest of the step depends: clocks, and end times of awaited results."""
        state, done = list(run.clocks), number * self.size
        for kind, stage, first, end in self.pending:
            state += run.ends[kind][stage][first + done : end + done]
        return state

    def _skip(self, run: Run, number: int, round_s: float, busy: Sequence[float], exposed: Sequence[float]) -> None:
        """Move from this cut to the last one, over rounds between and rounds removed, `round_s` seconds each."""
        to = len(self.cuts) - 1
        rounds = to - number + self.left_out
        here, there = number * self.size, to * self.size
        for kind, stage, first, end in self.pending:
            ends = run.ends[kind][stage]
            awaited = [at + rounds * round_s for at in ends[first + here : end + here]]
            # What was skipped is over, which only a rank's own weights still ask.
            ends[first + here : end + there] = [0.0] * (there - here) + awaited
        run.at = list(self.cuts[to])
        for rank in range(len(self.order)):
            run.clocks[rank] += rounds * round_s
            run.busy[rank] += rounds * (run.busy[rank] - busy[rank])
            run.exposed[rank] += rounds * (run.exposed[rank] - exposed[rank])


def find_rounds(order: Callable[[int], Order], ranks: int, micro_batches: int) -> Rounds | None:
    """The repetition of an order; None: the order is short already, or does not repeat.

    order: number of micro batches -> order.  ranks: of the pipeline.  micro_batches: of the whole step.
    """
    size = micro_batches // max(1, micro_batches // ranks)
    left_out = (micro_batches - 3 * ranks) // size - LOOKED_AT
    if left_out < 1:
        return None
    few = micro_batches - left_out * size
    short = order(few)
    cuts = [_cuts(actions, size) for actions in short]
    repeating = min(_repeating(actions, of_rank, size) for actions, of_rank in zip(short, cuts, strict=True))
    if repeating < 3:
        return None
    cuts = [of_rank[:repeating] for of_rank in cuts]
    pending = _pending(short, [of_rank[0] for of_rank in cuts])
    if pending is None or not _repeats(short, order(few + size), [of_rank[-2:] for of_rank in cuts], size):
        return None
    return Rounds(short, left_out, size, tuple(zip(*cuts, strict=True)), pending)


def _cuts(actions: Sequence[Action], size: int) -> list[int]:
    """Positions after each `size` backwards of the rank's first stage, in its list of actions."""
    stage = min(action.stage for action in actions)
    ends = [at for at, (kind, where, _) in enumerate(actions, 1) if where == stage and kind in ("B", "I")]
    return ends[size - 1 :: size]


def _repeating(actions: Sequence[Action], cuts: Sequence[int], size: int) -> int:
    """Number of cuts, counted from the first, between which the actions are the same but for the micro batch."""
    awaited: list[tuple[str, int, int]] = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        window = list(actions[start:end])
        if number and window != awaited:
            return number + 1
        awaited = [(kind, stage, i + size) for kind, stage, i in window]
    return len(cuts)


def _repeats(short: Order, longer: Order, windows: Sequence[Sequence[int]], size: int) -> bool:
    """Whether a longer order is the short one with its last window repeated once more."""
    for ours, theirs, (start, end) in zip(short, longer, windows, strict=True):
        again = [(kind, stage, i + size) for kind, stage, i in ours[start:]]
        if list(theirs[:end]) != list(ours[:end]) or list(theirs[end:]) != again:
            return False
    return True


def _pending(order: Order, cut: Sequence[int]) -> tuple[Pending, ...] | None:
    """Results awaited at a cut; None: an action before the cut depends on one after it, or came out of turn."""
    done: dict[tuple[str, int], list[int]] = {}
    for actions, end in zip(order, cut, strict=True):
        for action in actions[:end]:
            done.setdefault(_row(action), []).append(action.micro_batch)
    # A rank never waits for itself, so weights need not be looked at.
    rows = [row for row in done if row[0] != "W"]
    if any(done[row] != list(range(len(done[row]))) for row in rows):
        return None
    last = max(stage for _, stage in rows)
    after = {("F", last): ("B", last), **{("F", s): ("F", s + 1) for s in range(last)}}
    after |= {("B", s): ("B", max(0, s - 1)) for s in range(last + 1)}
    pending = [(*row, len(done[follower]), len(done[row])) for row, follower in after.items()]
    return None if any(first > end for _, _, first, end in pending) else tuple(pending)


def _row(action: Action) -> tuple[str, int]:
    return "B" if action.kind == "I" else action.kind, action.stage
