"""The formulas that papers and courses quote: what can be said of a model with pencil and paper.

Symbols: P parameters, l layers, h width, a heads, s sequence, b sequences, v vocabulary, t ranks that split a layer,
N devices, F peak FLOP/s of one, U the share of it that is reached, T tokens. Everything is a pure function of numbers,
but for the FLOPs of a planned job, which are counted by operation.
1 GB is 10^9 bytes here, as in the papers.
"""

from collections.abc import Mapping
from typing import NamedTuple

from titan.contracts.base.cost import Attention, Costs, Matmul, Operation
from titan.contracts.base.spec import ModelSpec
from titan.planner.step.activations import recomputed

TOKENS_PER_PARAMETER = 20
"""Compute-optimal ratio, as it is read from table 3 of Chinchilla (arXiv 2203.15556)."""


class StateBytes(NamedTuple):
    """Persistent bytes per parameter when training with Adam; the optimizer's include a float32 copy of the weight."""

    parameters: float
    gradients: float
    optimizer: float


RECIPES: Mapping[str, StateBytes] = {"16": StateBytes(2, 2, 12), "18": StateBytes(2, 4, 12), "20": StateBytes(2, 6, 12)}
"""Mixed precision with Adam. 16: half-precision weights and gradients, K = 12 (arXiv 1910.02054).  18: gradients are
summed in float32.  20: they are held in both precisions."""


# --- parameters ---------------------------------------------------------------------------------------------------


def textbook_parameters(layers: int, dim: int, vocab_size: int) -> int:
    """12 l h^2 + 2 v h: four h x h matrices of attention, a feed-forward of 4 h, embedding and head apart."""
    return 12 * layers * dim**2 + 2 * vocab_size * dim


def megatron_parameters(layers: int, dim: int, vocab_size: int, seq_len: int) -> float:
    """12 l h^2 (1 + 13/12h + (v + s)/12lh): with biases, norms, positions, one table (arXiv 2104.04473, equation 2)."""
    return 12 * layers * dim**2 * (1 + 13 / (12 * dim) + (vocab_size + seq_len) / (12 * layers * dim))


def parts(spec: ModelSpec) -> dict[str, int]:
    """Parameters by what they are; the sum is `spec.params`.

    matrices: of the layers, l (2 h a d + 2 h k d + n h f): a heads of d features, k key-value heads, n matrices of a
    feed-forward f wide.  experts: all matrices of stacks, of which a token passes some, with their biases.  positions:
    learned positions, and any other parameters beside the embedding table in `spec.embeddings`.
    """
    table = spec.head_matmul_params
    layers = round(spec.n_layers * spec.layer_params)
    stacks = [op for op in spec.layer_ops if isinstance(op, Matmul) and op.stack > 1]
    passed = sum(op.of_layers * op.used * op.inputs * op.outputs for op in stacks)
    matrices = round(spec.n_layers * (spec.matmul_params_per_layer - passed))
    return {
        "layers: matrices": matrices,
        "layers: experts": spec.stacked_params,
        "layers: norms and biases": layers - matrices - spec.stacked_params,
        "embedding": table,
        "positions": spec.embedding_params - table,
        "head": 0 if spec.tied else table,
        "last norm": spec.head_params - (0 if spec.tied else table),
    }


# --- memory -------------------------------------------------------------------------------------------------------


def zero_bytes(params: float, ranks: int, state: StateBytes = RECIPES["16"]) -> tuple[float, float, float, float]:
    """Bytes of state on one of `ranks` data-parallel ranks at ZeRO stage 0, 1, 2, 3 (arXiv 1910.02054, section 3).

    Each stage splits one thing more: the optimizer's state, the gradients, the parameters.
    """
    weights, gradients, optimizer = (params * share for share in state)
    return (
        weights + gradients + optimizer,
        weights + gradients + optimizer / ranks,
        weights + (gradients + optimizer) / ranks,
        (weights + gradients + optimizer) / ranks,
    )


class Activations(NamedTuple):
    """Bytes that one layer keeps for backward: everything, all but attention's scores, and its input alone."""

    none: float
    selective: float
    full: float


