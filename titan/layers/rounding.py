"""Stochastic rounding to bf16 inside Triton kernels, with random bits that never are in memory.

A program works on calls of Philox, in order: each is of `PER_CALL` neighbors along the last dimension of the whole
tensor, wherever a shard of it begins. A kernel of an optimizer takes `places`, `draw` and `rounded` from here;
`round_to` rounds one tensor. Both give the bits that `[plugins.bf16]` has without Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton looks up each annotation of a kernel by name, and knows its own alone.

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from titan.contracts.base.sharding import shard_of, start_of
from titan.contracts.optimizers import Stream

PER_CALL = tl.constexpr(8)
"""Numbers of 16 random bits in a call of Philox."""
BLOCK = 256
"""Calls of a program."""
WARPS = 8
ALIKE = ("key", "step_low", "step_high", "factor")
"""Arguments whose values make no kernels of their own."""


class Places(NamedTuple):
    """Where the numbers of a rank's shard lie in the whole tensor [.., w, W], in arguments of a kernel.

    columns: of the shard.  begin: its first column in the whole.  calls: of a row.  total: of the shard.
    inner, of: w, in the shard and in the whole; the numbers of its rows are counted in these.  base: of its first row.
    """

    columns: int
    begin: int
    calls: int
    total: int
    inner: int
    of: int
    base: int

    @property
    def grid(self) -> tuple[int]:
        """Programs of a kernel."""
        return (-(-self.total // BLOCK),)


def places_of(tensor: Tensor) -> Places:
    """Those of a tensor, plain or a DTensor, of at most three dimensions; the shard is contiguous."""
    shard = shard_of(tensor)
    assert shard.ndim <= 3 and shard.is_contiguous()
    fill = [1] * (3 - shard.ndim)
    (outer, inner, columns), (_, of, _) = [*fill, *shard.shape], [*fill, *tensor.shape]
    first, second, begin = [0] * len(fill) + list(start_of(tensor))
    calls = -(-(begin + columns) // 8) - begin // 8 if columns else 0
    total = outer * inner * calls
    assert total < 2**31 - BLOCK, "calls are counted in 32 bits"
    return Places(columns, begin, calls, total, inner, of, first * of + second)


def words_of(stream: Stream) -> tuple[int, int, int]:
    """(key, lower and upper word of the step): what `draw` takes."""
    return stream.key - (stream.key >> 63 << 64), stream.step & 0xFFFFFFFF, stream.step >> 32


@triton.jit
def places(columns, begin, calls, total, inner, of, base, block: tl.constexpr):
    """(offset in the shard [block, 8], whether it is in it, and of each call: its number in its row, its row)."""
    call = tl.program_id(0) * block + tl.arange(0, block)
    local = call // calls
    number = call - local * calls + begin // PER_CALL
    outer = local // inner
    row = outer.to(tl.int64) * of + (local - outer * inner) + base
    column = (number * PER_CALL - begin)[:, None] + tl.arange(0, PER_CALL)[None, :]
    inside = (column >= 0) & (column < columns) & (call < total)[:, None]
    return local.to(tl.int64)[:, None] * columns + column, inside, number, row


@triton.jit
def draw(number, row, key, step_low, step_high):
    """16 random bits for each number of each call, int32 [block, 8]."""
    same = tl.zeros_like(number).to(tl.uint32)
    low, high = same + step_low.to(tl.uint32), same + step_high.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, number.to(tl.uint32), row.to(tl.uint32), low, (row >> 32).to(tl.uint32) ^ high)
    at = tl.arange(0, PER_CALL)[None, :]
    first, second = tl.where(at < 2, w0[:, None], w1[:, None]), tl.where(at < 6, w2[:, None], w3[:, None])
    return ((tl.where(at < 4, first, second) >> (at % 2 * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def rounded(wide, bits, factor):
    """float32 numbers as bf16, by these bits times an odd factor; NaN and inf stay what they are."""
    own = wide.to(tl.int32, bitcast=True)
    cut = ((own + (bits * factor & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((own & 0x7F800000) == 0x7F800000, wide, cut).to(tl.bfloat16)


@triton.jit
def nearest(wide):
    """float32 numbers as the nearest bf16, ties to even, which Triton's interpreter would cut off."""
    return rounded(wide, 0x7FFF + ((wide.to(tl.int32, bitcast=True) >> 16) & 1), 1)


@triton.jit(do_not_specialize=ALIKE)
def _round(
    out, wide, columns, begin, calls, total, inner, of, base, key, step_low, step_high, factor, block: tl.constexpr
):
    at, inside, number, row = places(columns, begin, calls, total, inner, of, base, block)
    x = tl.load(wide + at, mask=inside, other=0.0)
    tl.store(out + at, rounded(x, draw(number, row, key, step_low, step_high), factor), mask=inside)


def round_to(out: Tensor, wide: Tensor, places: Places, stream: Stream, factor: int) -> None:
    """Write float32 numbers into bf16 `out`, both contiguous and placed as the tensor that `places` are of."""
    if math.prod(places.grid):
        _round[places.grid](out, wide, *places, *words_of(stream), factor, block=BLOCK, num_warps=WARPS)
