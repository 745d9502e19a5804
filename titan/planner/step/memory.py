"""Bytes that the ranks of each pipeline stage hold at the worst moment of a step.

State follows from parameters: each `PersistentState` states bytes per parameter, split over axes; slices are what
PyTorch makes of a tensor's first dimension, the first rank's being the largest. Activations are what operations keep,
times the micro batches that the schedule has under way; at each action of the schedule the working set of its stage is
added, and the largest sum counts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from titan.contracts.base.cost import (
    Action,
    Attention,
    Component,
    Costs,
    Elementwise,
    EmbeddingOp,
    Matmul,
    Operation,
    Order,
    Recompute,
    Region,
    Stage,
)
from titan.contracts.base.mesh import Layout
from titan.planner.machine.cluster import Cluster

GIB = 2.0**30
Shape = tuple[float, float]
"""Rows and columns of a rank's part of a parameter, before data parallelism slices the rows."""

REGIONS_OF_RESULTS: Mapping[str, Region] = {"all_gather": "seq_full", "reduce_scatter": "hidden"}
"""Where the results of collectives lie that selective recompute keeps."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for.

    activations: kept for backward, and the working set of the operation at the peak.  buffers: gathered parameters,
    gradients on their way, hidden states being received.  overhead: what the allocator cannot use, and what driver and
    communicators take.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    overhead: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.overhead

    def gib(self) -> dict[str, float]:
        """In GiB, with the total."""
        return {name: value / GIB for name, value in {**vars(self), "total": self.total}.items()}


def shapes(op: Operation, costs: Costs) -> list[Shape]:
    """The parameters of an operation on one rank."""
    if isinstance(op, Matmul):
        inputs, outputs = costs.product(op)
        bias = [(outputs, 1.0)] if op.bias else []
        return [(math.ceil(outputs), math.ceil(inputs)), *bias]
    if isinstance(op, EmbeddingOp):
        split = costs.cut("tp_sharded") if costs.style(op.module) == "embedding" else 1
        return [(math.ceil(op.rows / split), float(op.width))]
    if isinstance(op, Elementwise):
        return [(float(op.width), 1.0)] * op.params
    return []


def sliced(tensors: Iterable[Shape], ranks: int) -> float:
    """Numbers that the first of `ranks` holds of tensors cut along their rows."""
    return sum(math.ceil(rows / ranks) * columns for rows, columns in tensors)


class Tensors:
    """The parameters of a job on a rank, by shard units: embeddings, layers, the end with a table that it shares."""

    def __init__(self, costs: Costs) -> None:
        self._embeddings = [shapes(op, costs) for op in costs.embeddings]
        self._layer = [shape for op in costs.layer for shape in shapes(op, costs)]
        self.layer = sliced(self._layer, 1)
        self._end = [shape for op in costs.head for shape in shapes(op, costs)]
        self._table: list[Shape] = []
        if costs.tied:
            self._table, self._embeddings = self._embeddings[0], self._embeddings[1:]
            self._end = [shape for shape in self._end if shape[1] == 1.0]
        self._sizes: dict[tuple[int, ...], list[float]] = {}

    def sizes(self, stage: Stage, ranks: int) -> list[float]:
        """`sliced` of each unit of a stage, in forward order."""
        key = (len(stage.layers), stage.embeddings, stage.head, ranks)
        if key not in self._sizes:
            end = [*(self._end if stage.head else ()), *(self._table if stage.embeddings or stage.head else ())]
            units = [*(self._embeddings if stage.embeddings else ()), end]
            *embeddings, last = (sliced(unit, ranks) for unit in units)
            layers = [sliced(self._layer, ranks)] * len(stage.layers)
            self._sizes[key] = [size for size in (*embeddings, *layers, last) if size]
        return self._sizes[key]


def ranks_of(axes: Iterable[str], layout: Layout) -> int:
    """Ranks along these axes."""
    return math.prod(layout.degree(axis) for axis in axes)


class Moment(NamedTuple):
    """A moment of a backward: activations that are gone by then, and what is there for a time."""

    gone: float
    activations: float
    gradients: float = 0.0
    buffers: float = 0.0


class StageMemory:
    """Bytes of one stage of a job: its state, what each micro batch keeps, and what its backward needs for a time.

    held: by component, all through the step.  gathered, summed: parameters and gradients of shard units, beside the
    moments.  kept: of a micro batch under way.  moments: of a backward.
    """

    def __init__(self, stage: Stage, costs: Costs, layout: Layout, tensors: Tensors, layer: "LayerMemory") -> None:
        self.stage, self.costs, self.layer = stage, costs, layer
        self.sizes = tensors.sizes(stage, 1)
        self.held: dict[Component, float] = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0.0)
        slices: dict[int, tuple[float, float]] = {}
        for held in costs.state:
            ranks = ranks_of(held.axes, layout)
            if ranks not in slices:
                each = tensors.sizes(stage, ranks)
                slices[ranks] = sum(each), max(each, default=0.0)
            everything, largest = slices[ranks]
            size = min(held.gathered_units * largest, everything) if held.gathered_units else everything
            self.held[held.component] += held.bytes_per_param * size
        self.head = layer.head * stage.head
        again = recomputed(stage.layers, costs.recompute)
        self.kept = (len(stage.layers) - again) * self.layer.full + again * self.layer.least + self.head
        self.kept += layer.embeddings * stage.embeddings
        # The first layer's input lies in the buffer that it was received into, the last one's result is sent from.
        self.kept += self.layer.hidden * ((not stage.head) - (not stage.embeddings))
        self.gathered = self.summed = 0.0
        if costs.gather is not None:
            self.gathered = sum(self.sizes) * costs.itemsize * (costs.gather.gather_every != "use")
            self.summed = self._summed(costs.gather.reduce_every == "step")
        self.moments = list(
            self._moments(self.layer.full if again < len(stage.layers) else self.layer.least, again > 0)
        )

    def _summed(self, whole: bool) -> float:
        """Bytes of gradients that are there while micro batches run: of those that have run before."""
        if self.costs.micro_batches == 1:
            return 0.0
        return sum(self.sizes) * self.costs.reduce_itemsize if whole else self.held["gradients"]

    def _moments(self, layer: float, again: bool) -> Iterator[Moment]:
        """Of a backward: at the loss; in the last layer and in the one before, in the midst and at the end of each."""
        costs, buffers = self.costs, _Buffers(self)
        computed = self.layer.again if again else 0.0
        if self.stage.head:
            tokens = costs.share("seq_full") / costs.loss_chunks
            words = sum(costs.product(op)[1] for op in costs.head if isinstance(op, Matmul)) * tokens
            scratch = 4 * sum(op.scratch for op in costs.head if isinstance(op, Elementwise))
            yield Moment(0.0, words * costs.itemsize + scratch, *buffers.at_loss())
        gone = self.head
        for number in range(min(2, len(self.stage.layers))):
            yield Moment(gone + self.layer.used, computed + self.layer.midst, *buffers.in_layer(number, ends=False))
            gone += layer
            yield Moment(gone, self.layer.hidden * 2, *buffers.in_layer(number, ends=True))


class LayerMemory:
    """Bytes of a micro batch in one layer, and what embeddings and head keep.

    full: kept where nothing is computed again.  least: kept where it is.  again: what computing again adds to that.
    midst: results of operations in the midst of its backward, when what the last product kept is `used`, and gradients
    of its `last` parameters are there.  hidden: its input.
    """

    def __init__(self, costs: Costs, fused_norms: bool) -> None:
        self.costs = costs
        self.embeddings, self.full, self.head = (
            kept_by(ops, costs, fused_norms) for ops in (costs.embeddings, costs.layer, costs.head)
        )
        self.hidden = self.least = costs.dim * costs.share("hidden") * costs.itemsize
        linears = [op for op in costs.layer if isinstance(op, Matmul)]
        self.again = self.full - self.hidden
        if costs.recompute is not None and costs.recompute.saved == "products":
            results = sum(self._product(op) for op in costs.layer)
            self.least += results + self._received()
            # Results that only recompute needed are let go of as it comes by, all but the last.
            self.again -= results - self._product(linears[-1])
        self.used = kept_by(linears[-1:], costs, fused_norms)
        self.last = sum(sliced(shapes(op, costs), 1) for op in linears[-1:])
        widest = max((costs.product(op)[1] for op in linears), default=0.0)
        self.midst = 3 * (widest + costs.dim) * costs.share("seq_full") * costs.itemsize

    def _product(self, op: Operation) -> float:
        """Bytes of the result of a matmul or of attention."""
        costs = self.costs
        if isinstance(op, Matmul):
            return costs.product(op)[1] * costs.share("seq_full") * costs.itemsize
        if isinstance(op, Attention):
            return op.heads * (op.head_dim * costs.itemsize + 4) * costs.share("tp_sharded")
        return 0.0

    def _received(self) -> float:
        """Bytes that collectives within a layer's forward return."""
        costs, regions = self.costs, REGIONS_OF_RESULTS
        return sum(
            cost.count * cost.numel * costs.share(regions[cost.collective]) * costs.itemsize
            for cost in costs.collectives
            if cost.where == "layer" and cost.when == "forward" and cost.collective in regions
        )


