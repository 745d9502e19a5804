"""The result of a dry run, and its memory figures, summed from recorded changes of storages."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan.planner.dryrun.memory import SAVED, TRANSIENT, Storage
from titan.planner.dryrun.step_position import StepPosition
from titan.planner.dryrun.watch import COMMUNICATION, GATHERED, GRADIENTS, HOST, OPTIMIZER, OTHER, PARAMETERS

COMPONENTS = (PARAMETERS, GRADIENTS, OPTIMIZER, SAVED, TRANSIENT, GATHERED, COMMUNICATION, OTHER)
"""Components of memory; their sum is the total.

parameters: this rank's shards.  gradients: of parameters, sharded or not, in the dtype of computation and in that of
accumulation.  optimizer: state of the optimizer and of techniques.  saved: saved activations: made in forward (or
recomputation) and alive at the next backward operation.  transient: all other results of operations.  gathered:
unsharded parameters that modules compute with.  communication: send and receive buffers of collectives and pipelines.
other: tokens of the micro batches, module buffers, counters.
"""

POINTS = 400
"""Maximum number of points of a timeline."""

TOP_ALLOCATIONS = 20
"""Maximum number of top allocations."""


@dataclass(frozen=True)
class Point:
    """Peak of the allocated bytes within an interval of the step. label: step position of that peak."""

    label: str
    bytes: int


@dataclass(frozen=True)
class Allocation:
    """Storages of one kind that are allocated at the peak.

    component: one of COMPONENTS.  module: canonical name, with `*` for layer numbers.  op: operation that allocated
    them.  shape, dtype: of each.  count: how many.  bytes: of all together.
    """

    component: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Peak:
    """Step position of the memory peak. phase: see `Phase`.  micro_batch: from 0; -1: outside of micro batches."""

    phase: str
    micro_batch: int
    module: str


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind and size in one group, in one step of this rank.

    axes: mesh axes that the group's ranks differ in, such as "dp_shard x cp"; "world" for all ranks.
    bytes: of one call, of the whole tensor: what an all-gather yields, what a reduce-scatter takes in, what an
        all-reduce, an all-to-all or a send holds.
    sent: bytes of them that this rank sends in one call (`bytes_to_others`).
    """

    kind: str
    axes: str
    group_size: int
    bytes: int
    sent: float
    count: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products and attention, per step on this rank.

    recompute: forward operations repeated for backward, including attention scores.
    """

    forward: int
    backward: int
    recompute: int

    @property
    def total(self) -> int:
        """FLOPs of forward, backward and recomputation together."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True)
class DryRun:
    """A step of one rank. Memory is in bytes, by component (see COMPONENTS).

    parameters: elements that this rank holds.  steady: memory between steps.  at_peak: memory at the peak of the total;
    its sum is `peak_bytes`.  peak_by_component: the peak of each component, at whatever moment it occurs.
    host_bytes: peak of what techniques keep in the host's memory (`host_like`), which is in no other figure.
    timeline: up to POINTS intervals of the step, in order.  top_allocations: what is allocated at the peak, largest
    first.  flops: by module.  notes: differences between the dry run and a real run.
    """

    rank: int
    world_size: int
    stages: tuple[int, ...]
    parameters: int
    steady: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak_by_component: Mapping[str, int]
    peak: Peak
    host_bytes: int
    timeline: tuple[Point, ...]
    top_allocations: tuple[Allocation, ...]
    collectives: tuple[CollectiveCount, ...]
    flops: Mapping[str, Flops]
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak of the bytes allocated on this rank."""
        return sum(self.at_peak.values())

    @property
    def steady_bytes(self) -> int:
        """Bytes allocated on this rank between steps."""
        return sum(self.steady.values())

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sends to others; the metric of that name is the mean over ranks."""
        return sum(each.count * each.sent for each in self.collectives)

    @property
    def total_flops(self) -> Flops:
        """FLOPs of all modules of this rank together."""
        of = self.flops.values()
        return Flops(sum(f.forward for f in of), sum(f.backward for f in of), sum(f.recompute for f in of))

    def as_json(self) -> dict[str, Any]:
        """The dry run for `--json`: all fields, peak_bytes, steady_bytes, bytes_sent and total_flops."""
        totals = {"peak_bytes": self.peak_bytes, "steady_bytes": self.steady_bytes, "bytes_sent": self.bytes_sent}
        return {**asdict(self), **totals, "total_flops": asdict(self.total_flops)}


@dataclass(frozen=True)
class Memory:
    """Memory figures of a step, in bytes; fields as in `DryRun`."""

    steady: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak_by_component: Mapping[str, int]
    peak: StepPosition
    host: int
    timeline: tuple[Point, ...]
    top_allocations: tuple[Allocation, ...]


def add_up(changes: Sequence[tuple[Storage, int, StepPosition]]) -> Memory:
    """Sum recorded changes (storage, change in bytes, step position), given in order, to memory figures."""
    now, most = dict.fromkeys(COMPONENTS, 0), dict.fromkeys(COMPONENTS, 0)
    total, highest, at, peak, at_peak = 0, -1, -1, StepPosition("start", -1, ""), dict(now)
    intervals: list[tuple[StepPosition, int]] = []
    host = host_peak = 0
    for index, (storage, delta, place) in enumerate(changes):
        what = storage.what()
        if what == HOST:
            host += delta
            host_peak = max(host_peak, host)
            continue
        now[what] += delta
        most[what] = max(most[what], now[what])
        total += delta
        if total > highest:
            highest, at, peak, at_peak = total, index, place, dict(now)
        if intervals and intervals[-1][0] == place:
            intervals[-1] = place, max(total, intervals[-1][1])
        else:
            intervals.append((place, total))
    return Memory(now, at_peak, most, peak, host_peak, _thinned(intervals), _top_allocations(changes[: at + 1]))


def _thinned(intervals: Sequence[tuple[StepPosition, int]]) -> tuple[Point, ...]:
    """At most POINTS intervals; joined intervals keep their highest point, so the peak stays."""
    size = -(-len(intervals) // POINTS)
    runs = [intervals[start : start + size] for start in range(0, len(intervals), size)] if size else []
    highest = [max(run, key=lambda interval: interval[1]) for run in runs]
    return tuple(Point(str(place), size) for place, size in highest)


Kind = tuple[str, str, str, tuple[int, ...], str]
"""Kind of an allocation: component, module, op, shape, dtype."""


def _top_allocations(changes: Sequence[tuple[Storage, int, StepPosition]]) -> tuple[Allocation, ...]:
    alive: Counter[Storage] = Counter()
    for storage, delta, _ in changes:
        alive[storage] += delta
    sizes: Counter[Kind] = Counter()
    counts: Counter[Kind] = Counter()
    for storage, size in alive.items():
        if size and storage.what() != HOST:
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", storage.born.module)
            dtype = str(storage.dtype).removeprefix("torch.")
            key = storage.what(), module, storage.op, tuple(int(n) for n in storage.shape), dtype
            sizes[key] += size
            counts[key] += 1
    return tuple(Allocation(*key, counts[key], size) for key, size in sizes.most_common(TOP_ALLOCATIONS))
