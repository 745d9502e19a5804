"""The operations of a model, from which its parameters, FLOPs, saved tensors and memory traffic follow.

Layers of a model may differ, as where windows alternate. The operations of a layer are those of the mean layer. Each
states in `of_layers` the share of the model's layers that have it; those of embeddings and head have 1.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Region = Literal["hidden", "seq_full", "tp_sharded", "logits"]
REGIONS: tuple[Region, ...] = get_args(Region)

Kind = Literal["matrix", "stack", "table", "head", "vector"]
"""What a parameter is, as in `ParameterKind`, in which "matrix" has stacks of weights too."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that forward saves for backward.

    numel: numbers per token, before any split.  region: whose ranks share the tensor.
    itemsize: bytes per number; 0: that of the compute dtype, `Costs.itemsize`.
    kernels: saved only where the operation runs as one kernel, or only where as several, as RMSNorm does on a CPU.
    scores: S x S scores of attention: `numel` is per token and key position, so it is multiplied by `Costs.seq_len`.
    unfused: saved only where no compiler fuses the operation; a compiled backward computes it again, as silu(w1 x).
    """

    numel: float
    region: Region
    itemsize: int = 0
    kernels: Literal["any", "one", "several"] = "any"
    scores: bool = False
    unfused: bool = False


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A linear layer, y = x W, or a stack of them, of which each token passes some.

    FLOPs per token: 2 * inputs * outputs * used forward, twice that backward.
    module: name or glob of the module; `ModelSpec.tensor` says by this name how tensor parallelism splits the weight.
    inputs, outputs: features, before any split.  bias: whether the module has a bias, of `outputs` numbers.
    stack: weights of this size, such as one per expert.  used: how many of them a token passes, such as the top k. Each
        token has `outputs * used` results. Tokens are assumed to be balanced over the stack.
    dtype: of the product, such as "float8"; empty: that of `Costs`.
    saved: tensors that the operation saves, unless another operation states the same tensor.
    """

    module: str
    inputs: int
    outputs: int
    bias: bool = False
    stack: int = 1
    used: float = 1
    of_layers: float = 1.0
    dtype: str = ""
    saved: tuple[SavedTensor, ...] = ()

    def flops_per_token(self) -> float:
        """FLOPs forward."""
        return 2.0 * self.inputs * self.outputs * self.used


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention; its backward has 2.5 times the FLOPs of its forward.

    heads, kv_heads: query heads and key-value heads, before any split.  head_dim: features per head.
    window: positions that a token attends to, its own included; 0: all.
    documents: a token attends to its own document only, by a mask of each sequence; a window is one of all sequences.
    biased: each head adds a bias of its own to its scores (ALiBi): the mask is of all heads.
    soft_cap: scores pass through a tanh, so they are written.
    masked_blocks: where ranks attend block by block, keys per token in blocks that need a mask, 0 without one; these
        blocks write their scores in float32, some at a time, and save none.
    skips: the kernel itself leaves out what documents or a window hide, and is given no mask.
    scores_written: the S x S scores pass through memory, as without a flash kernel (arXiv 2205.14135).
    compiled: a kernel of the compiler, whose result is computed again where recomputation saves products.
    blocks: kernels that compute it one after the other.
    copied: numbers read and written per token besides, to merge blocks or to reorder, forward and backward.
    scratch: tensors that backward holds while it runs, besides the saved ones.
    saved: tensors that the operation saves; with `scores_written`, one of them at least has `scores` set.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    documents: bool = False
    biased: bool = False
    soft_cap: bool = False
    masked_blocks: float = 0.0
    skips: bool = False
    scores_written: bool = False
    compiled: bool = False
    blocks: int = 1
    copied: tuple[float, float] = (0.0, 0.0)
    scratch: tuple[SavedTensor, ...] = ()
    of_layers: float = 1.0
    saved: tuple[SavedTensor, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether its result is among the products that `Recompute.saved` names."""
        return not (self.scores_written or self.compiled)

    def keys(self, seq_len: int) -> int:
        """Most keys that a token of a sequence of `seq_len` tokens attends to."""
        return min(self.window or seq_len, seq_len)

    def mean_keys(self, seq_len: int) -> float:
        """Keys that a position of a sequence attends to in the mean, in one document: early positions see fewer."""
        keys = self.keys(seq_len)
        return keys - keys * keys / (2 * seq_len)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs forward, by usual practice of the full S x S square, or S x window, masked positions included."""
        return 4.0 * self.keys(seq_len) * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """An operation limited by memory bandwidth, such as a norm, an activation function or a residual.

    region: of the numbers read and written.  forward, backward: how many of them per token, before any split.
    module, params, width: of a norm: its module, its number of weight vectors, and numbers per vector. Every rank of a
        tensor-parallel group holds them; of a norm of style "wide_norm", a slice.
    unfused_bytes: bytes read and written per token besides, in forward, where no compiler fuses the operation.
    scratch: float32 numbers that exist during the operation besides its inputs and outputs, for the whole micro batch.
    fixed_scratch: the same where they do not depend on tokens, such as copies of a weight; the larger of both counts.
    """

    region: Region
    forward: float
    backward: float
    module: str = ""
    params: int = 0
    width: int = 0
    unfused_bytes: float = 0.0
    scratch: float = 0
    fixed_scratch: float = 0
    of_layers: float = 1.0
    saved: tuple[SavedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EmbeddingOp:
    """An embedding lookup: each token reads one row of a table.

    module: name of the module.  rows, width: of the table, before any split.  saved: token ids are not counted.
    """

    module: str
    rows: int
    width: int
    of_layers: float = 1.0
    saved: tuple[SavedTensor, ...] = ()


Operation = Matmul | Attention | Elementwise | EmbeddingOp


def parameter_count(op: Operation) -> int:
    """Parameters of an operation in a layer that has it, before any split; of a stack, those of all its weights."""
    match op:
        case Matmul():
            return op.stack * (op.inputs + op.bias) * op.outputs
        case EmbeddingOp():
            return op.rows * op.width
        case Elementwise():
            return op.params * op.width
        case Attention():
            return 0


def linear(
    module: str, inputs: int, outputs: int, *, saved: int = 0, region: Region = "seq_full", bias: bool = False
) -> Matmul:
    """A linear layer (`Matmul`) that saves its input, `saved` numbers per token in `region`; 0: another states it."""
    tensors = (SavedTensor(numel=saved, region=region),) if saved else ()
    return Matmul(module=module, inputs=inputs, outputs=outputs, bias=bias, saved=tensors)


def norm(module: str, dim: int, vectors: int = 1, statistics: int = 1) -> Elementwise:
    """A norm of hidden states that saves its input and `statistics` float32 numbers per token.

    dim: features per token.  vectors: weight vectors; 1 for RMSNorm, 2 for LayerNorm.
    statistics: 1 for RMSNorm (the scale), 2 for LayerNorm (mean and scale), which is one kernel on a CPU too.
    """
    found = SavedTensor(numel=statistics, region="hidden", itemsize=4)
    layer_norm = (SavedTensor(numel=dim, region="hidden"), found)
    saved = layer_norm if statistics == 2 else saved_by_rms_norm(dim, found)
    return Elementwise(
        module=module, region="hidden", forward=2 * dim, backward=3 * dim, params=vectors, width=dim, saved=saved
    )


def saved_by_gate(numel: float) -> tuple[SavedTensor, ...]:
    """What act(w1 x) * w3 x saves, each of `numel` numbers per token: both inputs, and act(w1 x) if not compiled."""
    inputs = SavedTensor(numel=2 * numel, region="tp_sharded")
    return inputs, SavedTensor(numel=numel, region="tp_sharded", unfused=True)


def saved_by_rms_norm(numel: float, scales: SavedTensor, region: Region = "hidden") -> tuple[SavedTensor, ...]:
    """Its input of `numel` numbers per token and its scales; as several kernels, instead of the input, the input and
    the input times the scales, in float32."""
    wide = SavedTensor(numel=numel, region=region, itemsize=4, kernels="several")
    return SavedTensor(numel=numel, region=region, kernels="one"), scales, wide, wide


def residual(dim: int) -> Elementwise:
    """A residual: forward adds a tp pair's input and output; backward adds the gradients of the input's two uses."""
    return Elementwise(region="hidden", forward=3 * dim, backward=3 * dim)


def shared(dim: int, uses: int) -> Elementwise:
    """Hidden states of `dim` features that feed `uses` matmuls: each addition of gradients reads two, writes one."""
    return Elementwise(region="seq_full", forward=0, backward=3 * dim * (uses - 1))
