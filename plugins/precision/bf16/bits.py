"""Rounding of float32 numbers to bf16 by random bits, which are those of a number's place in the whole tensor."""

import hashlib
from functools import cache, partial

import torch
from torch import Tensor

from titan.contracts import runs_triton, shard_of
from titan.contracts.base.sharding import start_of
from titan.contracts.optimizers import Stream
from titan.layers.philox import philox

_WORD = 0xFFFFFFFF
_PER_CALL = 8
"""Numbers of 16 random bits in a call of Philox."""


class Rounding:
    """Stores float32 numbers, placed as a parameter, in bf16 by its random bits: in Triton, these are never stored."""

    def __init__(self, parameter: Tensor, stream: Stream) -> None:
        self._in_kernel = in_kernels(parameter)
        if not self._in_kernel:
            self._bits = bits_of(parameter, stream)
        elif parameter.device.type != "meta":  # a dry run's
            from titan.layers.rounding import places_of, round_to  # here: triton is there only where there are GPUs

            self._round = partial(round_to, places=places_of(parameter), stream=stream)

    def store(self, out: Tensor, wide: Tensor, factor: int = 1) -> None:
        """Of this rank: bf16 `out`, and the float32 numbers.  factor: odd; bits are multiplied by it."""
        if not self._in_kernel:
            out.copy_(rounded_stochastically(wide, self._bits if factor == 1 else self._bits * factor & 0xFFFF))
        elif out.device.type != "meta":
            self._round(out, wide.contiguous(), factor=factor)


def in_kernels(tensor: Tensor) -> bool:
    """Whether kernels in Triton can work on the shard of a tensor of bf16."""
    shard = shard_of(tensor)
    fits = shard.dtype == torch.bfloat16 and 0 < shard.ndim <= 3 and shard.is_contiguous()
    return fits and runs_triton(shard.device)


def rounded_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """float32 numbers as bfloat16, rounded away from 0 with the probability that makes the mean exact.

    bits: int32, for each number 16 random bits. They are added to the 16 that are cut off; a carry rounds up. NaN and
        inf stay what they are.
    """
    cut = ((wide.view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)
    return torch.where(wide.isfinite(), cut, wide).bfloat16()


def random_bits(like: Tensor, name: str, seed: int, step: int) -> Tensor:
    """16 random bits for each number that this rank has of a tensor, int32, by their places in the whole.

    like: plain, or a DTensor.  name: canonical name of the parameter.  step: of the update.

    8 neighbors along the last dimension share a call of Philox, whose counter is (column / 8, row, step), with all
    other dimensions counted as rows.
    """
    return bits_of(like, Stream(key_of(name, seed), step))


@cache
def key_of(name: str, seed: int) -> int:
    """The key of a parameter's bits, by its canonical name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}:rounding".encode()).digest()[:8], "little")


def bits_of(like: Tensor, stream: Stream) -> Tensor:
    """`random_bits` of a stream."""
    shape, first = list(shard_of(like).shape) or [1], list(start_of(like)) or [0]
    whole, device = list(like.shape) or [1], like.device
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, start, of in zip(shape[:-1], first[:-1], whole[:-1], strict=True):
        rows = (rows[:, None] * of + torch.arange(start, start + size, device=device)).flatten()
    begin, end = first[-1], first[-1] + shape[-1]
    calls = torch.arange(begin // _PER_CALL, -(-end // _PER_CALL), device=device)
    low, high, *key = (
        torch.full((), word & _WORD, dtype=torch.int64, device=device)
        for word in (stream.step, stream.step >> 32, stream.key, stream.key >> 32)
    )
    words = philox((calls, rows[:, None] & _WORD, low, rows[:, None] >> 32 ^ high), key)
    bits = torch.stack([word.to(torch.int32) for word in words], -1).view(torch.int16).flatten(1)
    start = begin - begin // _PER_CALL * _PER_CALL
    own = bits[:, start : start + shape[-1]].to(torch.int32) & 0xFFFF
    return own.reshape(shard_of(like).shape)
