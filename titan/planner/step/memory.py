"""Peak memory of the ranks of each pipeline stage, in bytes.

State follows from parameters: each `PersistentState` has bytes per parameter, split over mesh axes. The shards are
those of PyTorch: tensors are split along the first dimension, and the first rank's shard is the largest. Activations
are the saved tensors of a micro batch times the micro batches in flight. The schedule is replayed, the working set of
each backward is added, and the largest sum counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titan.contracts.base.cost import (
    Action,
    Attention,
    Component,
    Costs,
    Elementwise,
    Matmul,
    Operation,
    Recompute,
    Region,
    SavedTensor,
    Stage,
)
from titan.contracts.base.layout import Layout
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.machine.kernels import masked
from titan.planner.step.layout import Sharing, ranks_of, sharing
from titan.planner.step.parameters import Tensors, parameters_of
from titan.planner.step.schedule import representative

GIB = 2.0**30
REGIONS_OF_RESULTS: dict[str, Region] = {"all_gather": "seq_full", "all_reduce": "hidden", "reduce_scatter": "hidden"}
"""Where the results of collectives lie that selective recompute keeps, if not in the region of what is sent."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by purpose.

    parameters, gradients, optimizer: state, after sharding.
    activations: saved tensors, and the working set of the operation at the peak.
    buffers: gathered parameters, gradients during reduction, and receive buffers for hidden states.
    overhead: what the allocator loses to fragmentation, and what driver and communicators allocate.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    overhead: float

    @property
    def total(self) -> float:
        """Sum of all fields, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.overhead

    def gib(self) -> dict[str, float]:
        """All fields and the total, in GiB."""
        return {name: value / GIB for name, value in {**vars(self), "total": self.total}.items()}


class Moment(NamedTuple):
    """A moment within a backward, in bytes.

    gone: activations of the micro batch that are freed by then.
    activations, gradients, buffers: temporary memory at that moment.
    """

    gone: float
    activations: float
    gradients: float = 0.0
    buffers: float = 0.0


class StageMemory:
    """Bytes of one stage: state, activations per micro batch, and temporary memory of a backward.

    sizes: parameters per shard unit, unsharded over data-parallel ranks.
    held: component -> bytes of state, all through the step.
    kept: bytes of activations per micro batch in flight.  head: those of the head.
    after: bytes that exist only after the update.
    mask: bytes of the mask of attention, if one is there all through the step and no micro batch keeps its own.
    making: bytes to make one: itself, if a micro batch keeps it, and a bool of its size.
    gathered, summed: bytes of gathered parameters and of accumulated gradients of shard units, all through a micro
        batch.
    moments: of a backward.
    """

    def __init__(self, stage: Stage, costs: Costs, layout: Layout, tensors: Tensors, layer: "LayerMemory") -> None:
        self.stage, self.costs, self.layer = stage, costs, layer
        self.sizes = [size.total for size in tensors.sizes(stage)]
        self.held: dict[Component, float] = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0.0)
        slices: dict[Sharing, tuple[float, float]] = {}
        for held in costs.state:
            ranks = sharing(held.axes, costs, layout)
            if ranks not in slices:
                each = [size.total for size in tensors.sizes(stage, ranks)]
                slices[ranks] = sum(each), max(each, default=0.0)
            everything, largest = slices[ranks]
            size = min(held.gathered_units * largest, everything) if held.gathered_units else everything
            self.held[held.component] += held.bytes_per_param * size
        updated = tensors.sizes(stage, sharing(costs.updated_over, costs, layout))
        self.after = costs.after_update_bytes * sum(size.total for size in updated)
        self.head = layer.head * stage.head
        again = recomputed(stage.layers, costs.recompute)
        self.kept = (len(stage.layers) - again) * self.layer.full + again * self.layer.least + self.head
        self.kept += layer.embeddings * stage.embeddings
        # The first layer's input lies in the buffer that it was received into, the last one's result is sent from.
        self.kept += self.layer.hidden * ((not stage.head) - (not stage.embeddings))
        # Where all layers recompute, the mask of the last documents is there; that of a window, for all micro batches.
        own = self.layer.documents and again < len(stage.layers)
        mask = self.layer.mask * bool(stage.layers)
        self.kept, self.mask = self.kept + mask * own, mask * (not own)
        self.making = mask * (own + 1 / costs.itemsize)
        self.gathered = self.summed = 0.0
        if costs.gather is not None:
            self.gathered = sum(self.sizes) * costs.itemsize * (costs.gather.gather_every != "use")
            self.summed = self._summed(costs.gather.reduce_every == "step")
        self.moments = list(self._moments(layer.full if again < len(stage.layers) else layer.least, again > 0))

    def _summed(self, whole: bool) -> float:
        """Bytes of gradients that earlier micro batches have left; `whole`: unsharded."""
        if self.costs.micro_batches == 1:
            return 0.0
        return sum(self.sizes) * self.costs.reduce_itemsize if whole else self.held["gradients"]

    def _moments(self, layer: float, again: bool) -> Iterator[Moment]:
        """Of a backward: at the loss; in each of the last two layers in the midst, in attention's core, at the end."""
        costs, buffers = self.costs, _Buffers(self)
        computed = self.layer.again if again else 0.0
        if self.stage.head:
            tokens = costs.share("seq_full") / costs.loss_chunks
            words = sum(costs.product(op)[1] for op in costs.head if isinstance(op, Matmul)) * tokens
            scratch = 4 * sum(op.scratch for op in costs.head if isinstance(op, Elementwise))
            yield Moment(0.0, words * costs.itemsize + scratch, *buffers.at_loss())
        gone = self.head
        for number in range(min(2, len(self.stage.layers))):
            midst, core = computed + self.layer.midst, computed + self.layer.core
            yield Moment(gone + self.layer.used, midst, *buffers.in_layer(number, self.layer.last))
            if self.layer.core:
                yield Moment(gone + self.layer.after_core, core, *buffers.in_layer(number, self.layer.late))
            gone += layer
            yield Moment(gone, self.layer.hidden * 2, *buffers.in_layer(number, buffers.layer))


