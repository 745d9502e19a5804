"""Softmax and cross-entropy of rows of logits: sums, and the gradient of the logits, which may lie where they lay.

All of it works on slices of the vocabulary as well. Passes over logits run in fp32, some rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import IGNORE, kind_of
from titan.errors import PluginError

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once: near a CPU's cache; on a GPU enough for a kernel to outlast its launch."""


@dataclass(frozen=True)
class Slice:
    """Which words the local logits are of: from `start`, of `size` in all; `group` holds the other slices."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None


class Rows(NamedTuple):
    """Of each row of logits, [N] in fp32: the largest one, the sum of exponentials of the others less it, the label's.

    The first two are kept apart: log Z alone would lose digits.
    """

    peak: Tensor
    total: Tensor
    target: Tensor

    def sums(self, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        """(reported, what z-loss adds): sums over the rows whose label is not IGNORE."""
        valid = labels != IGNORE
        reported = torch.where(valid, self.total.log() + (self.peak - self.target), 0.0).sum()
        return reported, z_loss * torch.where(valid, (self.peak + self.total.log()).square(), 0.0).sum()


def local_of(logits: Tensor) -> tuple[Tensor, Slice]:
    """This rank's logits [B, S, v], and which words they are of.

    Raises:
        PluginError: the logits are a DTensor that is not split over the vocabulary on one mesh axis.
    """
    if not isinstance(logits, DTensor):
        return logits, Slice(0, logits.shape[-1])
    last, mesh = logits.ndim - 1, logits.device_mesh
    if mesh.ndim != 1 or not logits.placements[0].is_shard(last):
        raise PluginError(f"cross_entropy needs logits sharded over V on one mesh axis, not {logits.placements}")
    local, words = logits.to_local(grad_placements=logits.placements), logits.shape[-1]
    width = -(-words // mesh.size())
    start = min(mesh.get_local_rank() * width, words)
    assert local.shape[-1] == min(width, words - start), "DTensor no longer splits as torch.chunk does"
    return local, Slice(start, words, mesh.get_group())


def look(logits: Tensor, labels: Tensor, vocabulary: Slice) -> Rows:
    """What the loss needs of logits [N, v] and labels [N]; with slices, two all-reduces of 12 bytes per row in all."""
    peak, total = _peak_and_sum(logits)
    target = _target_logits(logits, labels, vocabulary.start)
    if vocabulary.group is not None:
        peak, total, target = _over_slices(peak, total, target, vocabulary.group)
    target.masked_fill_((labels < 0) | (labels >= vocabulary.size), torch.nan)
    return Rows(peak, total, target)


def write_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, rows: Rows, vocabulary: Slice, z_loss: float, factor: Tensor
) -> None:
    """Write `factor` times the gradient of the objective into `out` [N, v], which may be the logits themselves."""
    valid = torch.where(labels != IGNORE, factor, 0.0)
    scale = valid * (1 + 2 * z_loss * (rows.peak + rows.total.log())) / rows.total
    index, inside = _local_index(labels, vocabulary.start, logits.shape[-1])
    for to, x, high, factor, at, less in in_parts(out, logits, rows.peak, scale, index, -valid * inside):
        in_place = to.dtype == torch.float32
        chunk = torch.sub(x, high[:, None], out=to) if in_place else torch.sub(x.float(), high[:, None])
        chunk.exp_().mul_(factor[:, None]).scatter_add_(-1, at[:, None], less[:, None])
        if not in_place:
            to.copy_(chunk)


def loss_and_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, vocabulary: Slice, z_loss: float, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """(reported, what z-loss adds) of logits [N, v]; `out`, maybe the logits, gets `factor` times the gradient."""
    if vocabulary.group is None and (kernel := kernel_for(logits.device.type)) is not None:
        return kernel(out, logits, labels, z_loss, factor)
    rows = look(logits, labels, vocabulary)
    write_gradient(out, logits, labels, rows, vocabulary, z_loss, factor)
    return rows.sums(labels, z_loss)


Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


@cache
def kernel_for(device: str) -> Kernel | None:
    """The kernel that reads logits once and writes their gradient once; None: not for this kind of device."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    from .kernel import loss_and_gradient  # here: triton is there only where there are GPUs

    return loss_and_gradient


def in_parts(matrix: Tensor, *others: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """All of these tensors, of as many rows, some rows at a time; none where the first has no columns."""
    if not matrix.numel():
        return []
    rows = max(1, CHUNK.get(kind_of(matrix.device), CHUNK["cuda"]) // matrix.shape[-1])
    return list(zip(*(torch.split(tensor, rows) for tensor in (matrix, *others)), strict=True))


def _local_index(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where labels lie in a slice of the vocabulary, and whether they do (the index of the others is 0)."""
    inside = (labels >= start) & (labels < start + width)
    return torch.where(inside, labels - start, 0), inside


def _peak_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """m = max_v x_v and sum_v exp(x_v - m) of each row."""
    if not logits.numel():
        nothing = torch.zeros(len(logits), device=logits.device)
        return nothing - torch.inf, nothing
    peak = logits.amax(-1).float()
    finite = peak.masked_fill(peak == -torch.inf, 0.0)  # all logits of a slice may be -inf
    sums = [torch.sub(x.float(), high[:, None]).exp_().sum(-1) for x, high in in_parts(logits, finite)]
    return peak, torch.cat(sums)


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
