"""What a dry run has found, and how it is added up from the changes of memory."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan.dryrun.memory import SAVED, TRANSIENT, Storage
from titan.dryrun.step_position import StepPosition
from titan.dryrun.watch import COMMUNICATION, GATHERED, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS

COMPONENTS = (PARAMETERS, GRADIENTS, OPTIMIZER, SAVED, TRANSIENT, GATHERED, COMMUNICATION, OTHER)
"""What memory is for; together they are all of it.

parameters: this rank's shards.  gradients: what a parameter's gradient is or has been, sharded or not, in the dtype it
is computed in and in the one it is added up in.  optimizer: its state.  saved: made in a forward (or recompute) and
still there when a backward operation next ran: kept for backward.  transient: all other results of operations.
gathered: whole parameters that modules compute with.  communication: buffers that collectives and pipelines send from
and receive into.  other: the micro batches' tokens, buffers of modules, counters.
"""

POINTS = 400
"""Most points of a timeline."""

TOP_ALLOCATIONS = 20
"""Most lines of top consumers."""


@dataclass(frozen=True)
class Point:
    """The most bytes alive within a stretch of the step."""

    label: str
    bytes: int


@dataclass(frozen=True)
class Allocation:
    """Storages of one kind that live at the peak: `count` of them with `bytes` together, made by `op` in `module`
    (layers by `*`) as a tensor of this shape and dtype."""

    component: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Peak:
    """Where in the step the most bytes were alive. micro_batch counts from 0; -1: outside of micro batches."""

    phase: str
    micro_batch: int
    module: str


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind and size in one group, in one step of this rank.

    axes: the mesh axes that the group's ranks differ in; "world" for all ranks.  bytes: of one call, of the whole
    tensor: what an all-gather yields, what a reduce-scatter takes in, what an all-reduce or a send holds.
    """

    kind: str
    axes: str
    group_size: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products and attention of one step of this rank. recompute: done again for backward, the scores
    of attention included."""

    forward: int
    backward: int
    recompute: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True)
class DryRun:
    """A step of one rank. Memory is in bytes, by component (see COMPONENTS).

    parameters: elements that this rank holds.  steady: memory between steps.  at_peak: memory at the peak of the total;
    its sum is `peak_bytes`.  peak_by_component: the peak of each component, at whatever moment it occurs.
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
    timeline: tuple[Point, ...]
    top_allocations: tuple[Allocation, ...]
    collectives: tuple[CollectiveCount, ...]
    flops: Mapping[str, Flops]
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return sum(self.at_peak.values())

    @property
    def steady_bytes(self) -> int:
        """Bytes alive between steps."""
        return sum(self.steady.values())

    @property
    def total_flops(self) -> Flops:
        """Of all modules."""
        of = self.flops.values()
        return Flops(sum(f.forward for f in of), sum(f.backward for f in of), sum(f.recompute for f in of))

    def as_json(self) -> dict[str, Any]:
        """All of it in values that JSON can hold."""
        totals = {"peak_bytes": self.peak_bytes, "steady_bytes": self.steady_bytes}
        return {**asdict(self), **totals, "total_flops": asdict(self.total_flops)}


@dataclass(frozen=True)
class Memory:
    """What the changes of a step add up to (see DryRun)."""

    steady: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak_by_component: Mapping[str, int]
    peak: StepPosition
    timeline: tuple[Point, ...]
    top_allocations: tuple[Allocation, ...]


def add_up(changes: Sequence[tuple[Storage, int, StepPosition]]) -> Memory:
    """Go through the changes twice: once for the sums, once more up to the peak for what is alive there."""
    now, most = dict.fromkeys(COMPONENTS, 0), dict.fromkeys(COMPONENTS, 0)
    total, highest, at, peak, at_peak = 0, -1, -1, StepPosition("start", -1, ""), dict(now)
    stretches: list[tuple[StepPosition, int]] = []
    for index, (storage, delta, place) in enumerate(changes):
        what = storage.what()
        now[what] += delta
        most[what] = max(most[what], now[what])
        total += delta
        if total > highest:
            highest, at, peak, at_peak = total, index, place, dict(now)
        if stretches and stretches[-1][0] == place:
            stretches[-1] = place, max(total, stretches[-1][1])
        else:
            stretches.append((place, total))
    return Memory(now, at_peak, most, peak, _thinned(stretches), _top_allocations(changes[: at + 1]))


def _thinned(stretches: Sequence[tuple[StepPosition, int]]) -> tuple[Point, ...]:
    """Join neighbours until few enough are left; each keeps its highest, so the peak stays."""
    size = -(-len(stretches) // POINTS)
    runs = [stretches[start : start + size] for start in range(0, len(stretches), size)] if size else []
    highest = [max(run, key=lambda stretch: stretch[1]) for run in runs]
    return tuple(Point(str(place), size) for place, size in highest)


Kind = tuple[str, str, str, tuple[int, ...], str]
"""Of a consumer: component, module, op, shape, dtype."""


def _top_allocations(changes: Sequence[tuple[Storage, int, StepPosition]]) -> tuple[Allocation, ...]:
    alive: Counter[Storage] = Counter()
    for storage, delta, _ in changes:
        alive[storage] += delta
    sizes: Counter[Kind] = Counter()
    counts: Counter[Kind] = Counter()
    for storage, size in alive.items():
        if size:
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", storage.born.module)
            dtype = str(storage.dtype).removeprefix("torch.")
            key = storage.what(), module, storage.op, tuple(int(n) for n in storage.shape), dtype
            sizes[key] += size
            counts[key] += 1
    return tuple(Allocation(*key, counts[key], size) for key, size in sizes.most_common(TOP_ALLOCATIONS))