class LayerMemory:
    """Bytes of one micro batch in one layer on one rank, and the saved tensors of embeddings and head.

    full: saved tensors of a layer without recomputation.
    least: saved tensors of a layer with recomputation: its input, and results that `Recompute.saved` names.
    again: bytes that recomputation adds to `least` while the layer's backward runs.
    hidden: the layer's input.  embeddings, head: saved tensors of the embeddings, and of head and loss.
    used: saved tensors of the layer's last matmul, which are freed first in its backward.
    last: parameters of that matmul, whose gradients exist by then.  late: those of all operations after attention.
    midst: working set amid a layer's backward: three results as wide as the widest matmul and the hidden state.
    core: what the backward of attention holds besides.  after_core: saved after attention, freed by then.
    mask: the S x S mask that all layers share, in the compute dtype; 0: none.  documents: each micro batch has its own.

    Where layers differ, bytes are those of the mean layer, but for `midst` and `core`, those of the largest operation.

    costs: sizes and splits.  fused_norms: norms are one kernel, so they save no normalized states.  ways: ranks that
    each hold a part of the weights of every stack.
    """

    def __init__(self, costs: Costs, fused_norms: bool, ways: int) -> None:
        self.costs = costs
        self.embeddings, self.full, self.head = (
            kept_by(ops, costs, fused_norms) for ops in (costs.embeddings, costs.layer, costs.head)
        )
        self.hidden = self.least = costs.dim * costs.share("hidden") * costs.itemsize
        linears = [op for op in costs.layer if isinstance(op, Matmul)]
        self.again = self.full - self.hidden
        if costs.recompute is not None and costs.recompute.saved == "all_but_scores":
            self.again = kept_by(costs.layer, costs, fused_norms, scores=True)
            self.least = self.full - self.again
        if costs.recompute is not None and costs.recompute.saved == "products":
            results = sum(self._product(op) for op in costs.layer)
            self.least += results + self._received()
            # Results that only recompute needed are let go of as it comes by, all but the last.
            self.again -= results - self._product(linears[-1])
        also = bytes_of(costs.recompute.also, costs) if costs.recompute is not None else 0.0
        self.least, self.again = self.least + also, self.again - also
        self.used = kept_by(linears[-1:], costs, fused_norms)
        self.last = parameters_of(linears[-1:], costs, ways)
        widest = max((costs.product(op)[1] * op.used for op in linears), default=0.0)
        self.midst = 3 * (widest + costs.dim) * costs.share("seq_full") * costs.itemsize
        cores = [op for op in costs.layer if isinstance(op, Attention)]
        self.core = max((bytes_of(op.scratch, costs) for op in cores), default=0.0)
        # Attention that writes its scores adds biases too; its masks without them are of bool, and left out.
        given = [op for op in cores if masked(op, costs.seq_len) or (op.biased and not op.masked_blocks)]
        self.documents = any(op.documents for op in given)
        sequences = costs.micro_batch if self.documents else bool(given)
        heads = max((op.heads / costs.splits["tp_sharded"] if op.biased else 1.0 for op in given), default=0.0)
        self.mask = sequences * heads * costs.seq_len**2 * costs.itemsize
        after = costs.layer[costs.layer.index(cores[-1]) :][1:] if cores else ()
        self.after_core, self.late = kept_by(after, costs, fused_norms), parameters_of(after, costs, ways)

    def _product(self, op: Operation) -> float:
        """Bytes of the result of a matmul, or of attention unless it writes its scores: its products run again."""
        costs = self.costs
        if isinstance(op, Matmul):
            return op.of_layers * (costs.product(op)[1] * op.used * costs.share("seq_full") * costs.itemsize)
        if isinstance(op, Attention) and not op.scores_written:
            return op.of_layers * (op.heads * (op.head_dim * costs.itemsize + 4) * costs.share("tp_sharded"))
        return 0.0

    def _received(self) -> float:
        """Bytes that collectives within a layer's forward return."""
        costs, found = self.costs, 0.0
        for cost in costs.collectives:
            if cost.where == "layer" and cost.when == "forward":
                region = REGIONS_OF_RESULTS.get(cost.collective, cost.region)
                found += cost.of_layers * cost.count * cost.numel * costs.share(region) * costs.itemsize
        return found


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

    def at_loss(self) -> tuple[float, float]:
        """When the gradient of the logits is made; the last layer is gathered by then, for its backward."""
        if self.rules is None:
            return 0.0, 0.0
        before = self.sizes[0] if self.rules.reduce_every == "micro_batch" and self.costs.micro_batches > 1 else 0.0
        return 0.0, self._gathered(self.head + self.layer) + before * self.costs.reduce_itemsize

    def in_layer(self, number: int, made: float) -> tuple[float, float]:
        """In the backward of a layer, counted from the last; made: its parameters that have gradients by then."""
        if self.rules is None:
            return 0.0, 0.0
        each = self.costs.micro_batches == 1 or self.rules.reduce_every == "micro_batch"
        waiting = self.layer if number or made == self.layer else self.head
        return made * self.costs.itemsize, self._gathered(2 * self.layer) + waiting * self.costs.reduce_itemsize * each

    def _gathered(self, used: float) -> float:
        assert self.rules is not None
        return used * self.costs.itemsize if self.rules.gather_every == "use" else 0.0


