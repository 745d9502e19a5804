"""Long steps of a pipeline from short ones.

The middle of an order repeats itself in rounds of micro batches. When a rank does what comes next depends on the clocks
of the ranks, and on when the results came that are still waited for. If a round moves all of these by one and the same
time, the next round does so too, since it takes the largest of the same times, all later by the same. So rounds can be
left out, and their time added: to rounding, the result is that of the whole order. Where a step is not even by then (a
slow stage makes the others fall behind only gradually), the whole order is simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub

from titan.contracts.base.cost import Action, Order

from .schedule import Alive, Run, Timeline, Times, most_kept, simulate

SAME = 1e-12
"""Times that differ by less than this share of the step are the same; rounds left out multiply the difference."""

LOOKED_AT = 6
"""Rounds of backward that are looked at, at most, before a step is simulated in full."""

Pending = tuple[str, int, int, int]


class Steps:
    """Steps of a pipeline of any number of micro batches. Orders are made once.

    order: makes that of a number of micro batches; that of many must be that of fewer with rounds put in its middle.
    """

    def __init__(self, order: Callable[[int], Order], ranks: int) -> None:
        self._order, self._ranks = order, ranks
        self._whole: dict[int, Order] = {}
        self._rounds: dict[int, Rounds | None] = {}

    def simulate(
        self, micro_batches: int, times: Times, send_s: float | Sequence[float] = 0.0, *, blocking: bool = False
    ) -> Timeline:
        """A step of so many micro batches; see `schedule.simulate`, with which it agrees to 1e-9 of the time."""
        rounds = self.rounds(micro_batches)
        timeline = rounds.simulate(times, send_s, blocking=blocking) if rounds else None
        return timeline or simulate(self.order(micro_batches), times, send_s, blocking=blocking)

    def most_kept(self, micro_batches: int, weight: Sequence[float] | None = None, pending: float = 1.0) -> list[Alive]:
        """What each rank keeps when that is most; see `schedule.most_kept`."""
        rounds = self.rounds(micro_batches)
        return most_kept(rounds.order if rounds else self.order(micro_batches), weight, pending)

    def order(self, micro_batches: int) -> Order:
        """All actions of a step."""
        if micro_batches not in self._whole:
            self._whole[micro_batches] = self._order(micro_batches)
        return self._whole[micro_batches]

    def rounds(self, micro_batches: int) -> "Rounds | None":
        """The order by its rounds; None: it has few, or does not repeat."""
        if micro_batches not in self._rounds:
            self._rounds[micro_batches] = find_rounds(self.order, self._ranks, micro_batches)
        return self._rounds[micro_batches]


@dataclass(frozen=True)
class Rounds:
    """An order whose middle repeats.

    order: of fewer micro batches.  left_out: rounds that it lacks.  size: micro batches of a round.
    cuts: positions in each rank's actions, a round after another.  pending: (kind, stage, first, end) micro batches
    whose results are awaited at the first cut.
    """

    order: Order
    left_out: int
    size: int
    cuts: tuple[tuple[int, ...], ...]
    pending: tuple[Pending, ...]

    def simulate(
        self, times: Times, send_s: float | Sequence[float] = 0.0, *, blocking: bool = False
    ) -> Timeline | None:
        """The whole step; None: it is not even by the last cut."""
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
        """All times on which the rest depends."""
        state, done = list(run.clocks), number * self.size
        for kind, stage, first, end in self.pending:
            state += run.ends[kind][stage][first + done : end + done]
        return state

    def _skip(self, run: Run, number: int, round_s: float, busy: Sequence[float], exposed: Sequence[float]) -> None:
        """Go from this cut to the last, by way of what was left out, in no time."""
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
    """The rounds of an order, made for fewer micro batches; None: it is short already, or does not repeat."""
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
    """Positions after each round of backwards of the first stage."""
    stage = min(action.stage for action in actions)
    ends = [at for at, (kind, where, _) in enumerate(actions, 1) if where == stage and kind in ("B", "I")]
    return ends[size - 1 :: size]


def _repeating(actions: Sequence[Action], cuts: Sequence[int], size: int) -> int:
    """How many cuts, from the first, have one and the same round between them."""
    awaited: list[tuple[str, int, int]] = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        window = list(actions[start:end])
        if number and window != awaited:
            return number + 1
        awaited = [(kind, stage, i + size) for kind, stage, i in window]
    return len(cuts)


def _repeats(short: Order, longer: Order, windows: Sequence[Sequence[int]], size: int) -> bool:
    """Whether a longer order is the short one with its window once more."""
    for ours, theirs, (start, end) in zip(short, longer, windows, strict=True):
        again = [(kind, stage, i + size) for kind, stage, i in ours[start:]]
        if list(theirs[:end]) != list(ours[:end]) or list(theirs[end:]) != again:
            return False
    return True


def _pending(order: Order, cut: Sequence[int]) -> tuple[Pending, ...] | None:
    """What is awaited at a cut; None: something before it waits for something after it, or came out of turn."""
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
