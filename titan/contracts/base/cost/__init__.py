"""The cost of one training step on one rank, as data: operations, saved tensors, persistent state, collectives.

A model states the operations of its parts in `ModelSpec`. `Costs` holds them for one job. The `cost` hooks of
techniques, loss and optimizer return changed copies. The planner turns the final `Costs` into bytes and seconds.

Sizes are per token and unsharded. A `Region` says which ranks share them. `Costs.splits` has the degree per region:

region      features per token           positions                        split by
hidden      dim                          between the tp pairs, residuals  sequence axes; tp with sequence_parallel
seq_full    dim, the input of a tp pair  all those of a sequence shard    sequence axes
tp_sharded  heads, feed-forward width    inside of a tp pair              sequence axes, tp
logits      vocabulary                   the head's output                sequence axes; tp with loss_parallel

A tp pair is a column-parallel linear followed by a row-parallel one (Megatron-LM, arXiv 1909.08053).

A worked layer: llama, dim 1024, 16 heads of 64 features, 4 key-value heads, ffn_dim 2816, one sequence of 2,048 tokens,
bf16 (itemsize 2), fused norms. Saved numbers per token, with q = 1024 and kv = 256 attention features:

operation          FLOPs per token, forward      saved numel, region
attn_norm          0                             1024 hidden, and 1 float32 hidden
wq, wk, wv         2 x 1024 x (1024 + 512)       1024 seq_full, their common input
attention          4 x 2048 x 16 x 64            2 q + 2 kv = 2560 tp_sharded, and 16 float32 tp_sharded
wo                 2 x 1024 x 1024               0: attention has saved its output
ffn_norm           0                             1024 hidden, and 1 float32 hidden
w1, w3             2 x 1024 x (2816 + 2816)      1024 seq_full, their common input
silu(w1) x w3      0                             3 x 2816 = 8448 tp_sharded
w2                 2 x 2816 x 1024               2816 tp_sharded
sum                30,932,992                    17,920 in bf16 and 18 in float32: 35,912 bytes

One rank saves 35,912 x 2,048 = 73,547,776 bytes per micro batch. With tp 2 and sequence_parallel, hidden and tp_sharded
are split by 2 and seq_full is not: 2,052 + 4,096 + 13,856 = 20,004 bytes per token.

A worked stack: Mixtral 8x7B's experts are three `Matmul(inputs=4096, outputs=14336, stack=8, used=2)` and the like,
with 3 x 8 x 4096 x 14336 = 1,409,286,144 parameters per layer, and 3 x 2 x 2 x 4096 x 14336 = 704,643,072 FLOPs per
token forward. Where 4 ranks share the stacks (`Costs.stacks_over`), each holds 2 experts, which see the tokens of 4
ranks: the rank's FLOPs are the same, in products with 4 times the rows.

docs/plugin_technique.md has a worked technique and optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from titan.contracts.base.cost.operations import REGIONS as REGIONS
from titan.contracts.base.cost.operations import Attention as Attention
from titan.contracts.base.cost.operations import Elementwise as Elementwise
from titan.contracts.base.cost.operations import EmbeddingOp as EmbeddingOp
from titan.contracts.base.cost.operations import Kind as Kind
from titan.contracts.base.cost.operations import Matmul as Matmul
from titan.contracts.base.cost.operations import Operation as Operation
from titan.contracts.base.cost.operations import Region as Region
from titan.contracts.base.cost.operations import SavedTensor as SavedTensor
from titan.contracts.base.cost.operations import linear as linear
from titan.contracts.base.cost.operations import norm as norm
from titan.contracts.base.cost.operations import parameter_count as parameter_count
from titan.contracts.base.cost.operations import residual as residual
from titan.contracts.base.cost.operations import saved_by_gate as saved_by_gate
from titan.contracts.base.cost.operations import saved_by_rms_norm as saved_by_rms_norm
from titan.contracts.base.cost.operations import shared as shared

Component = Literal["parameters", "gradients", "optimizer", "buffers"]


@dataclass(frozen=True, kw_only=True)
class PersistentState:
    """Memory per parameter that lasts through the whole step: weights, gradients, optimizer state, or buffers.

    component: the entry of the memory report that the bytes belong to.
    bytes_per_param: bytes per parameter, before any split; 4 for float32 master weights, 8 for both moments of AdamW.
    axes: mesh axes whose ranks share the bytes. Parameters of stacks are shared by the ranks along these axes that hold
        the same weights (`Costs.stacks_over`).
    on_host: in the host's memory, not in the device's.
    gathered_units: 0: for all parameters of the rank. N: for the N largest shard units only, which are gathered copies.
    kinds: of these kinds of parameters alone; empty: of all.
    """

    component: Component
    bytes_per_param: float
    axes: tuple[str, ...] = ()
    gathered_units: float = 0
    on_host: bool = False
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MatrixWork:
    """Matrix products of an update, each matrix on one of the ranks that share it.

    square, cube: the update of a matrix m x n, m <= n, or of each in a stack, has square m^2 n + cube m^3 FLOPs.
    over: axes to whose ranks matrices are dealt, by their FLOPs.
    """

    square: float
    cube: float
    over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UpdateScratch:
    """Memory of an update besides weights, gradients and state, which is freed when the update is done.

    bytes_per_param: of those that are updated at once: the largest tensor's, or with `all_at_once` all of the rank.
    at_most: parameters that are updated at once at most; 0: no limit.
    kinds: with `all_at_once`, parameters of these kinds alone; empty: of all.
    """

    bytes_per_param: float
    all_at_once: bool = False
    at_most: float = 0
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step of a job as `titan plan` predicts it for a cluster.

    time_s: seconds on the rank that ends last, which add up to the step, by purpose: "forward", "backward",
        "recompute", "optimizer", "bubble", and for communication that is not overlapped `Axis.family`.
    """

    cluster: str
    time_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """How long gathered parameters and unreduced gradients of shard units (`ModelSpec.shard_units`) stay in memory.

    gather_every: how long the gathered copy of a unit's parameters stays.
        "use": for each forward and backward of a unit, with the next unit prefetched (ZeRO 3).
        "micro_batch": from forward until the end of backward (ZeRO 2).  "step": all through the step (ZeRO 1).
    reduce_every: "micro_batch": gradients are reduced after each micro batch, and only the shard is added up.
        "step": reduced once; until then the rank adds up unsharded gradients.
    sums_replicas: reduced gradients stay until the backward ends, in the dtype of the reduction, and are summed over
        replicas.
    spare_copies: a unit's gradients stay until their copies are reduced; where a rank sums shards with no other, these
        are divided by 1 into further ones.
    """

    gather_every: Literal["use", "micro_batch", "step"]
    reduce_every: Literal["micro_batch", "step"]
    sums_replicas: bool = False
    spare_copies: bool = False


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Where = Literal["embeddings", "layer", "attention", "head", "unit", "step"]
When = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """A collective over the ranks of `axes`. Groups of one rank cost nothing.

    axes: mesh axes of the group.  collective: its kind; "send": every rank sends to the next one of the group.
    where: what the collective belongs to, and so how often it runs: once for the "embeddings", per "layer" or for the
        "head" of a rank; per shard "unit"; once per "step" for all parameters of the rank; or within a layer's
        "attention", whose result alone selective recomputation saves.
    when: the phase it runs in. "recompute": in backward, for layers that are recomputed from their input.
    numel: numbers of the whole, gathered tensor: per token, or per parameter where `per_parameter` is set. Of an
        all-gather the output, of a reduce-scatter the input, of other kinds the tensor of a rank.
    region: of which `numel` counts the features.  itemsize: bytes per number; 0: `Costs.itemsize`.
    count: collectives of this kind at each place, such as 2 per layer; below 1: their mean, such as 1/16 per step.
    of_layers: of a layer or its attention: share of the model's layers that run it.
    per_parameter: `numel` is multiplied by the parameters of the unit or rank instead of tokens.
    overlaps: runs beside computation; only the rest adds to the step. In attention, N run beside N of N + 1 blocks.
    sharded_over: axes over which the tensor is sharded before this collective; the size is divided by their ranks.
    kinds: with `per_parameter` once per step: parameters of these kinds alone; empty: of all.
    skip_last_unit: not for the last shard unit of a stage, which is still gathered from forward.
    per: how often it runs, in each micro batch or once per step.
    """

    axes: tuple[str, ...]
    collective: Collective | Literal["send"]
    where: Where
    when: When
    numel: float
    region: Region = "seq_full"
    itemsize: float = 0
    count: float = 1
    of_layers: float = 1.0
    per_parameter: bool = False
    kinds: tuple[Kind, ...] = ()
    overlaps: bool = False
    sharded_over: tuple[str, ...] = ()
    skip_last_unit: bool = False
    per: Literal["micro_batch", "step"] = "micro_batch"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation recomputation: which layers recompute their activations in backward, and what these layers save.

    every: layers whose global number is a multiple of this; 1: all layers.
    saved: "input": only the layer's input (full recomputation). "products": also the results of matmuls, collectives,
        and attention, but for one that writes scores or is `compiled`. "all_but_scores": all but written S x S scores
        (selective recomputation, arXiv 2205.05198). "share": the input, and the share `share` of all else; the FLOPs
        of the rest are repeated in proportion.
    also: tensors that recomputed layers save besides.
    full_layer: the last matmul of what is recomputed runs again too, although backward does not need its result.
    """

    every: int = 1
    saved: Literal["input", "products", "all_but_scores", "share"] = "input"
    share: float = 0.0
    also: tuple[SavedTensor, ...] = ()
    full_layer: bool = False


class Action(NamedTuple):
    """One action of a rank in a pipeline schedule, on a micro batch of the step, from 0, at a stage by global number.

    kind: F forward; B the whole backward; I backward of inputs; W backward of weights (zero bubble, arXiv 2401.10241).
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int