class _Buffers:
    """What shard units hold for a time: (gradients, buffers) at moments of a backward.

    A unit's gradients are there in the compute dtype when its backward ends; to be reduced they are copied in the dtype
    of the reduction, and that copy stays until the next unit's has been made.
    """

    def __init__(self, stage: StageMemory) -> None:
        self.costs, self.rules, self.sizes = stage.costs, stage.costs.gather, stage.sizes
        layers = len(stage.stage.layers)
        self.layer = self.sizes[-1 - bool(stage.stage.head)] if layers else 0.0
        self.head = self.sizes[-1] if stage.stage.head else 0.0
        self.last = stage.layer.last

    def at_loss(self) -> tuple[float, float]:
        """When the gradient of the logits is made."""
        if self.rules is None:
            return 0.0, 0.0
        before = self.sizes[0] if self.rules.reduce_every == "micro_batch" and self.costs.micro_batches > 1 else 0.0
        return 0.0, self._gathered(self.head) + before * self.costs.reduce_itemsize

    def in_layer(self, number: int, *, ends: bool) -> tuple[float, float]:
        """In the midst or at the end of the backward of a layer, counted from the last."""
        if self.rules is None:
            return 0.0, 0.0
        each = self.costs.micro_batches == 1 or self.rules.reduce_every == "micro_batch"
        waiting = self.layer if ends or number else self.head
        gradients = (self.layer if ends else self.last) * self.costs.itemsize
        return gradients, self._gathered(2 * self.layer) + waiting * self.costs.reduce_itemsize * each

    def _gathered(self, used: float) -> float:
        assert self.rules is not None
        return used * self.costs.itemsize if self.rules.gather_every == "use" else 0.0


