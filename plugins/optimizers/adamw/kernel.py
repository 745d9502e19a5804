"""AdamW's update of a parameter in bf16 as one Triton kernel: arithmetic in fp32, stochastic rounding.

Reads weight, gradient and both means, and writes all but the gradient: 14 bytes per parameter; a compensation adds 4.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from titan.contracts import shard_of
from titan.contracts.optimizers import Stream, factor_of
from titan.layers.rounding import ALIKE, BLOCK, WARPS, draw, nearest, places, places_of, rounded, words_of

OF_MEAN, OF_SQUARE = tl.constexpr(factor_of(1)), tl.constexpr(factor_of(2))


@triton.jit(do_not_specialize=ALIKE)
def _update(
    weight,
    gradient,
    mean,
    square,
    lost,
    rates,
    skipped,
    shrink,
    of_gradient,
    b2,
    of_squared,
    eps,
    columns,
    begin,
    calls,
    total,
    inner,
    of,
    base,
    key,
    step_low,
    step_high,
    compensated: tl.constexpr,
    block: tl.constexpr,
):
    total = tl.where(tl.load(skipped) == 0, total, 0)  # nothing is inside of an update that is skipped
    at, inside, number, row = places(columns, begin, calls, total, inner, of, base, block)
    rate, root = tl.load(rates), tl.load(rates + 1)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    if compensated:
        w += tl.load(lost + at, mask=inside, other=0.0).to(tl.float32)
    m += of_gradient * (g - m)
    v = b2 * v + of_squared * g * g
    w = w * shrink - rate * m / (tl.sqrt_rn(v) / root + eps)
    bits = draw(number, row, key, step_low, step_high)
    tl.store(mean + at, rounded(m, bits, OF_MEAN), mask=inside)
    tl.store(square + at, rounded(v, bits, OF_SQUARE), mask=inside)
    if compensated:
        near = nearest(w)
        tl.store(weight + at, near, mask=inside)
        tl.store(lost + at, rounded(w - near.to(tl.float32), bits, 1), mask=inside)
    else:
        tl.store(weight + at, rounded(w, bits, 1), mask=inside)


@cache
def _never(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def update(
    parameter: nn.Parameter,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    lost: Tensor | None,
    rates: Tensor,
    skipped: Tensor | None,
    group: Mapping[str, Any],
    stream: Stream,
) -> None:
    """One update of a parameter, by its bits; the others are plain tensors, contiguous as the parameter's shard.

    lost: the compensation; None: weights are rounded stochastically.  rates: float32 [2], lr / (1 - b1^t) and the root
    of 1 - b2^t.  skipped: float32 scalar; nothing is written where it is not 0.
    """
    where, weight, (b1, b2) = places_of(parameter), shard_of(parameter), group["betas"]
    if not where.total:
        return
    _update[where.grid](
        weight,
        gradient,
        mean,
        square,
        weight if lost is None else lost,
        rates,
        _never(rates.device) if skipped is None else skipped,
        1 - float(group["lr"]) * group["weight_decay"],
        1 - b1,
        b2,
        1 - b2,
        group["eps"],
        *where,
        *words_of(stream),
        compensated=lost is not None,
        block=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,  # so that a number does not depend on the version of Triton
    )
