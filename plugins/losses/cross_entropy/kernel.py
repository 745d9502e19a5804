"""Cross-entropy and its gradient in one Triton kernel: a row of logits is read from memory once and written once.

A program goes through a row twice, for the largest logit with the sum of exponentials (online softmax, arXiv
1805.02867) and for the gradient; the second time the row is in the L2 cache. So there are no more programs than rows
that fit there: each takes one row after the other, and while it works on a block, the next ones are on their way. All
arithmetic is in fp32, and its order depends on neither the device nor the number of rows. Not for slices of the
vocabulary: between the passes these are summed over ranks.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.contracts import IGNORE

BLOCK = 8192
"""Logits at once; the next power of two above the vocabulary if that is smaller."""
STAGES = 3
"""Blocks of a program in work or on their way. Two of bf16 are 32 KiB, with which one program keeps an SM supplied: 25
bytes per ns, of 3.35 TB/s over 132 SMs, for some 700 ns of latency are 18 KiB."""


@triton.jit
def _rows(
    out,
    logits,
    labels,
    factor,
    reported,
    squared,
    out_stride,
    stride,
    count,
    words,
    z_loss,
    ignore: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    # Without other annotations: Triton looks up each one by name as it makes code, and knows its own alone.
    taken = tl.load(factor)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        x_row = logits + tl.cast(row, tl.int64) * stride
        out_row = out + tl.cast(row, tl.int64) * out_stride
        label = tl.load(labels + row)
        valid = label != ignore
        inside = (label >= 0) & (label < words)
        target = tl.load(x_row + tl.where(inside, label, 0)).to(tl.float32)  # before it is written over
        peak = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for start in tl.range(0, words, block, num_stages=stages):
            at = start + tl.arange(0, block)
            x = tl.load(x_row + at, mask=at < words, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(peak, tl.max(x, 0))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # so far all logits may be -inf
            total = total * tl.exp(peak - finite) + tl.sum(tl.exp(x - finite), 0)
            peak = higher
        log_z = peak + tl.log(total)
        scale = taken * (1 + 2 * z_loss * log_z) / total
        for start in tl.range(0, words, block, num_stages=stages):
            at = start + tl.arange(0, block)
            x = tl.load(x_row + at, mask=at < words, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - peak) * scale - tl.where(at == label, taken, 0.0)
            tl.store(out_row + at, tl.where(valid, gradient, 0.0).to(out.dtype.element_ty), mask=at < words)
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
    row_bytes = words * logits.element_size() * (1 if out.data_ptr() == logits.data_ptr() else 2)
    _rows[(min(count, rows_at_once(row_bytes, logits.device)),)](
        out,
        logits,
        labels,
        factor,
        reported,
        squared,
        out.stride(0),
        logits.stride(0),
        count,
        words,
        z_loss,
        ignore=IGNORE,
        block=block,
        stages=STAGES,
        num_warps=max(1, min(16, block // 512)),
    )
    return reported.sum(), z_loss * squared.sum()


@cache
def rows_at_once(row_bytes: int, device: torch.device) -> int:
    """Rows that two thirds of the device's L2 cache hold: as many on each SM, where there is one for each."""
    properties = torch.cuda.get_device_properties(device)
    rows, sms = properties.L2_cache_size * 2 // (3 * row_bytes), properties.multi_processor_count
    return max(1, rows - rows % sms if rows > sms else rows)