def kept_by(operations: Iterable[Operation], costs: Costs, fused_norms: bool) -> float:
    """Bytes that operations keep of a micro batch."""
    return sum(
        kept.numel * costs.share(kept.region) * (kept.itemsize or costs.itemsize)
        for op in operations
        for kept in op.saved
        if not (kept.unfused and fused_norms)
    )


def kind(stage: Stage, costs: Costs) -> tuple[int, ...]:
    """What the stages of a job that are alike have in common."""
    return len(stage.layers), recomputed(stage.layers, costs.recompute), stage.embeddings, stage.head


def recomputed(layers: Sequence[int], recompute: Recompute | None) -> int:
    """How many of these layers are computed again."""
    if recompute is None:
        return 0
    every = recompute.every
    return len(layers) if every == 1 else sum(1 for layer in layers if layer % every == 0)


def memory_of(costs: Costs, stages: Sequence[StageMemory], cluster: Cluster) -> list[Memory]:
    """Bytes on the ranks of each place of the pipeline, first to last, with the memory of each of its stages."""
    homes = [stage.rank for stage in costs.stages]
    places = 1 + max(homes)
    order = representative(costs.order, costs.micro_batches, len(stages), places)
    return [_of_place(place, stages, homes, order[place], costs, cluster) for place in range(places)]


def representative(order: Callable[[int], Order], micro_batches: int, stages: int, places: int) -> Order:
    """An order that keeps as much as that of so many micro batches: of fewer, where more keep nothing more."""
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


def _of_place(
    place: int,
    stages: Sequence[StageMemory],
    homes: Sequence[int],
    actions: Sequence[Action],
    costs: Costs,
    cluster: Cluster,
) -> Memory:
    mine = [stage for stage, home in zip(stages, homes, strict=True) if home == place]
    state = {name: sum(stage.held[name] for stage in mine) for name in mine[0].held}
    received = sum(
        (costs.receive_buffers + 1) * stage.layer.hidden * ((not stage.stage.embeddings) + (not stage.stage.head))
        for stage in mine
    )
    activations, gradients, buffers = peak(actions, stages)
    buffers += state["buffers"] + received * (costs.receive_buffers > 0) + sum(stage.gathered for stage in mine)
    gradients += sum(stage.summed for stage in mine) if costs.gather else state["gradients"]
    if activations + gradients + buffers < state["gradients"]:  # the update needs more than any micro batch
        activations, gradients, buffers = 0.0, state["gradients"], state["buffers"]
    device = cluster.device
    overhead = device.reserved_gib * GIB + device.fragmented * (activations + buffers)
    return Memory(state["parameters"], gradients, state["optimizer"], activations, buffers, overhead)


def peak(actions: Sequence[Action], stages: Sequence[StageMemory]) -> tuple[float, float, float]:
    """Activations, gradients and buffers at the moment when a rank, going through its actions, has most of them."""
    now, most = 0.0, (0.0, 0.0, 0.0)
    largest = 0.0
    for kind_, number, _ in actions:
        stage = stages[number]
        if kind_ == "F":
            now += stage.kept
        elif kind_ != "W":
            for gone, activations, gradients, buffers in stage.moments:
                here = now - gone + activations + gradients + buffers
                if here > largest:
                    largest, most = here, (now - gone + activations, gradients, buffers)
        if kind_ in "BW":
            now -= stage.kept
    return most
