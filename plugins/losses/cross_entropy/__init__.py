"""Summed cross-entropy of the next token; logits may be replicated or split over the vocabulary.

Maths, for a token with logits x, label y and log Z = log sum_v exp(x_v):

    reported  = log Z - x_y
    objective = log Z - x_y + z_loss * (log Z)^2        (z-loss: PaLM, arXiv 2204.02311, section 5)
    d objective / d x_v = softmax(x)_v * (1 + 2 * z_loss * log Z) - [v = y]

With z_loss above 0, rows of metrics have `z_loss`: the mean of z_loss * (log Z)^2 over the tokens since the row before.

Where ranks hold slices of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3), each computes the maximum and
the sum of exponentials of its slice, and the target's logit if it holds it; two all-reduces combine these. The gradient
of a slice needs no further communication. Slices may be uneven or empty.

Projection and loss run together on `chunk_tokens` tokens at a time, as Liger's fused linear cross-entropy does (arXiv
2410.10989), in training and in validation. With hidden states h, weight W and logits x = h W^T of a chunk, in training
right after its logits follow

    g = d objective / d x, written over x;      d objective / d h = g W;      d objective / d W += g^T h.

So gradients are made in the forward. The objective is a sum: all that the backward adds is its factor, such as 1 over
the step's tokens, which the forward knows before it rounds. A projection that is more than a product, such as one with
a soft cap or of slices, is differentiated by autograd, chunk by chunk.

Cost, for N tokens, V words, dim D, chunks of c tokens, e bytes per number: c V e for logits, in place of 2 N V e for
logits and their gradient; D (N + V) e for the gradients, from the forward to the backward. The products are the same,
with one pass over logits less. (To make logits again in the backward would hold no gradients, but take a third more
products.) The gradient of W is read and written once per chunk: 2 numbers moved for 2 c operations of its product. In
bf16 its sum over chunks is rounded as often; in float16 it is summed in fp32. Other projections hold a second chunk,
and a second gradient of W. On one CPU core, steps of a llama with 8 layers of 256, 4,096 tokens and 32,000 words took
1.02 of the CPU time and 0.63 of the memory that they take with all logits at once (`bench.loss`).
Communication if the vocabulary is split: 12 bytes per token, in two all-reduces per chunk.

Limits: where a pipeline schedule has several micro batches between forward and backward of the last stage, such as
GPipe, each holds D V e. With N < D that is more than logits: set `chunk_tokens` to N there, which keeps logits instead.
Evaluation makes all logits of a micro batch at once; validation makes chunks. Sums and gradients are right for labels
in [0, vocabulary) and IGNORE. Any other label makes the loss NaN. The backward runs once, and cannot be differentiated
again. Logits are split on one mesh axis at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan.contracts import IGNORE, Costs, Job, Loss, Measure, Projection, kind_of, option, register
from titan.contracts.base.cost import Elementwise, Matmul, Operation, SavedTensor

from .fused import fused, tokens_at_once
from .rows import CHUNK, Rows, Slice, local_of, look, write_gradient

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens of a chunk at least: with fewer, reading and writing the gradient of W takes longer than making it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[loss]` with `name = "cross_entropy"`."""

    z_loss: float = option(
        0.0, "coefficient of the z-loss (log Z)^2, which keeps log Z near 0; PaLM used 1e-4", at_least=0
    )
    chunk_tokens: int | None = option(
        None,
        "tokens whose logits exist at a time, except in evaluation; a micro batch's or more: all logits, kept for the "
        "backward; unset: so many that logits are about as large as hidden states, but 2,048 at least (256 on a CPU)",
        at_least=1,
        unit="tokens",
    )