def activations(
    seq_len: int, dim: int, heads: int, batch: int = 1, tensor: int = 1, sequence: bool = False
) -> Activations:
    """Bytes of one layer by what is recomputed, half precision, dropout on (arXiv 2205.05198, table 2).

    s b h (34 + 5 a s / h) on one device.  With `tensor` ranks s b h (10 + 24/t + 5 a s / h t); where these split the
    `sequence` too, all of it divided by t.  Selective leaves the term of the scores out, as flash attention does; full
    is 2 s b h, whole on each rank.
    """
    unit = seq_len * batch * dim
    scores = 5 * heads * seq_len / dim / tensor
    selective = 34 / tensor if sequence else 10 + 24 / tensor
    return Activations(unit * (selective + scores), unit * selective, 2.0 * unit)


def float32_activations(seq_len: int, dim: int, heads: int, batch: int = 1) -> float:
    """Bytes of one layer in float32, 4 s b (14 h + 2 a s): what matrix products, GELU and softmax keep.

    14 h: inputs of q k v, of both products of attention, of its output, of both feed-forward matrices and of GELU.
    2 a s: the scores after softmax and after dropout. Norms and dropout's masks are left out.
    """
    return 4.0 * seq_len * batch * (14 * dim + 2 * heads * seq_len)


# --- work and time ------------------------------------------------------------------------------------------------


def hardware_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """FLOPs per token with full recomputation: four times the forward of the layers, three times that of the head."""
    return spec.flops_per_token(seq_len) + spec.n_layers * spec.layer_flops_per_token(seq_len)


def flops_per_token(costs: Costs) -> tuple[float, float]:
    """(model, hardware) FLOPs per token of forward and backward; the hardware's include recomputation."""
    layers = sum(len(stage.layers) for stage in costs.stages)
    layer, head = (sum(_forward_flops(op, costs) for op in ops) for ops in (costs.layer, costs.head))
    model = 3 * (layers * layer + head)
    again = sum(recomputed(stage.layers, costs.recompute) for stage in costs.stages)
    return model, model + again * _recomputed_flops(costs, layer)


def _recomputed_flops(costs: Costs, layer: float) -> float:
    """FLOPs per token that a recomputed layer repeats; layer: those of its forward."""
    again = costs.recompute
    if again is None or again.saved in ("input", "share"):
        return (1 - again.share) * layer if again else 0.0
    cores = [op for op in costs.layer if isinstance(op, Attention)]
    if again.saved == "products":
        return sum(_forward_flops(op, costs) for op in cores if not op.is_product)
    # The scores are one of two products of equal size; backward does not need the result of the other. A flash kernel
    # computes both.
    return sum(_forward_flops(op, costs) * (1 if again.full_layer or not op.scores_written else 0.5) for op in cores)


def _forward_flops(op: Operation, costs: Costs) -> float:
    """FLOPs per token of an operation in the mean layer."""
    if isinstance(op, Matmul):
        return op.of_layers * op.flops_per_token()
    return op.of_layers * op.flops_per_token(costs.seq_len) if isinstance(op, Attention) else 0.0


def megatron_flops(batch: int, seq_len: int, layers: int, dim: int, vocab_size: int) -> float:
    """FLOPs of a step with full recompute, 96 B s l h^2 (1 + s/6h + v/16lh) (arXiv 2104.04473, equation 3)."""
    return 96 * batch * seq_len * layers * dim**2 * (1 + seq_len / (6 * dim) + vocab_size / (16 * layers * dim))


def training_seconds(
    params: float, tokens: float, devices: int, peak: float, utilisation: float, recompute: bool = False
) -> float:
    """Seconds to train, 6 T P / (N F U) (arXiv 2001.08361), or with full recompute 8 T P / (N F U) (2104.04473).

    peak: FLOP/s of a device.  utilisation: of FLOPs that the numerator counts: MFU for 6, HFU for 8. One measured speed
    is both, HFU = 4/3 MFU; to use one U with the other number is off by a third.
    """
    return (8 if recompute else 6) * tokens * params / (devices * peak * utilisation)


def optimal_tokens(params: float) -> float:
    """Tokens that train a model of this size for the least compute: 20 per parameter (arXiv 2203.15556)."""
    return TOKENS_PER_PARAMETER * params