Order = Sequence[Sequence[Action]]
"""Per rank of a pipeline: its actions, in the order in which they run."""


class Stage(NamedTuple):
    """Consecutive layers, by global number, on one rank of a pipeline, maybe with the embeddings or the head."""

    rank: int
    layers: range
    embeddings: bool = True
    head: bool = True


def one_after_the_other(micro_batches: int) -> Order:
    """The order of a single stage: forward and backward of each micro batch in turn."""
    return [[Action(kind, 0, i) for i in range(micro_batches) for kind in ("F", "B")]]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of one step of a job on one rank. Hooks return changed copies, made by `dataclasses.replace`.

    seq_len: tokens per sequence, unsharded.  dim: features of a hidden state.
    micro_batch: sequences per forward on a rank.  micro_batches: forwards per step on a rank.
    embeddings, layer, head: operations per micro batch of the embeddings, of the mean layer (each times its
        `of_layers`), and of the head with the loss.
    styles: module glob -> tensor style (`ModelSpec.styles`).  tied: the head's weight is the embedding table.
    splits: region -> ranks that share its numbers, over all mesh axes.
    stacks_over: axes whose ranks each hold a part of the weights of every stack (`Matmul.stack`), and send each other
        the tokens that pass them. State and collectives of these weights are then those of the part.
    itemsize: bytes per number of the compute dtype.  reduce_itemsize: bytes per number of gradients in collectives.
    store_itemsize: bytes per number of stored weights, of reduced gradients, and of optimizer state.
    dtype: compute dtype of the layers' matmuls, such as "bfloat16" or "float8".  wide_dtype: of all other matmuls, and
        of stacks of weights.
    fused: a compiler fuses elementwise operations.  state: memory per parameter that lasts through the step.
    gradients_freed: gradients are freed after the update, so that each step makes them anew; False: their buffers last.
    accumulate_bytes: bytes read and written per parameter and micro batch, in the mean, to add the gradients of a micro
        batch to those of the ones before; of all parameters of a rank, before data parallelism splits them.
    copied_bytes: the same, to copy parameters and gradients where a group of one rank gathers and reduces them.
    casts: as a forward begins, parameters are copied in the compute dtype, but for embedding tables of their own. A
        unit's copies are freed when its backward ends, and its gradients are cast then.
    update_bytes: read and written per parameter in the update; before any optimizer by norm and clipping, 4 to 12.
    updated_over: axes whose ranks share the update.  matrix_work: matrix products of the update; None: it has none.
    after_update_bytes: bytes per parameter, shared over `updated_over`, that exist only after the update, when
        gradients and activations are gone, such as the buffers of an exchange of weights.
    optimizer_on_host: the optimizer's state is in the host's memory; each update brings it to the device and back.
    update_on_host: the host makes the update, in its memory.
    activations_on_host: saved tensors of layers with at least this share of the bytes of the layer's input are in the
        host's memory, but for those of two layers; 0: none are.
    update_scratch: memory that the update takes besides state; None: too little to count.
    update_buffers: bytes on the device that the update takes at most to bring state from the host and back.
    gather: lifetime of gathered parameters and unreduced gradients; None: nothing is gathered per shard unit.
    collectives: all collectives of the step except transfers between stages.  recompute: of activations; None: none.
    stages: stages of the whole pipeline.  order: micro batches per step -> order of actions per pipeline rank.
    pipeline_axis: mesh axis of the pipeline; empty: no transfers.
    blocking: sends and receives hold the rank until the transfer is done, instead of running beside computation.
    receive_buffers: micro batches per neighbor that a stage has buffers for, to receive into, beside the next one's.
    transfers_kept: these buffers last through the step, and what a stage has sent through its backward.
    sent_over: axes whose ranks each send a slice of the hidden states to the next stage, and gather the slices there.
    loss_chunks: parts of a micro batch's tokens in which head and loss run, one after the other.
    loss_in_forward: the head's gradients are made in its forward, right after the logits of the same tokens.
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
    stacks_over: tuple[str, ...] = ()
    itemsize: int = 4
    reduce_itemsize: int = 4
    store_itemsize: int = 4
    dtype: str = "float32"
    wide_dtype: str = "float32"
    fused: bool = False
    state: tuple[PersistentState, ...] = (
        PersistentState(component="parameters", bytes_per_param=4),
        PersistentState(component="gradients", bytes_per_param=4),
    )
    gradients_freed: bool = False
    accumulate_bytes: float = 0.0
    copied_bytes: float = 0.0
    casts: bool = False
    update_bytes: float = 12.0
    updated_over: tuple[str, ...] = ()
    matrix_work: MatrixWork | None = None
    after_update_bytes: float = 0.0
    optimizer_on_host: bool = False
    update_scratch: UpdateScratch | None = None
    update_buffers: float = 0.0
    update_on_host: bool = False
    activations_on_host: float = 0.0
    gather: GatherPolicy | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    recompute: Recompute | None = None
    stages: tuple[Stage, ...] = ()
    order: Callable[[int], Order] = one_after_the_other
    pipeline_axis: str = ""
    blocking: bool = False
    receive_buffers: int = 0
    transfers_kept: bool = False
    sent_over: tuple[str, ...] = ()
    loss_chunks: int = 1
    loss_in_forward: bool = False

    def casting(self) -> "Costs":
        """With parameters that are cast, if they need to be, and neither gathered nor reduced.

        A micro batch reads the stored ones and writes copies. The gradients of a single one are read and written again.
        """
        if self.itemsize == self.store_itemsize:
            return self
        gradients = (self.itemsize + self.store_itemsize) * (self.micro_batches == 1)
        return replace(self, casts=True, copied_bytes=self.store_itemsize + self.itemsize + gradients)

    @property
    def tokens(self) -> int:
        """Tokens per micro batch, unsharded."""
        return self.micro_batch * self.seq_len

    def share(self, region: Region) -> float:
        """Numbers that a rank has per feature of a region: tokens of a micro batch / ranks that share the region."""
        return self.tokens / self.splits[region]

    def cut(self, region: Region) -> float:
        """Ranks that share the features of a region; ranks that share its positions are not counted."""
        return self.splits[region] / self.splits["seq_full"]

    def product(self, op: Matmul) -> tuple[float, float]:
        """(inputs, outputs) of a rank's shard of a linear, or of each in a stack; styles say which are split."""
        style, ranks = self.style(op.module), self.cut("tp_sharded")
        rows, columns = style in ("row", "summand"), style in ("column", "head")
        return op.inputs / (ranks if rows else 1), op.outputs / (ranks if columns else 1)

    @property
    def needs_last_product(self) -> bool:
        """Whether backward of a layer needs the result of its last matmul, as that of a norm after it does."""
        last = max((at for at, op in enumerate(self.layer) if isinstance(op, Matmul)), default=0)
        return any(op.saved for op in self.layer[last + 1 :])

    def style(self, module: str) -> str | None:
        """The tensor style of a module; None where the spec has none."""
        return self.styles.get(module)
