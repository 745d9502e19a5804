"""Bytes of a pipeline stage: state, what a micro batch saves, and the moments of a backward where memory may peak.

State follows from parameters: each `PersistentState` has bytes per parameter, split over mesh axes. The shards are
those of PyTorch: tensors are split along the first dimension, and the first rank's shard is the largest.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titan.contracts.base.cost import Component, Costs, Elementwise, Matmul, Stage
from titan.contracts.base.layout import Layout
from titan.planner.step.activations import LayerMemory, recomputed
from titan.planner.step.layout import Sharing, sharing
from titan.planner.step.parameters import Tensors, state_bytes


class Moment(NamedTuple):
    """A moment within a backward, in bytes.

    gone: activations of the micro batch that are freed by then.
    activations, gradients, buffers: temporary memory at that moment.
    reducing: of it, what FSDP allocates in the stream of its reductions.
    """

    gone: float
    activations: float
    gradients: float = 0.0
    buffers: float = 0.0
    reducing: float = 0.0


class StageMemory:
    """Bytes of one stage: state, activations per micro batch, and temporary memory of a backward.

    sizes: parameters per shard unit, unsharded over data-parallel ranks.  shards: of them, what the rank updates.
    held: component -> bytes of state, all through the step.  hosted: of it, those in the host's memory.
    kept: bytes of activations per micro batch in flight.  head: those of the head.
    after: bytes that exist only after the update.
    awaited: bytes of gradients and of recomputed activations that a backward of the inputs leaves to that of the
        weights.
    mask: bytes of the mask of attention, if one is there all through the step and no micro batch keeps its own.
    making: bytes to make one: itself, if a micro batch keeps it, and a bool of its size.
    gathered, summed: bytes of gathered parameters and of accumulated gradients of shard units, all through a micro
        batch.
    sharded: of `summed`, bytes that FSDP allocates in the stream of its reductions.  reducing: most others there.
    moments: of a backward.  reductions: those of a step's last one besides, where gradients are reduced once per step.
    later: moments of all backwards but the step's first.  left: bytes of gradients that exist from the first one on.
        Without a `GatherPolicy`, the first backward makes them layer by layer, and others add to them.
    scratch: bytes on the device that the update takes besides state.
    unfit: of the gradient of an embedding table, which is made last, in place of copies and gradients that were cast:
        no free piece of the allocator is as large.
    """

    def __init__(self, stage: Stage, costs: Costs, layout: Layout, tensors: Tensors, layer: LayerMemory) -> None:
        self.stage, self.costs, self.layer = stage, costs, layer
        self.sizes = [size.total for size in tensors.sizes(stage)]
        self.held: dict[Component, float] = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0.0)
        self.hosted = dict(self.held)
        for held in costs.state:
            place = self.held if not held.on_host else self.hosted
            place[held.component] += state_bytes(held, stage, costs, layout, tensors)
        self.shards = [size.total for size in tensors.sizes(stage, sharing(costs.updated_over, costs, layout))]
        self.after = costs.after_update_bytes * sum(self.shards)
        self.scratch = self._scratch(tensors, sharing(costs.updated_over, costs, layout))
        self.head = layer.head * stage.head
        again = recomputed(stage.layers, costs.recompute)
        self.offloaded = self._hosted(stage.layers)
        self.kept = self._saved(stage.layers) + self.head + layer.embeddings * stage.embeddings
        # The first layer's input may lie in the buffer that it was received into, the last one's result be sent from.
        self.kept += self.layer.hidden * ((not stage.head) - (not stage.embeddings)) * costs.transfers_kept
        # Where all layers recompute, the mask of the last documents is there; that of a window, for all micro batches.
        own = self.layer.documents and again < len(stage.layers)
        mask = self.layer.mask * bool(stage.layers)
        self.kept, self.mask = self.kept + mask * own, mask * (not own)
        self.awaited = len(stage.layers) * layer.products + again * layer.again
        self.making = mask * (own + 1 / costs.itemsize)
        self.gathered = self.summed = 0.0
        if costs.gather is not None:
            self.gathered = sum(self.sizes) * costs.itemsize * (costs.gather.gather_every != "use")
            self.summed = self._summed(costs.gather.reduce_every == "step")
        elif costs.casts:
            self.gathered = (sum(self.sizes) - _Buffers(self).tables) * costs.itemsize
        self.moments = list(self._moments())
        once = costs.gather is not None and costs.gather.reduce_every == "step" and costs.micro_batches > 1
        reductions = list(self._reductions())
        self.reductions = reductions if once else []
        self.moments += [] if once else reductions
        if self.scratch and not _Buffers(self).pile_up:  # a tensor is updated as soon as its gradient is there
            ready = reductions or [Moment(0.0, 0.0)]
            self.moments += [each._replace(buffers=each.buffers + self.scratch) for each in ready]
        self.sharded = self.summed * (costs.gather is not None and costs.gather.reduce_every == "micro_batch")
        self.reducing = max((each.reducing for each in (*self.moments, *self.reductions)), default=0.0)
        self.unfit = _Buffers(self).table * (costs.casts and costs.micro_batches == 1)
        self.left, self.later = 0.0, self.moments
        if costs.gather is None and costs.gradients_freed:
            self._add_ends()
        elif costs.gather is None:
            self.summed = self.held["gradients"]

    def _add_ends(self) -> None:
        """Where the first backward makes gradients that others add to: set `left` and `later`; add both kinds' ends.

        The gradient of an embedding table is whole before it is added to that of an earlier micro batch. A tied head's
        gradient waits for it, and their sum is a third tensor.
        """
        self.left, table = self.held["gradients"], _Buffers(self).table
        waits = table * (self.costs.tied and self.stage.head)
        narrow = _Buffers(self).layer * self.costs.itemsize * self.costs.casts
        self.later = [moment._replace(gradients=narrow + waits * (moment.gone > 0)) for moment in self.moments]
        for moments, gradients in ((self.moments, self.left + 2 * waits), (self.later, table + 2 * waits)):
            moments.append(Moment(self.kept, self.layer.hidden, gradients, -self.gathered))

    def _saved(self, layers: Sequence[int]) -> float:
        """Bytes on the device that these layers save per micro batch."""
        again = recomputed(layers, self.costs.recompute)
        kept, least = self.layer.full - self.layer.hosted, self.layer.least - self.layer.hosted_again
        return (len(layers) - again) * kept + again * least

    def _hosted(self, layers: Sequence[int]) -> float:
        """Bytes in the host's memory that these layers save per micro batch."""
        again = recomputed(layers, self.costs.recompute)
        return (len(layers) - again) * self.layer.hosted + again * self.layer.hosted_again

    def _summed(self, whole: bool) -> float:
        """Bytes of gradients that earlier micro batches have left; `whole`: unsharded."""
        costs = self.costs
        if costs.micro_batches == 1:
            return 0.0
        if whole:
            return sum(self.sizes) * costs.reduce_itemsize
        narrow = costs.reduce_itemsize != costs.store_itemsize
        if costs.gather is not None and costs.gather.sums_replicas and narrow:
            return sum(self.shards) * costs.reduce_itemsize
        return self.held["gradients"]

    def _moments(self) -> Iterator[Moment]:
        """Of a backward: at the loss, and in those layers where memory may be highest.

        These are the last two, where most is saved. Where gradients pile up until the backward ends, they are the first
        two as well.
        """
        costs, layers = self.costs, self.stage.layers
        if self.stage.head:
            tokens = costs.share("seq_full") / costs.loss_chunks
            words = sum(costs.product(op)[1] for op in costs.head if isinstance(op, Matmul)) * tokens
            others = [op for op in costs.head if isinstance(op, Elementwise)]
            scratch = 4 * max((max(op.scratch, op.fixed_scratch) for op in others), default=0)
            fetched = self._hosted(layers[-1:])
            yield Moment(0.0, words * costs.itemsize + scratch + fetched, *_Buffers(self).at_loss())
            if costs.casts:
                yield Moment(0.0, self.layer.hidden, *_Buffers(self).in_layer(0, 0.0))
        count = len(layers)
        first = {count - 2, count - 1} if costs.gather is None and costs.gradients_freed else set[int]()
        for number in ({0, 1} | first) & set(range(count)):
            yield from self._in_layer(number)

    def _in_layer(self, number: int) -> Iterator[Moment]:
        """Of the backward of a layer, counted from the last one: in its midst, in attention's core, at its end."""
        layers, layer, buffers = self.stage.layers, self.layer, _Buffers(self)
        here = len(layers) - 1 - number
        again = layer.again * recomputed(layers[here : here + 1], self.costs.recompute)
        gone, ahead = self.head + self._saved(layers[here + 1 :]), self._hosted(layers[max(here - 1, 0) : here])
        fetched = ahead + self._hosted(layers[here : here + 1])
        yield Moment(gone + layer.used, again + layer.midst + fetched, *buffers.in_layer(number, layer.last))
        if layer.core:
            yield Moment(gone + layer.after_core, again + layer.core + fetched, *buffers.in_layer(number, layer.late))
        gone = self.head + self._saved(layers[here:])
        yield Moment(gone, layer.hidden * 2 + ahead, *buffers.in_layer(number, buffers.layer))

    def _scratch(self, tensors: Tensors, ranks: Sharing) -> float:
        """`scratch`; ranks: those that share the update."""
        scratch = self.costs.update_scratch
        if scratch is None or self.costs.update_on_host:
            return 0.0
        sizes = tensors.sizes(self.stage, ranks, scratch.kinds)
        numel = sum(size.total for size in sizes) if scratch.all_at_once else tensors.largest(self.stage, ranks)
        return scratch.bytes_per_param * min(numel, scratch.at_most or numel)

    def _reductions(self) -> Iterator[Moment]:
        """When gradients of the head, of the first layer, and of the unit that is reduced last are reduced.

        A pipeline that reduces once per step does so after its last backward, the first unit first.
        """
        costs, buffers, units = self.costs, _Buffers(self), list(range(len(self.sizes)))
        if costs.gather is None:
            return
        # A search makes one of these for pipelines of any schedule, so the stage says whether it is one of several.
        if not (self.stage.embeddings and self.stage.head) and costs.gather.reduce_every == "step":
            for unit in {0, units[-1]}:
                yield from buffers.reduced(self.kept, 0.0, units[: unit + 1])
            return
        if costs.tied and self.stage.head:
            units = [units[-1], *units[:-1]]
        elif self.stage.head:
            yield from buffers.reduced(self.head, self.layer.hidden, units[:-2:-1])
        if self.stage.layers and self.stage.embeddings:
            first = units[-len(self.stage.layers) - bool(self.stage.head and not costs.tied) :]
            gone = self.kept - self.layer.embeddings
            yield from buffers.reduced(gone, self.layer.hidden, first[::-1])
        yield from buffers.reduced(self.kept, self.layer.hidden, units[::-1])


