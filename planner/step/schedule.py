"""Simulates one step of a pipeline, action by action.

Each rank runs its actions strictly in order. A forward waits for the forward of the stage before, a backward for the
backward of the stage after. If that stage is on another rank, the action also waits for the transfer.

A transfer takes `send_s` seconds. Where transfers run beside computation, a transfer only delays the action that waits
for it. Where transfers block, a transfer holds the sender, and holds the receiver from the moment when both the
receiver and the tensor are ready.

Cost: linear in the number of actions.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from operator import itemgetter

from titan.contracts.base.cost import Action, Order
from titan.errors import PluginError

Times = Mapping[str, Sequence[float]]
"""Seconds of each kind of action, by stage; kinds that do not occur may be left out."""

Record = tuple[Action, float, float]
Row = tuple[list[float], list[float], float, float, float, float]


@dataclass(frozen=True)
class Timeline:
    """When the actions of a step run, in seconds; per rank of the pipeline, busy + idle + exposed = makespan.

    makespan: end of the last action.  busy: seconds of computation.
    exposed: seconds of waiting for a transfer that has begun, or of being held by a transfer.
    idle: seconds of waiting for another rank's computation: the pipeline bubble.
    ends: when the rank is done.  actions: per rank (action, start, end), where `keep` asked for them.
    """

    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    exposed: tuple[float, ...]
    ends: tuple[float, ...]
    actions: tuple[tuple[Record, ...], ...] = ()


def simulate(
    order: Order, times: Times, send_s: float | Sequence[float] = 0.0, *, blocking: bool = False, keep: bool = False
) -> Timeline:
    """Simulate the actions of one step.

    Args:
        order: actions per rank.
        times: seconds of each kind of action, by stage.
        send_s: seconds to send one tensor one way: one number, or at s the seconds between stages s and s + 1.
            Transfers within a rank take no time.
        blocking: whether a transfer holds sender and receiver.
        keep: whether the timeline lists the actions.

    Raises:
        PluginError: the order deadlocks.
    """
    run = Run(order, times, send_s, blocking=blocking, keep=keep)
    run.until([len(actions) for actions in order])
    return run.timeline()


class Run:
    """A simulation in progress.

    at: actions done, per rank.  clocks: when each rank is free, in seconds.
    ends: kind -> stage -> micro batch -> end time in seconds; below 0 while not done. Kind I counts as B.
    busy, exposed: seconds so far, per rank.
    """

    def __init__(
        self, order: Order, times: Times, send_s: float | Sequence[float], *, blocking: bool, keep: bool = False
    ) -> None:
        self.order, ranks = order, len(order)
        self._homes = {stage: rank for rank, actions in enumerate(order) for stage in set(map(itemgetter(1), actions))}
        self.micro_batches = 1 + max(max(map(itemgetter(2), actions), default=-1) for actions in order)
        self.stages = 1 + max(self._homes)
        self.ends = {kind: [[-1.0] * self.micro_batches for _ in range(self.stages)] for kind in ("F", "B", "W")}
        sends = [send_s] * self.stages if isinstance(send_s, float | int) else send_s
        self._rows = {kind: list(self._rows_of(kind, seconds, sends, blocking)) for kind, seconds in times.items()}
        self._near = [
            sorted(
                {self._homes.get(s + d, rank) for s, r in self._homes.items() if r == rank for d in (-1, 1)} - {rank}
            )
            for rank in range(ranks)
        ]
        self.at, self.clocks = [0] * ranks, [0.0] * ranks
        self.busy, self.exposed = [0.0] * ranks, [0.0] * ranks
        self._records: list[list[Record]] | None = [[] for _ in order] if keep else None

    def _rows_of(self, kind: str, seconds: Sequence[float], sends: Sequence[float], blocking: bool) -> Iterator[Row]:
        """Of each stage: ends of what comes before, own ends, seconds, delay, and how long transfers hold the rank."""
        ends, last = self.ends[kind if kind != "I" else "B"], self.stages - 1
        forward, backward, always = self.ends["F"], self.ends["B"], [0.0] * self.micro_batches
        hops = [0.0 if self._homes.get(s) == self._homes.get(s + 1) else sends[s] for s in range(last)]
        into, out = [0.0, *hops], [*hops, 0.0]
        for stage, own in enumerate(ends):
            if kind == "W":
                yield backward[stage], own, seconds[stage], 0.0, 0.0, 0.0
                continue
            if kind == "F":
                before, lag, hold = forward[stage - 1] if stage else always, into[stage], out[stage]
            else:
                before, lag, hold = forward[last] if stage == last else backward[stage + 1], out[stage], into[stage]
            yield before, own, seconds[stage], lag, lag * blocking, hold * blocking

    def until(self, targets: Sequence[int]) -> None:
        """Simulate until each rank has done this many of its actions.

        Raises:
            PluginError: a rank waits for an action that comes later, or never.
        """
        waiting = deque(range(len(self.order)))
        queued = [True] * len(self.order)
        while waiting:
            rank = waiting.popleft()
            queued[rank] = False
            if self._advance(rank, targets[rank]):
                for other in self._near[rank]:
                    if not queued[other]:
                        queued[other] = True
                        waiting.append(other)
        for rank, target in enumerate(targets):
            if self.at[rank] < target:
                kind, stage, micro_batch = self.order[rank][self.at[rank]]
                raise PluginError(
                    f"the pipeline's order cannot proceed: rank {rank} would run {kind} of micro batch {micro_batch} "
                    f"in stage {stage}, and what that needs comes later, or never"
                )

    def _advance(self, rank: int, target: int) -> int:
        """Run actions of one rank till it must wait; returns how many."""
        rows, clock, exposed, busy, done = self._rows, self.clocks[rank], 0.0, 0.0, 0
        records = self._records[rank] if self._records is not None else None
        start = self.at[rank]
        for action in islice(self.order[rank], start, target):
            kind, stage, micro_batch = action
            before, own, seconds, lag, receive, hold = rows[kind][stage]
            ready = before[micro_batch]
            if ready < 0.0:
                break
            begin = clock + receive
            if ready + lag > begin:
                begin = ready + lag
                exposed += begin - (ready if ready > clock else clock)
            else:
                exposed += receive
            own[micro_batch] = end = begin + seconds
            busy += seconds
            exposed += hold
            clock = end + hold
            done += 1
            if records is not None:
                records.append((action, begin, end))
        self.at[rank], self.clocks[rank] = start + done, clock
        self.busy[rank] += busy
        self.exposed[rank] += exposed
        return done

    def timeline(self) -> Timeline:
        """The timeline of the actions done so far."""
        makespan = max(self.clocks)
        idle = [makespan - busy - exposed for busy, exposed in zip(self.busy, self.exposed, strict=True)]
        records = tuple(map(tuple, self._records)) if self._records else ()
        return Timeline(makespan, tuple(self.busy), tuple(idle), tuple(self.exposed), tuple(self.clocks), records)


@dataclass(frozen=True)
class Alive:
    """Micro batches whose activations a rank holds at its worst moment, by stage.

    whole: those between forward and backward.  pending: those between backward of the inputs (I) and of the weights
        (W).
    """

    whole: Mapping[int, int]
    pending: Mapping[int, int]


def most_kept(order: Order, weight: Sequence[float] | None = None, pending: float = 1.0) -> list[Alive]:
    """Per rank, the micro batches whose activations it holds when their bytes are largest.

    Args:
        order: actions per rank.
        weight: bytes per micro batch of each stage; by default equal for all stages.
        pending: share of these bytes that lasts from backward of the inputs until backward of the weights.
    """
    return [_most_kept(actions, weight, pending) for actions in order]


def _most_kept(actions: Sequence[Action], weight: Sequence[float] | None, pending: float) -> Alive:
    stages = sorted(set(map(itemgetter(1), actions)))
    heavy = {stage: weight[stage] if weight else 1.0 for stage in stages}
    changes = {
        "F": heavy,
        "B": {stage: -one for stage, one in heavy.items()},
        "I": {stage: (pending - 1) * one for stage, one in heavy.items()},
        "W": {stage: -pending * one for stage, one in heavy.items()},
    }
    now = most = 0.0
    worst = 0
    for number, (kind, stage, _) in enumerate(actions, 1):
        now += changes[kind][stage]
        if now > most * (1 + 1e-12):
            most, worst = now, number
    counts = {kind: dict.fromkeys(stages, 0) for kind in changes}
    for kind, stage, _ in actions[:worst]:
        counts[kind][stage] += 1
    return Alive(
        {stage: counts["F"][stage] - counts["B"][stage] - counts["I"][stage] for stage in stages},
        {stage: counts["I"][stage] - counts["W"][stage] for stage in stages},
    )


def representative(order: Callable[[int], Order], micro_batches: int, stages: int, places: int) -> Order:
    """An order with the same peak memory as that of all micro batches: of fewer, where more add nothing."""
    few = 2 * (stages + places)
    settled = _settled(order, few, places) if micro_batches > few + places else None
    return settled or _made(order, micro_batches)


@lru_cache(maxsize=256)
def _made(order: Callable[[int], Order], micro_batches: int) -> Order:
    return order(micro_batches)


@lru_cache(maxsize=256)
def _settled(order: Callable[[int], Order], few: int, places: int) -> Order | None:
    """The order of a few micro batches, if those of more keep nothing more."""
    short = order(few)
    return short if _under_way(short) == _under_way(order(few + places)) else None


def _under_way(order: Order) -> list[int]:
    """For each rank, the most micro batches that it has under way in its stages at a time."""
    most = []
    for actions in order:
        changes = (1 if kind_ == "F" else -1 if kind_ in "BW" else 0 for kind_, _, _ in actions)
        most.append(max(accumulate(changes), default=0))
    return most
