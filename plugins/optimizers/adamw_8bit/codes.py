"""Means in 8 bits: codes of values in a fixed map, and a scale per block of numbers."""

import math
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

BLOCK = 256
PIECE = 1 << 22
"""Numbers that are updated at a time without a kernel: a multiple of the block."""


class Codes(Tensor):
    """A float32 tensor that is kept as 8-bit codes; can be copied into a plain tensor, and little else.

    codes: uint8, of the tensor's shape.  scales: float32 [blocks], the largest magnitude of each block of `BLOCK`
    numbers in order; the last block may be shorter.  signed: which map.
    """

    codes: Tensor
    scales: Tensor
    signed: bool
    __slots__: ClassVar = ["codes", "scales", "signed"]

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, signed: bool) -> "Codes":
        """From its parts, which it keeps as they are."""
        made: Codes = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scales, made.signed = codes, scales, signed
        return made

    @staticmethod
    def zeros(like: Tensor, signed: bool) -> "Codes":
        """Of the shape of a plain tensor, and beside it."""
        codes = torch.full(like.shape, _map(signed).index(0.0), dtype=torch.uint8, device=like.device)
        blocks = math.ceil(like.numel() / BLOCK)
        return Codes(codes, torch.zeros(blocks, dtype=torch.float32, device=like.device), signed)

    def read(self, begin: int, end: int) -> Tensor:
        """Numbers [begin, end) of the flat tensor, begin a multiple of `BLOCK`."""
        values = values_of(self.signed, self.device)[flat(self.codes)[begin:end].int()]
        return _blocks(values).mul_(self.scales[begin // BLOCK : -(-end // BLOCK), None]).view(-1)[: end - begin]

    def write(self, begin: int, end: int, numbers: Tensor) -> None:
        """Make codes of numbers [begin, end)."""
        blocks = _blocks(numbers)
        scales = blocks.abs().amax(1)
        unit = blocks / scales.masked_fill(scales == 0, 1.0)[:, None]
        codes = torch.bucketize(unit, boundaries_of(self.signed, self.device), out_int32=True)
        self.scales[begin // BLOCK : -(-end // BLOCK)] = scales
        self.codes.view(-1)[begin:end] = codes.view(-1)[: end - begin]

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["codes", "scales"], self.signed

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], signed: bool, size: Any, stride: Any) -> "Codes":
        return Codes(inner["codes"], inner["scales"], signed)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detach and view, as a DTensor does with its shard, and copy into a plain tensor."""
        if function is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scales, args[0].signed)
        if function is torch.ops.aten.view.default:
            return Codes(args[0].codes.view(args[1]), args[0].scales, args[0].signed)
        if function is torch.ops.aten.copy_.default and not isinstance(args[0], Codes):
            to, source = args[0], args[1]
            for begin, end in pieces(source.numel()):
                to.view(-1)[begin:end] = source.read(begin, end)
            return to
        raise NotImplementedError(f"{function} of 8-bit state: copy it into a plain tensor first")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Codes({list(self.shape)}, signed={self.signed}, device={self.device})"


def _blocks(numbers: Tensor) -> Tensor:
    """[blocks, BLOCK] of a flat tensor, filled up with zeros."""
    return nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)


@cache
def _map(signed: bool) -> tuple[float, ...]:
    """The 256 values that codes stand for, in order.

    Magnitudes are means of neighbors among evenly spaced numbers of a decade, 2^i of them in the decade below
    10^(i - 6); twice as many where there is no sign.
    """
    magnitudes = []
    for decade in range(7):
        count = 2 ** (decade + (not signed))
        ends = [0.1 + 0.9 * at / count for at in range(count + 1)]
        magnitudes += [10.0 ** (decade - 6) * (low + high) / 2 for low, high in pairwise(ends)]
    if not signed:
        return (0.0, *sorted(magnitudes), 1.0)
    return (-1.0, *sorted(-each for each in magnitudes)[1:], 0.0, *sorted(magnitudes), 1.0)


@cache
def values_of(signed: bool, device: torch.device) -> Tensor:
    """The map, float32 [256]."""
    return torch.tensor(_map(signed), device=device)


@cache
def boundaries_of(signed: bool, device: torch.device) -> Tensor:
    """Between neighboring values: a number above the i-th of these, and up to the next, has code i + 1."""
    values = _map(signed)
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    return torch.tensor(middles if signed else [0.0, *middles[1:]], device=device)


def flat(tensor: Tensor) -> Tensor:
    """In order, whatever its strides are."""
    return tensor.reshape(-1)


def pieces(numel: int) -> list[tuple[int, int]]:
    """Where the pieces of so many numbers begin and end."""
    return [(begin, min(begin + PIECE, numel)) for begin in range(0, numel, PIECE)]
