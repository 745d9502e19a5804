"""What a step of a job costs a rank, as data that knows no device: operations, tensors kept, state held, bytes sent.

A model states the operations of its parts in its spec. Techniques, the loss and the optimizer change the `Costs` of a
job in their `cost` hooks, each what it owns. The planner turns them into bytes and, on a cluster, into seconds.

Numbers of tensors are stated for one token before anything is split. A `Region` says what splits them:

hidden  states between the layers' split pairs, residuals and norms: `dim` features of every position
whole   what a split pair is fed with: all positions of the sequence, `dim` features
inner   inside a pair: heads, hidden units of the feed-forward
logits  features are words
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Region = Literal["hidden", "seq_full", "tp_sharded", "logits"]
REGIONS: tuple[Region, ...] = ("hidden", "seq_full", "tp_sharded", "logits")


# --- operations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that forward keeps for backward.

    numbers: per token.  bytes: of one number; 0: of the compute dtype.  unfused: kept only where the operation is not
    one kernel (norms on a CPU).
    """

    numel: float
    region: Region
    itemsize: int = 0
    unfused: bool = False


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A linear, y = x W: 2 inputs outputs FLOPs a token forward, twice that backward.

    module: its name or glob, by which the spec's tensor styles say how it is split.
    """

    module: str
    inputs: int
    outputs: int
    bias: bool = False
    saved: tuple[SavedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention over a sequence: 4 S heads head_dim FLOPs a token forward (the full square), backward 2.5 times.

    scores_written: the S x S scores go through memory (no flash kernel).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scores_written: bool = False
    saved: tuple[SavedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """Operations bound by memory: numbers read and written a token, forward and backward.

    module, params: of a norm, whose `params` vectors of `width` are held by every rank that splits layers.
    scratch: numbers worked on at once beside what is returned; bytes are 4 each.
    """

    region: Region
    forward: float
    backward: float
    module: str = ""
    params: int = 0
    width: int = 0
    scratch: float = 0
    saved: tuple[SavedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EmbeddingOp:
    """A table of `rows` by `width` of which each token reads one row."""

    module: str
    rows: int
    width: int
    saved: tuple[SavedTensor, ...] = ()


Operation = Matmul | Attention | Elementwise | EmbeddingOp


def linear(
    module: str, inputs: int, outputs: int, *, saved: int = 0, region: Region = "seq_full", bias: bool = False
) -> Matmul:
    """A linear that keeps so many numbers a token in a region: its input, unless another operation has."""
    tensors = (SavedTensor(numel=saved, region=region),) if saved else ()
    return Matmul(module=module, inputs=inputs, outputs=outputs, bias=bias, saved=tensors)


def norm(module: str, dim: int, vectors: int = 1, statistics: int = 1) -> Elementwise:
    """A norm of hidden states that keeps its input and so many float32 `statistics` a token; it has `vectors` weights.

    Where it is not one kernel it also keeps the normalised states.
    """
    saved = (
        SavedTensor(numel=dim, region="hidden"),
        SavedTensor(numel=statistics, region="hidden", itemsize=4),
        SavedTensor(numel=dim, region="hidden", itemsize=4, unfused=True),
    )
    return Elementwise(
        module=module, region="hidden", forward=2 * dim, backward=3 * dim, params=vectors, width=dim, saved=saved
    )


def residual(dim: int) -> Elementwise:
    """The sum of what came into a pair and what the pair made of it; backward sums the gradients of its two uses."""
    return Elementwise(region="hidden", forward=3 * dim, backward=3 * dim)


def shared(dim: int, uses: int) -> Elementwise:
    """States that several products take: nothing forward, but backward sums what each of them makes of the gradient."""
    return Elementwise(region="seq_full", forward=0, backward=3 * dim * (uses - 1))


# --- state, traffic, recompute ------------------------------------------------------------------------------------

Component = Literal["parameters", "gradients", "optimizer", "buffers"]


@dataclass(frozen=True, kw_only=True)
class PersistentState:
    """Bytes a parameter that last through the step, split over the ranks of `axes`.

    units: only so many of the largest shard units hold them at a time (what is gathered for use); 0: all parameters.
    """

    component: Component
    bytes_per_param: float
    axes: tuple[str, ...] = ()
    gathered_units: float = 0


@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """How shard units gather parameters and reduce gradients, for what is there for a time only.

    gathered: "use": a unit's parameters while it computes, the next one's beside; "micro_batch": all from forward to
        backward; "step": all the time.  summed: gradients are reduced after each "micro_batch", or once a "step", until
        when they are added up whole.
    """

    gather_every: Literal["use", "micro_batch", "step"]
    reduce_every: Literal["micro_batch", "step"]


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Where = Literal["embeddings", "layer", "head", "unit", "step"]
When = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """A collective over the ranks of `axes`.

    where: how often: once for the embeddings, each layer or the head that a rank runs, for each shard unit (with its
        parameters), or once for all parameters of the rank.
    when: what it belongs to; `recompute`: where a layer is computed again.
    numbers: of the whole (gathered, unsplit) tensor for a token, or, with `per_parameter`, for a parameter.
    bytes: of one number; 0: of the compute dtype.  overlaps: runs beside computation, and only what exceeds it is seen.
    over: axes whose ranks share the tensor beforehand.  kept: not of the last unit of a stage, which is still there.
    every: "use" for each micro batch, "step" once a step however many micro batches.
    """

    axes: tuple[str, ...]
    collective: Collective
    where: Where
    when: When
    numel: float
    itemsize: float = 0
    count: float = 1
    per_parameter: bool = False
    overlaps: bool = False
    sharded_over: tuple[str, ...] = ()
    skip_last_unit: bool = False
    per: Literal["micro_batch", "step"] = "micro_batch"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which layers are computed again in backward, and what they keep.

    every: each so-many-th layer, by its number.  keeps: "input" of the layer alone, or the "products" (results of
    matmuls, attention and collectives) too.  whole: the last product too, whose result nobody asks for.
    """

    every: int = 1
    saved: Literal["input", "products"] = "input"
    full_layer: bool = False


