"""Bytes that one micro batch takes on a rank: what operations save, and the working sets of a layer's backward."""

from collections.abc import Iterable, Sequence

from titan.contracts.base.cost import Attention, Costs, Matmul, Operation, Recompute, Region, SavedTensor
from titan.planner.machine.kernels import masked
from titan.planner.step.parameters import parameters_of

REGIONS_OF_RESULTS: dict[str, Region] = {"all_gather": "seq_full", "all_reduce": "hidden", "reduce_scatter": "hidden"}
"""Where the results of collectives lie that selective recompute keeps, if not in the region of what is sent."""


class LayerMemory:
    """Bytes of one micro batch in one layer on one rank, and the saved tensors of embeddings and head.

    full: saved tensors of a layer without recomputation.
    least: saved tensors of a layer with recomputation: its input, and results that `Recompute.saved` names.
    again: bytes that recomputation adds to `least` while the layer's backward runs.
    products: results of its matmuls.
    hidden: the layer's input.  embeddings, head: saved tensors of the embeddings, and of head and loss.
    hosted, hosted_again: of `full` and of `least`, what is in the host's memory.
    used: saved tensors of the layer's last matmul, which are freed first in its backward.
    last: parameters of that matmul, whose gradients exist by then.  late: those of all operations after attention.
    midst: working set amid a layer's backward: three results as wide as the widest matmul, and a hidden state.
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
        self.products = sum(self._product(op) for op in linears)
        self.again = self.full - self.hidden
        if costs.recompute is not None and costs.recompute.saved == "all_but_scores":
            self.again = kept_by(costs.layer, costs, fused_norms, scores=True)
            self.least = self.full - self.again
        if costs.recompute is not None and costs.recompute.saved == "share":
            self.least += costs.recompute.share * self.again
            self.again = self.full - self.least
        if costs.recompute is not None and costs.recompute.saved == "products":
            results = sum(self._product(op) for op in costs.layer)
            self.least += results + self._received()
            # Results that only recompute needed are let go of as it comes by, all but the last.
            self.again -= results - self._product(linears[-1])
        also = bytes_of(costs.recompute.also, costs) if costs.recompute is not None else 0.0
        self.least, self.again = self.least + also, self.again - also
        self.hosted = self.hosted_again = 0.0
        if costs.activations_on_host:
            self.hosted = kept_by(costs.layer, costs, fused_norms, hosted=True)
            # Products that are kept one by one are not autograd's to save, unless a compiled block returns them.
            alone = costs.recompute is not None and costs.recompute.saved == "products" and not costs.fused
            self.hosted_again = self.hidden if alone else self.least
        self.used = kept_by(linears[-1:], costs, fused_norms)
        self.last = parameters_of(linears[-1:], costs, ways)
        widest = max((costs.product(op)[1] * op.used for op in linears), default=0.0)
        self.midst = (3 * widest + costs.dim) * costs.share("seq_full") * costs.itemsize
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
        """Bytes of the result of a matmul, or of attention that `Attention.is_product` counts among products."""
        costs = self.costs
        if isinstance(op, Matmul):
            return op.of_layers * (costs.product(op)[1] * op.used * costs.share("seq_full") * costs.itemsize)
        if isinstance(op, Attention) and op.is_product:
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


def kept_by(
    operations: Iterable[Operation], costs: Costs, fused_norms: bool, scores: bool = False, hosted: bool = False
) -> float:
    """Bytes that operations save per micro batch on one rank.

    scores: only those of attention's scores.  hosted: only those in the host's memory.
    """
    smallest = costs.activations_on_host * costs.dim * costs.share("hidden") * costs.itemsize if hosted else 0.0
    elsewhere = "several" if fused_norms else "one"
    return sum(
        op.of_layers * bytes_of([kept], costs)
        for op in operations
        for kept in _saved_by(op, costs)
        if kept.kernels != elsewhere and (kept.scores or not scores) and bytes_of([kept], costs) >= smallest
        if not (kept.unfused and costs.fused)
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


def recomputed(layers: Sequence[int], recompute: Recompute | None) -> int:
    """How many of these layers, given by global number, are recomputed."""
    if recompute is None:
        return 0
    return len(layers) if recompute.every == 1 else sum(layer % recompute.every == 0 for layer in layers)
