"""Cross-entropy and its gradient in one Triton kernel: a row of logits is read from memory once and written once.

A program goes through its row twice, for the largest logit with the sum of exponentials (online softmax, arXiv
1805.02867) and for the gradient; the second time the row is in the L2 cache. All arithmetic is in fp32. Not for slices
of the vocabulary: between the passes these are summed over ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.contracts import IGNORE

BLOCK = 8192
"""Logits at once; the next power of two above the vocabulary if that is smaller."""


@triton.jit
def _row(
    out,
    logits,
    labels,
    factor,
    reported,
    squared,
    out_stride,
    stride,
    words,
    z_loss,
    ignore: tl.constexpr,
    block: tl.constexpr,
):
    # Without other annotations: Triton looks up each one by name as it makes code, and knows its own alone.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    label = tl.load(labels + row)
    valid = label != ignore
    inside = (label >= 0) & (label < words)
    target = tl.load(logits + tl.where(inside, label, 0)).to(tl.float32)  # before it is written over
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, words, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # so far all logits may be -inf
        total = total * tl.exp(peak - finite) + tl.sum(tl.exp(x - finite), 0)
        peak = higher
    log_z = peak + tl.log(total)
    scale = tl.load(factor) * (1 + 2 * z_loss * log_z) / total
    taken = tl.load(factor)
    for start in range(0, words, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - peak) * scale - tl.where(at == label, taken, 0.0)
        tl.store(out + at, tl.where(valid, gradient, 0.0).to(out.dtype.element_ty), mask=at < words)
    nats = tl.log(total) + (peak - target)
    tl.store(reported + row, tl.where(valid, tl.where(inside, nats, float("nan")), 0.0))
    tl.store(squared + row, tl.where(valid, log_z * log_z, 0.0))


def loss_and_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, z_loss: float, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """(reported, what z-loss adds) of logits [N, V]; `out`, maybe the logits, gets `factor` times the gradient."""
    count, words = logits.shape
    reported, squared = torch.empty(2, count, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(words))
    _row[(count,)](
        out,
        logits,
        labels,
        factor,
        reported,
        squared,
        out.stride(0),
        logits.stride(0),
        words,
        z_loss,
        ignore=IGNORE,
        block=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return reported.sum(), z_loss * squared.sum()
