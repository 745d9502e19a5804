"""Summed cross-entropy of the next token; logits may be replicated or split over the vocabulary.

Maths, for a token with logits x, label y and log Z = log sum_v exp(x_v):

    reported  = log Z - x_y
    objective = log Z - x_y + z_loss * (log Z)^2        (z-loss: PaLM, arXiv 2204.02311, section 5)
    d objective / d x_v = softmax(x)_v * (1 + 2 * z_loss * log Z) - [v = y]

With z_loss above 0, rows of metrics have `z_loss`: the mean of z_loss * (log Z)^2 over the tokens since the row before.

Where ranks hold slices of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3), each computes the maximum and
the sum of exponentials of its slice, and the target's logit if it holds it; two all-reduces combine these. The gradient
of a slice needs no further communication. Slices may be uneven or empty.

Cost: no copy of the logits is kept. Forward and backward go through them in chunks of tokens, in fp32, and the
backward recomputes the exponentials: beyond the logits and their gradient, both in the logits' dtype, there is one
chunk. With 4,096 tokens and 4,097 words on one CPU core, forward and backward took 0.7 of the time of
`F.cross_entropy` on `logits.float()` in fp32 and 0.5 in bf16; beyond the logits they took 68 and 38 MiB, not 192.
Communication if the vocabulary is split: 12 bytes per token, in two all-reduces.

Limits: sums and gradients are right for labels in [0, vocabulary) and IGNORE. Any other label makes the loss NaN. The
backward cannot be differentiated again. Logits are split on one mesh axis at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titan.contracts import IGNORE, Costs, Job, Loss, Measure, kind_of, option, register
from titan.contracts.base.cost import Elementwise, SavedTensor
from titan.errors import PluginError

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once: near a CPU's cache; on a GPU enough for a kernel to outlast its launch."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[loss]` with `name = "cross_entropy"`."""

    z_loss: float = option(
        0.0, "coefficient of the z-loss (log Z)^2, which keeps log Z near 0; PaLM used 1e-4", at_least=0
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
        """The logits are kept, read twice forward, and read and written backward; labels and three sums per token."""
        words = job.spec.vocab_size
        kept = SavedTensor(numel=words, region="logits"), SavedTensor(numel=8 + 8, region="seq_full", itemsize=1)
        # Backward has a chunk's exponentials, its logits in float32 if they are not, and the chunk before.
        logits, chunk, copies = costs.share("logits") * words, CHUNK["cuda"], 1 + (costs.itemsize < 4)
        scratch = chunk + copies * min(logits - chunk, chunk) if logits > chunk else copies * logits
        loss = Elementwise(region="logits", forward=2 * words, backward=2 * words, scratch=scratch, saved=kept)
        return replace(costs, head=(*costs.head, loss))

    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, reported): fp32 sums over the tokens whose label is not IGNORE; 0 where there is none.

        logits [B, S, V] of any floating dtype, plain or a DTensor split over V; labels [B, S].

        Raises:
            PluginError: the logits are a DTensor laid out in another way.
        """
        local, vocabulary = logits, _Slice(0, logits.shape[-1])
        if isinstance(logits, DTensor):
            local, vocabulary = _slice_of(logits)
        coefficient = self.config.z_loss
        objective, reported, z_loss = _summed_cross_entropy(
            local.flatten(0, -2), labels.flatten(), vocabulary, coefficient
        )
        if coefficient and torch.is_grad_enabled():  # not in validation
            found = torch.stack([z_loss, (labels != IGNORE).sum()]).double()
            self._z_loss = found if self._z_loss is None else self._z_loss + found
        return objective, reported

    def measure(self) -> Mapping[str, Tensor | None]:
        """The z-loss of the tokens since the row before."""
        found, self._z_loss = self._z_loss, None
        return {"z_loss": found}


@dataclass(frozen=True)
class _Slice:
    """Which words the local logits are of: from `start`, of `size` in all; `group` holds the other slices."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None