@register
class CrossEntropy(Loss):
    """Cross-entropy of the next token in nats, with z-loss on request; splits over the vocabulary."""

    name = "cross_entropy"
    Config = Config
    default = True
    measures: ClassVar = {
        "z_loss": Measure("what z-loss adds to the objective, in nats per token; absent with z_loss = 0", "mean")
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._z_loss: Tensor | None = None  # since the row before: the sum, and the number of tokens

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Logits are made, read twice and overwritten, a chunk at a time; the gradients of both factors are kept.

        With all logits at once, these are kept, read twice forward, and read and written backward.
        """
        words, tokens = job.spec.vocab_size, costs.share("seq_full")
        size = _chunk(self.config.chunk_tokens, int(tokens), costs.dim, words, "cuda")
        if size:
            return _cost_in_chunks(costs, words, size)
        kept = SavedTensor(numel=words, region="logits"), SavedTensor(numel=8 + 8, region="seq_full", itemsize=1)
        scratch = _scratch(costs.share("logits") * words, costs.itemsize) * (costs.itemsize < 4)
        loss = Elementwise(region="logits", forward=2 * words, backward=2 * words, scratch=scratch, saved=kept)
        # What others take in the backward comes when the logits are gone.
        gone = costs.share("logits") * words * costs.itemsize / 4
        before = (
            replace(op, scratch=max(op.scratch - gone, 0.0)) if isinstance(op, Elementwise) else op for op in costs.head
        )
        return replace(costs, head=(*before, loss))

    def of_hidden(self, hidden: Tensor, labels: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
        """As `compute` of the projection of hidden states [B, S, D], with the logits of some tokens at a time."""
        kind, dim = kind_of(hidden.device), hidden.shape[-1]
        size = _chunk(self.config.chunk_tokens, labels.numel(), dim, project.words, kind)
        if not size:
            return self.compute(project(hidden), labels)
        if not torch.is_grad_enabled():
            pairs = zip(torch.split(hidden.flatten(0, -2), size), torch.split(labels.flatten(), size), strict=True)
            sums = [torch.stack(self.compute(project(states[None]), own[None])) for states, own in pairs]
            objective, reported = torch.stack(sums).sum(0)
            return objective, reported
        objective, reported, added = fused(hidden, labels, project, size, self.config.z_loss)
        self._note(added, labels)
        return objective, reported

    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, reported): fp32 sums over the tokens whose label is not IGNORE; 0 where there is none.

        logits [B, S, V] of any floating dtype, plain or a DTensor split over V; labels [B, S].

        Raises:
            PluginError: the logits are a DTensor laid out in another way.
        """
        local, vocabulary = local_of(logits)
        objective, reported, added = _summed_cross_entropy(
            local.flatten(0, -2), labels.flatten(), vocabulary, self.config.z_loss
        )
        self._note(added, labels)
        return objective, reported

    def _note(self, added: Tensor, labels: Tensor) -> None:
        """Add what z-loss added to the sum for the row; not in validation."""
        if self.config.z_loss and torch.is_grad_enabled():
            found = torch.stack([added, (labels != IGNORE).sum()]).double()
            self._z_loss = found if self._z_loss is None else self._z_loss + found

    def measure(self) -> Mapping[str, Tensor | None]:
        found, self._z_loss = self._z_loss, None
        return {"z_loss": found}


class _SummedCrossEntropy(torch.autograd.Function):
    """logits [N, v] of a slice of the vocabulary, labels [N] -> (objective, reported, z-loss)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Slice, z_loss: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = look(logits, labels, vocabulary)
        reported, added = found.sums(labels, z_loss)
        ctx.save_for_backward(logits, labels, *found)
        ctx.vocabulary, ctx.z_loss = vocabulary, z_loss
        ctx.mark_non_differentiable(reported, added)
        return reported + added, reported, added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, *found = ctx.saved_tensors
        result = torch.empty_like(logits)
        write_gradient(result, logits, labels, Rows(*found), ctx.vocabulary, ctx.z_loss, grad)
        return result, None, None, None


_summed_cross_entropy: Callable[[Tensor, Tensor, Slice, float], tuple[Tensor, Tensor, Tensor]] = (
    _SummedCrossEntropy.apply
)


# --- chunks -------------------------------------------------------------------------------------------------------


def _chunk(asked: int | None, tokens: int, dim: int, words: int, kind: str) -> int:
    """Tokens per chunk of a micro batch; 0: all at once, with the logits kept for the backward.

    asked: `chunk_tokens`.
    """
    least = CHUNK_TOKENS.get(kind, CHUNK_TOKENS["cuda"])
    if asked is not None and asked >= tokens:
        return 0
    return tokens_at_once(tokens, asked or max(least, -(-tokens * dim // words)))


def _scratch(logits: float, itemsize: int) -> float:
    """float32 numbers that exist while a gradient of so many logits is made: parts of them, and the part before."""
    part = CHUNK["cuda"]
    if itemsize >= 4:
        return min(logits, part)
    return part + 2 * min(logits - part, part) if logits > part else 2 * logits


def _cost_in_chunks(costs: Costs, words: int, size: int) -> Costs:
    """What `cost` returns for chunks of `size` tokens."""
    tokens = costs.share("seq_full")
    chunks = -(-tokens // size)
    products = [op for op in costs.head if isinstance(op, Matmul)]
    rest = [op for op in costs.head if isinstance(op, Elementwise) and op.region == "logits"]
    weights = sum((op.inputs + op.bias) * op.outputs for op in products)
    plain = not rest and costs.cut("tp_sharded") == 1 and not any(op.bias or op.dtype for op in products)
    logits, slices = costs.share("logits") * words / chunks, weights / costs.cut("tp_sharded")
    others = max((op.scratch for op in costs.head if isinstance(op, Elementwise)), default=0) / chunks
    others = max([others, *(op.fixed_scratch for op in costs.head if isinstance(op, Elementwise))])
    passing, held = max(_scratch(logits, costs.itemsize), others), tokens * costs.dim  # the hidden states
    if not plain:  # also the gradient of a chunk's logits, and what autograd keeps of it and works with, or that of W
        passing = max(passing, 2 * len(rest) * logits * costs.itemsize / 4)
        second = slices * costs.itemsize / 4
        passing = max(passing, second) if chunks > 1 else max(passing - second, 0)
        held += logits * (1 + len(rest))
    scratch = passing + held * costs.itemsize / 4
    # In float16 the sum over chunks is float32.
    wide = 4 * (plain and costs.wide_dtype == "float16")
    gradient = SavedTensor(numel=weights / tokens, region="tp_sharded", itemsize=wide)
    moved = 4 * words + 2 * chunks * costs.share("tp_sharded") * weights / tokens / costs.share("logits")
    loss = Elementwise(region="logits", forward=moved, backward=0, scratch=scratch, saved=(gradient,))
    head = (_of_chunk(op, chunks) for op in costs.head)
    return replace(costs, head=(*head, loss), loss_chunks=int(chunks), loss_in_forward=True)


def _of_chunk(op: Operation, chunks: float) -> Operation:
    """An operation of the head that runs chunk by chunk: its logits are not kept, and its scratch is of one chunk."""
    if not isinstance(op, Elementwise):
        return op
    saved = op.saved if op.region != "logits" else tuple(kept for kept in op.saved if kept.region != "logits")
    return replace(op, saved=saved, scratch=op.scratch / chunks)
