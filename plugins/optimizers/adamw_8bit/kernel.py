"""The update of a parameter as one Triton kernel: codes become float32 numbers and codes again, none of it in memory.

A program has some blocks of numbers, each with its scales. The arithmetic is that of the update without a kernel, in
the same order; no product is fused with a sum, as PyTorch does in some operations.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.layers.rounding import nearest

from .codes import BLOCK, Codes, boundaries_of, flat, values_of

BLOCKS = 8
"""Of a program."""


@triton.jit
def _read(mean, scales, values, at, inside, number, own, coded: tl.constexpr):
    if coded:
        codes = tl.load(mean + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales + number, mask=own, other=0.0)
        x = tl.where(inside, tl.load(values + codes) * scale[:, None], 0.0)
    else:
        x = tl.load(mean + at, mask=inside, other=0.0)
    return x


@triton.jit
def _write(mean, scales, boundaries, x, at, inside, number, own, coded: tl.constexpr):
    if coded:
        scale = tl.max(tl.abs(x), 1)
        tl.store(scales + number, scale, mask=own)
        unit = tl.div_rn(x, tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(x))
        code = tl.zeros_like(at).to(tl.int32)  # of 255 boundaries, how many are below
        for power in tl.static_range(7, -1, -1):
            below = tl.load(boundaries + code + ((1 << power) - 1)) < unit
            code += tl.where(below, 1 << power, 0)
        tl.store(mean + at, code.to(tl.uint8), mask=inside)
    else:
        tl.store(mean + at, x, mask=inside)


@triton.jit
def _update(
    weight,
    gradient,
    mean,
    mean_scales,
    mean_values,
    mean_boundaries,
    square,
    square_scales,
    square_values,
    square_boundaries,
    rates,
    skipped,
    divisor,
    numel,
    shrink,
    of_gradient,
    b2,
    of_squared,
    eps,
    coded: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    numel = tl.where(tl.load(skipped) == 0, numel, 0)  # nothing is inside of an update that is skipped
    number = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    at = number[:, None] * block + tl.arange(0, block)[None, :]
    inside, own = at < numel, number * block < numel
    rate, correction = tl.load(rates), tl.load(rates + 1)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.div_rn(g, tl.load(divisor) + tl.zeros_like(g))
    m = _read(mean, mean_scales, mean_values, at, inside, number, own, coded)
    v = _read(square, square_scales, square_values, at, inside, number, own, coded)
    m += of_gradient * (g - m)
    v = v * b2 + of_squared * g * g
    _write(mean, mean_scales, mean_boundaries, m, at, inside, number, own, coded)
    _write(square, square_scales, square_boundaries, v, at, inside, number, own, coded)
    root = tl.sqrt_rn(tl.div_rn(v, correction + tl.zeros_like(v))) + eps
    w = w * shrink - tl.div_rn(rate * m, root)
    tl.store(weight + at, nearest(w) if weight.dtype.element_ty == tl.bfloat16 else w, mask=inside)


def update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rates: Tensor,
    skipped: Tensor | None,
    divisor: Tensor | None,
    group: Mapping[str, Any],
) -> None:
    """One update of tensors of one shape, of which both means are `Codes` or both are float32.

    rates: float32 [2], lr / (1 - b1^t) and 1 - b2^t.  skipped: float32 scalar; nothing is written where it is not 0.
    divisor: float32 scalar, of gradients.
    """
    if not weight.numel():
        return
    weights, (b1, b2) = flat(weight), group["betas"]
    _update[(triton.cdiv(weights.numel(), BLOCK * BLOCKS),)](
        weights,
        flat(gradient),
        *_parts(mean),
        *_parts(square),
        rates,
        _scalar(0.0, rates.device) if skipped is None else skipped,
        _scalar(1.0, rates.device) if divisor is None else divisor,
        weights.numel(),
        1 - float(group["lr"]) * group["weight_decay"],
        1 - b1,
        b2,
        1 - b2,
        group["eps"],
        coded=isinstance(mean, Codes),
        block=BLOCK,
        blocks=BLOCKS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    if not weight.is_contiguous():  # then `weights` is a copy
        weight.copy_(weights.view(weight.shape))


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


def _parts(mean: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(numbers or codes, scales, values of codes, boundaries between these)."""
    if not isinstance(mean, Codes):
        return mean, mean, mean, mean
    signed, device = mean.signed, mean.codes.device
    return mean.codes, mean.scales, values_of(signed, device), boundaries_of(signed, device)