def _slice_of(logits: DTensor) -> tuple[Tensor, _Slice]:
    """This rank's logits [B, S, v], and which words they are of."""
    last, mesh = logits.ndim - 1, logits.device_mesh
    if mesh.ndim != 1 or not logits.placements[0].is_shard(last):
        raise PluginError(f"cross_entropy needs logits sharded over V on one mesh axis, not {logits.placements}")
    local, words = logits.to_local(grad_placements=logits.placements), logits.shape[-1]
    width = -(-words // mesh.size())
    start = min(mesh.get_local_rank() * width, words)
    assert local.shape[-1] == min(width, words - start), "DTensor no longer splits as torch.chunk does"
    return local, _Slice(start, words, mesh.get_group())


class _SummedCrossEntropy(torch.autograd.Function):
    """logits [N, v] of a slice of the vocabulary, labels [N] -> (objective, reported, z-loss)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: _Slice, z_loss: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        peak, total = _peak_and_sum(logits)
        target = _target_logits(logits, labels, vocabulary.start)
        if vocabulary.group is not None:
            peak, total, target = _over_slices(peak, total, target, vocabulary.group)
        target.masked_fill_((labels < 0) | (labels >= vocabulary.size), torch.nan)
        valid = labels != IGNORE
        reported = torch.where(valid, total.log() + (peak - target), 0.0).sum()
        added = z_loss * torch.where(valid, (peak + total.log()).square(), 0.0).sum()
        ctx.save_for_backward(logits, labels, peak, total)
        ctx.start, ctx.z_loss = vocabulary.start, z_loss
        ctx.mark_non_differentiable(reported, added)
        return reported + added, reported, added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, peak, total = ctx.saved_tensors
        weight = torch.where(labels != IGNORE, grad, 0.0)
        scale = weight * (1 + 2 * ctx.z_loss * (peak + total.log())) / total
        index, inside = _local_index(labels, ctx.start, logits.shape[-1])
        result, taken = torch.empty_like(logits), -weight * inside
        if not result.numel():
            return result, None, None, None
        parts = (torch.split(tensor, _rows(logits)) for tensor in (result, logits, peak, scale, index, taken))
        for out, x, high, factor, at, less in zip(*parts, strict=True):
            chunk = torch.sub(x.float(), high[:, None]).exp_().mul_(factor[:, None])
            out.copy_(chunk.scatter_add_(-1, at[:, None], less[:, None]))
        return result, None, None, None


_summed_cross_entropy: Callable[[Tensor, Tensor, _Slice, float], tuple[Tensor, Tensor, Tensor]] = (
    _SummedCrossEntropy.apply
)


def _rows(logits: Tensor) -> int:
    """Tokens in a chunk."""
    return max(1, CHUNK.get(kind_of(logits.device), CHUNK["cuda"]) // max(1, logits.shape[-1]))


def _local_index(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where labels lie in a slice of the vocabulary, and whether they do (the index of the others is 0)."""
    inside = (labels >= start) & (labels < start + width)
    return torch.where(inside, labels - start, 0), inside


def _peak_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """m = max_v x_v and sum_v exp(x_v - m) of each token, [N] in fp32: kept apart, they lose less than log Z would."""
    if not logits.numel():
        nothing = torch.zeros(len(logits), device=logits.device)
        return nothing - torch.inf, nothing
    peak = logits.amax(-1).float()
    parts = zip(*(torch.split(tensor, _rows(logits)) for tensor in (logits, peak)), strict=True)
    return peak, torch.cat([torch.sub(x.float(), high[:, None]).exp_().sum(-1) for x, high in parts])


def _target_logits(logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """fp32 logits [N] of the labels, 0 for those of other slices."""
    if not logits.numel():
        return torch.zeros_like(labels, dtype=torch.float32)
    index, inside = _local_index(labels, start, logits.shape[-1])
    return torch.where(inside, logits.gather(-1, index[:, None]).squeeze(-1).float(), 0.0)


def _over_slices(
    peak: Tensor, total: Tensor, target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, sum of exponentials and target logit of the whole vocabulary, [N], from those of this rank's slice."""
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    sums = torch.stack([total * (peak - highest).exp(), target])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return highest, sums[0], sums[1]