class _Buffers:
    """What shard units hold for a time: (gradients, buffers) at moments of a backward.

    A unit's gradients are there in the compute dtype when its backward ends; to be reduced they are copied in the dtype
    of the reduction, and that copy stays until the next unit's has been made.
    """

    def __init__(self, stage: StageMemory) -> None:
        self.stage, self.costs, self.rules, self.sizes = stage, stage.costs, stage.costs.gather, stage.sizes
        self._each = self.costs.micro_batches == 1 or (self.rules and self.rules.reduce_every) == "micro_batch"
        self._alone = stage.shards == stage.sizes
        layers, last = len(stage.stage.layers), stage.stage.head or (self.costs.tied and stage.stage.embeddings)
        self.layer = self.sizes[-1 - last] if layers else 0.0
        self.head = self.sizes[-1] if stage.stage.head else 0.0
        self._before = len(self.sizes) - layers - last
        gradients = [held for held in self.costs.state if held.component == "gradients" and not held.on_host]
        self._width = sum(held.bytes_per_param for held in gradients)
        self.pile_up = not any(held.gathered_units for held in gradients)

    @property
    def tables(self) -> float:
        """Parameters of embedding tables that the head does not share."""
        return sum(self.sizes[: self._before])

    @property
    def table(self) -> float:
        """Bytes of the gradient of the largest embedding table."""
        tables = self.sizes[: self._before]
        if self.costs.tied and self.stage.stage.embeddings:
            tables = [*tables, self.sizes[-1]]
        return max(tables, default=0.0) * self._width

    def at_loss(self) -> tuple[float, float]:
        """When the gradient of the logits is made; in backward the last layer is gathered by then.

        In forward, several ranks have just copied the head out of the buffer that they gathered it into.
        """
        if self.rules is None:
            return 0.0, 0.0
        before = self.sizes[0] if self.rules.reduce_every == "micro_batch" and self.costs.micro_batches > 1 else 0.0
        forward = self.costs.loss_in_forward
        received = self.head * self.costs.itemsize * (forward and self.rules.gather_every != "step" and not self._alone)
        gathered = self._gathered(self.head + self.layer * (not forward))
        return 0.0, gathered + received + before * self.costs.reduce_itemsize

    def in_layer(self, number: int, made: float) -> tuple[float, float]:
        """In the backward of a layer, counted from the last; made: its parameters that have gradients by then.

        The next layer is gathered ahead, but not where one rank shards alone: FSDP2 has no collective to start then.
        """
        if self.rules is None and not self.costs.gradients_freed:
            return 0.0, 0.0
        if self.rules is None:
            before = self.head + number * self.layer
            done = before * self.pile_up
            if self.costs.casts:  # a layer's gradients are there in both dtypes when its backward ends
                ended, narrow = made if made == self.layer else 0.0, made * self.costs.itemsize
                return (done + ended) * self._width + narrow, -(before + ended) * self.costs.itemsize
            return min((done + made) * self._width, self.stage.held["gradients"]), 0.0
        waiting = self.layer if number or made == self.layer else self.head
        gathered = self._gathered(self.layer if self._alone else 2 * self.layer)
        if self._each and self.stage.gathered and not self.rules.spare_copies:
            gathered -= (self.head + number * self.layer) * self.costs.itemsize
        apart = self._each or self.rules.spare_copies  # else each gradient is added to its sum as soon as it is made
        return made * self.costs.itemsize * apart, gathered + waiting * self.costs.reduce_itemsize * self._each

    def reduced(self, gone: float, activations: float, units: Sequence[int]) -> Iterator[Moment]:
        """When the gradients of the last of these units are reduced, after those of the others.

        gone, activations: as in `Moment`.

        The unit's own gradients are there in the compute dtype, or as they were added up, copied for the reduction, and
        reduced, before they are rounded to the dtype that they are stored in. They may be freed once they are copied,
        and are where a rank shards with no other, which may divide another copy. The gathered parameters are gone.
        """
        costs, stage, unit = self.costs, self.stage, units[-1]
        if self.rules is None or not stage.held["gradients"]:
            yield Moment(gone, activations)
            return
        narrow, several = costs.reduce_itemsize != costs.store_itemsize, costs.micro_batches > 1
        made, shards = self.sizes[unit], sum(stage.shards[each] for each in units)
        last, earlier = stage.shards[unit], sum(stage.shards[each] for each in units[-2:-1])
        sums, sums_before = (shards, shards - last) if self.rules.sums_replicas else (last, earlier)
        kept, stored, width = 0.0, shards * costs.store_itemsize, costs.reduce_itemsize * narrow
        if several and self._each:  # what is added to has been counted
            stored, width = stored * narrow * self.rules.sums_replicas, width * (not self.rules.sums_replicas)
        else:
            kept = sum(self.sizes[each] for each in units) * costs.reduce_itemsize * several
        wide, wide_before = sums * width, sums_before * width
        own = made * (costs.reduce_itemsize if several and not self._each else costs.itemsize)
        before = min(max(stored - last * costs.store_itemsize, 0.0), stage.held["gradients"])
        stored = min(stored, stage.held["gradients"])
        gathered = stage.gathered and sum(self.sizes[each] for each in units) * costs.itemsize
        copied = made * costs.reduce_itemsize + (self._gathered(self.layer) if len(units) == 1 else 0.0) - gathered
        if self.rules.spare_copies and not self._alone:
            yield Moment(gone, activations, own + stored - kept, copied + wide, stored + wide)
            return
        # The unit is gathered yet, and the copy of the one before is there; or its own is.
        ending = sum(self.sizes[each] for each in units[-2:-1]) * costs.reduce_itemsize + made * costs.itemsize
        ending = max(copied, ending - gathered) + wide_before
        yield Moment(gone, activations, own + before - kept, ending, before + wide_before)
        divided = max(made * costs.reduce_itemsize - made * costs.store_itemsize * narrow, 0.0)
        divided *= self.rules.sums_replicas and self.rules.spare_copies
        yield Moment(gone, activations, divided + stored - kept, copied + wide, divided + stored + wide)

    def _gathered(self, used: float) -> float:
        assert self.rules is not None
        return used * self.costs.itemsize if self.rules.gather_every == "use" else 0.0