def kept_by(operations: Iterable[Operation], costs: Costs, fused_norms: bool, scores: bool = False) -> float:
    """Bytes that operations save per micro batch on one rank; scores: only those of attention's scores."""
    return sum(
        op.of_layers * bytes_of([kept], costs)
        for op in operations
        for kept in _saved_by(op, costs)
        if not (kept.unfused and fused_norms) and (kept.scores or not scores)
    )


def _saved_by(op: Operation, costs: Costs) -> tuple[SavedTensor, ...]:
    """What an operation saves; attention that is given a mask repeats keys and values for each head of a group."""
    if not isinstance(op, Attention) or not masked(op, costs.seq_len):
        return op.saved
    return *op.saved, SavedTensor(numel=2 * (op.heads - op.kv_heads) * op.head_dim, region="tp_sharded")


def bytes_of(tensors: Iterable[SavedTensor], costs: Costs) -> float:
    """Bytes of saved tensors per micro batch on one rank."""
    return sum(
        t.numel * (costs.seq_len if t.scores else 1) * costs.share(t.region) * (t.itemsize or costs.itemsize)
        for t in tensors
    )


def kind(stage: Stage, costs: Costs) -> tuple[int, ...]:
    """What determines the memory and time of a stage: layers, recomputed layers, embeddings, head."""
    return len(stage.layers), recomputed(stage.layers, costs.recompute), stage.embeddings, stage.head