# --- stages and their order ---------------------------------------------------------------------------------------


class Action(NamedTuple):
    """One piece of a rank's work in a step.

    kind: F forward, B whole backward, I the part of backward that gives the input's gradient, W the weights' part.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int


Order = Sequence[Sequence[Action]]
"""For each rank of a pipeline, what it does, in order."""


class Stage(NamedTuple):
    """Consecutive layers on one rank of the pipeline; `embeddings` and `head`: whether it has these too."""

    rank: int
    layers: range
    embeddings: bool = True
    head: bool = True


def one_after_the_other(micro_batches: int) -> Order:
    """A single stage: forward and backward of each micro batch in turn."""
    return [[Action(kind, 0, i) for i in range(micro_batches) for kind in ("F", "B")]]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step costs, as far as the job decides it. Hooks return changed copies (`dataclasses.replace`).

    embeddings, layer, head: operations of one micro batch, from the model's spec; the head's include the loss's.
    styles: module glob -> how it is split (`ModelSpec.tensor`).  tied: the head's matrix is the embeddings' table.
    splits: region -> ranks that share its numbers, of all axes together ("seq_full": of those that split sequences).
    bytes: of a number in the compute dtype.  reduce_bytes: of a gradient while it is summed.
    dtype, wide_dtype: in which the layers' matmuls run, and all other products.
    fused: a compiler merges elementwise operations.
    held: state.  update_bytes: read and written for each parameter that a rank updates, which the ranks of
        `updated_over` share; to begin with what the norm of the gradients and clipping take.
    units: of a technique that gathers and reduces parameters unit by unit.
    stages, order: the pipeline over the ranks of `pipeline_axis`.  blocking: a rank waits while it sends or receives.
    receive_buffers: for how many micro batches a stage keeps buffers to receive into, from each neighbour.
    sent_over: axes whose ranks send a slice each to the next stage, and gather it there.
    loss_chunks: into how many parts of its tokens a micro batch is cut for the head and the loss.
    """

    seq_len: int
    dim: int
    micro_batch: int
    micro_batches: int
    embeddings: tuple[Operation, ...]
    layer: tuple[Operation, ...]
    head: tuple[Operation, ...]
    styles: Mapping[str, str | None]
    tied: bool = False
    splits: Mapping[Region, int] = field(default_factory=lambda: dict.fromkeys(REGIONS, 1))
    itemsize: int = 4
    reduce_itemsize: int = 4
    dtype: str = "float32"
    wide_dtype: str = "float32"
    fused: bool = False
    state: tuple[PersistentState, ...] = (
        PersistentState(component="parameters", bytes_per_param=4),
        PersistentState(component="gradients", bytes_per_param=4),
    )
    update_bytes: float = 12.0
    updated_over: tuple[str, ...] = ()
    gather: GatherPolicy | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    recompute: Recompute | None = None
    stages: tuple[Stage, ...] = ()
    order: Callable[[int], Order] = one_after_the_other
    pipeline_axis: str = ""
    blocking: bool = False
    receive_buffers: int = 0
    sent_over: tuple[str, ...] = ()
    loss_chunks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch."""
        return self.micro_batch * self.seq_len

    def share(self, region: Region) -> float:
        """A rank's part of the tokens of a micro batch, for each number that a token has in a region."""
        return self.tokens / self.splits[region]

    def cut(self, region: Region) -> float:
        """Ranks that share the features of a region, its positions left aside."""
        return self.splits[region] / self.splits["seq_full"]

    def product(self, op: Matmul) -> tuple[float, float]:
        """Inputs and outputs of a rank's part of a linear."""
        style = self.style(op.module)
        if style == "row":
            return op.inputs / self.cut("tp_sharded"), op.outputs
        return op.inputs, op.outputs / (self.cut("tp_sharded") if style in ("column", "head") else 1)

    def style(self, module: str) -> str | None:
        """How a module is split; None where nothing says."""
        return self.styles.get(module)