def recomputed(layers: Sequence[int], recompute: Recompute | None) -> int:
    """How many of these layers, given by global number, are recomputed."""
    if recompute is None:
        return 0
    return len(layers) if recompute.every == 1 else sum(layer % recompute.every == 0 for layer in layers)


def peak_bytes(costs: Costs, layout: Layout, device: DeviceMemory) -> float:
    """Peak memory of the fullest rank, in bytes."""
    ways = ranks_of(costs.stacks_over, layout)
    tensors, layer = Tensors(costs, ways), LayerMemory(costs, device.fused_norms or costs.fused, ways)
    alike = {kind(stage, costs): stage for stage in costs.stages}
    made = {key: StageMemory(stage, costs, layout, tensors, layer) for key, stage in alike.items()}
    stages = [made[kind(stage, costs)] for stage in costs.stages]
    return max(memory.total for memory in memory_of(costs, stages, device))


def memory_of(costs: Costs, stages: Sequence[StageMemory], device: DeviceMemory) -> list[Memory]:
    """Peak memory on the ranks of each pipeline rank, first to last; `stages` in the order of `costs.stages`."""
    homes = [stage.rank for stage in costs.stages]
    places = 1 + max(homes)
    order = representative(costs.order, costs.micro_batches, len(stages), places)
    return [_of_place(place, stages, homes, order[place], costs, device) for place in range(places)]


def _of_place(
    place: int,
    stages: Sequence[StageMemory],
    homes: Sequence[int],
    actions: Sequence[Action],
    costs: Costs,
    device: DeviceMemory,
) -> Memory:
    mine = [stage for stage, home in zip(stages, homes, strict=True) if home == place]
    state = {name: sum(stage.held[name] for stage in mine) for name in mine[0].held}
    received = sum(
        (costs.receive_buffers + 1) * stage.layer.hidden * ((not stage.stage.embeddings) + (not stage.stage.head))
        for stage in mine
    )
    activations, gradients, buffers = peak(actions, stages)
    masks = max(stage.mask for stage in mine)
    activations += masks
    buffers += state["buffers"] + received * (costs.receive_buffers > 0) + sum(stage.gathered for stage in mine)
    gradients += sum(stage.summed for stage in mine) if costs.gather else state["gradients"]
    if activations + gradients + buffers < state["gradients"]:  # the update needs more than any micro batch
        activations, gradients, buffers = masks, state["gradients"], state["buffers"]
    after = state["buffers"] + sum(stage.after for stage in mine)
    if activations + gradients + buffers < after:
        activations, gradients, buffers = 0.0, 0.0, after
    overhead = device.reserved_gib * GIB + device.fragmented * (activations + buffers)
    return Memory(state["parameters"], gradients, state["optimizer"], activations, buffers, overhead)


def peak(actions: Sequence[Action], stages: Sequence[StageMemory]) -> tuple[float, float, float]:
    """(activations, gradients, buffers) in bytes at a rank's worst moment, over its actions in order."""
    now, most = 0.0, (0.0, 0.0, 0.0)
    largest = 0.0
    for kind_, number, _ in actions:
        stage = stages[number]
        if kind_ == "F":
            if now + stage.making > largest:
                largest, most = now + stage.making, (now + stage.making, 0.0, 0.0)
            now += stage.kept
        elif kind_ != "W":
            for gone, activations, gradients, buffers in stage.moments:
                here = now - gone + activations + gradients + buffers
                if here > largest:
                    largest, most = here, (now - gone + activations, gradients, buffers)
        if kind_ in "BW":
            now -= stage.kept
    return most
