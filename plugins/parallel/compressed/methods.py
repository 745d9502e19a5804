"""What the methods send of a rank's tensors, on plain float32 tensors.

A method is called with tensors of this rank, by name, and returns (sums, sent) by name: `sums` are the sums over the
ranks of what these have sent, the same bits on each of them; `sent` is what this rank has sent, so that a tensor minus
`sent` is the error which the rank keeps. Over all ranks, sent adds up to sums.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan.layers.philox import philox

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Replicas:
    """The ranks that exchange. rank: this one's number among them.  size: how many they are."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, in one all-reduce."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        if flat.numel():
            dist.all_reduce(flat, group=self.group)
        return list(_pieces(flat, tensors))

    def gathered(self, own: Tensor) -> Tensor:
        """[size, ...]: a tensor of each rank."""
        ops = torch.ops._c10d_functional
        found: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(own[None], self.size, self.group.group_name))
        return found

    def dealt(self, chunks: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: of each rank, the chunk that is for this one."""
        found = torch.empty_like(chunks)
        dist.all_to_all_single(found, chunks, group=self.group)
        return found


class Method(Protocol):
    """See the top of this file."""

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """(sums, sent) of float32 tensors, by name.  step: from 1, the same on all ranks."""


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """A flat tensor [n, ...] cut along its first dimension into tensors of these shapes."""
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in like]), like, strict=True):
        yield piece.view_as(tensor)


# --- low rank -------------------------------------------------------------------------------------------------------


class PowerSGD:
    """One step of subspace iteration, from the factor of the step before.

    A tensor is a stack of matrices M [b, m, n] with a factor Q [b, n, r]. P = sum of M Q, made orthonormal;
    Q = sum of M' P; a rank has sent P (M' P)', and the sum is P Q'. arXiv 1905.13727, algorithms 1 and 2.

    factors: by name; what they begin as is drawn by name and position, the same on all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.factors: dict[str, Tensor] = {}

    def begin(self, name: str, like: Tensor) -> None:
        """Make the factor of a tensor, before the first step."""
        *stack, rows, columns = like.shape
        shape = (math.prod(stack), columns, min(self.rank, rows, columns))
        at, zero = torch.arange(math.prod(shape), device=like.device), torch.zeros((), dtype=torch.int64)
        words, *_ = philox((at, *[zero.to(like.device)] * 3), (zero.to(like.device) + crc32(name.encode()), at * 0))
        self.factors[name] = (words * 2.0**-32 - 0.5).float().view(shape)

    def flat(self) -> Tensor:
        """All factors as one tensor [n], in the order in which they were begun."""
        return torch.cat([factor.flatten() for factor in self.factors.values()]) if self.factors else torch.zeros(0)

    def restore(self, flat: Tensor) -> None:
        """Take back what `flat` gave for the same shards."""
        for factor, saved in zip(self.factors.values(), _pieces(flat, list(self.factors.values())), strict=True):
            factor.copy_(saved)

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """Two all-reduces, of r numbers per row and per column."""
        matrices = [tensor.view(-1, *tensor.shape[-2:]) for tensor in tensors.values()]
        before = [self.factors[name] for name in tensors]
        products = replicas.summed([m @ q for m, q in zip(matrices, before, strict=True)])
        # Householder's: of zeros too it makes columns that are orthonormal, where Gram and Schmidt's would be noise.
        bases = [torch.linalg.qr(product).Q for product in products]
        own = [m.mT @ p for m, p in zip(matrices, bases, strict=True)]
        total = replicas.summed(own)
        sums, sent = {}, {}
        for name, q0, p, mine, q in zip(tensors, before, bases, own, total, strict=True):
            sums[name], sent[name] = ((p @ each.mT).view_as(tensors[name]) for each in (q, mine))
            # What gave nothing, such as an expert without tokens, must not begin from nothing.
            self.factors[name] = torch.where((q != 0).any(-1).any(-1)[:, None, None], q, q0)
        return sums, sent


# --- few numbers ----------------------------------------------------------------------------------------------------


def _count(density: float, tensor: Tensor) -> int:
    return max(1, math.ceil(density * tensor.numel()))


@dataclass(frozen=True)
class TopK:
    """The largest numbers of each tensor by magnitude, with their places: 8 bytes for each. arXiv 1809.07599."""

    density: float

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """One all-gather. Ranks are added up in their order, so that all of them have the same bits."""
        flat = {name: tensor.flatten() for name, tensor in tensors.items()}
        places = [f.abs().topk(_count(self.density, f), sorted=False).indices for f in flat.values()]
        values = torch.cat([f[at] for f, at in zip(flat.values(), places, strict=True)])
        packed = torch.stack([values.view(torch.int32), torch.cat(places).int()])
        counts, everyone = [len(at) for at in places], replicas.gathered(packed)
        sums = {name: torch.zeros_like(f) for name, f in flat.items()}
        sent = {name: torch.zeros_like(f) for name, f in flat.items()}
        for rank, theirs in enumerate(everyone):
            chunks = zip(theirs[0].view(torch.float32).split(counts), theirs[1].split(counts), strict=True)
            for name, (numbers, at) in zip(tensors, chunks, strict=True):
                sums[name].index_add_(0, at, numbers)
                if rank == replicas.rank:
                    sent[name].index_add_(0, at, numbers)
        return _shaped(sums, tensors), _shaped(sent, tensors)


@dataclass(frozen=True)
class RandK:
    """Numbers at random places, the same on all ranks: 4 bytes for each. arXiv 1809.07599.

    Place j is (a j + b) mod d of d numbers, a and b drawn by name and step, a without a common divisor with d: each
    number is as likely as any other and comes once, without the sort of a permutation, alike on every device.
    """

    density: float

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """One all-reduce."""
        flat = {name: tensor.flatten() for name, tensor in tensors.items()}
        places = [self._places(name, step, f) for name, f in flat.items()]
        own = [f[at] for f, at in zip(flat.values(), places, strict=True)]
        sums, sent = {}, {}
        for name, at, mine, total in zip(tensors, places, own, replicas.summed(own), strict=True):
            sums[name], sent[name] = (torch.zeros_like(flat[name]).index_copy_(0, at, each) for each in (total, mine))
        return _shaped(sums, tensors), _shaped(sent, tensors)

    def _places(self, name: str, step: int, tensor: Tensor) -> Tensor:
        drawn, numbers = random.Random(f"{name} {step}"), tensor.numel()
        first, stride = drawn.randrange(numbers), drawn.randrange(1, numbers + 1)
        while math.gcd(stride, numbers) > 1:
            stride = drawn.randrange(1, numbers + 1)
        return (torch.arange(_count(self.density, tensor), device=tensor.device) * stride + first) % numbers


def _shaped(flat: Tensors, like: Tensors) -> Tensors:
    return {name: tensor.view_as(like[name]) for name, tensor in flat.items()}


# --- few bits -------------------------------------------------------------------------------------------------------

_BITS = tuple(2**bit for bit in range(8))


@dataclass(frozen=True)
class Sign:
    """The sign of each number, 8 in a byte, and the mean magnitude of each tensor. Seide et al., Interspeech 2014.

    Every rank is sent the bits of all others. The compressed all-reduce of 1-bit Adam (arXiv 2102.02888), an all-to-all
    and an all-gather, sends as much among 2 ranks and less among more, but takes the sign of the sum too: it loses the
    magnitudes twice. Replicas are few.
    """

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """Two all-gathers: of bits, and of a scale per tensor."""
        scales = torch.stack([tensor.abs().mean() for tensor in tensors.values()])
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        weights = torch.tensor(_BITS, dtype=torch.uint8, device=flat.device)
        bits = F.pad(flat >= 0, (0, -len(flat) % 8)).view(-1, 8)
        packed = (bits * weights).sum(-1, dtype=torch.uint8)
        own = list(tensors.values())
        sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        sent: dict[str, Tensor] = {}
        every = zip(replicas.gathered(packed), replicas.gathered(scales), strict=True)
        for rank, (their_bits, their_scales) in enumerate(every):
            positive = ((their_bits[:, None] & weights) != 0).flatten()[: len(flat)]
            for name, piece, scale in zip(tensors, _pieces(positive, own), their_scales, strict=True):
                decoded = torch.where(piece, scale, -scale)
                sums[name] += decoded
                if rank == replicas.rank:
                    sent[name] = decoded
        return sums, sent


@dataclass(frozen=True)
class Int8:
    """Numbers as 8-bit integers, with the largest magnitude of each block: x = q s, s = max|x| / 127, q rounded.

    Each rank is sent its chunk of all tensors by all others, adds up in float32, rounds the sums to integers again, and
    sends them to all. What this second rounding loses becomes part of the error of the rank that rounded.
    """

    block: int

    def __call__(self, tensors: Tensors, step: int, replicas: Replicas) -> tuple[Tensors, Tensors]:
        """An all-to-all and an all-gather, each of integers and of scales."""
        sizes = [-(-tensor.numel() // self.block) for tensor in tensors.values()]
        padded = [
            F.pad(tensor.flatten(), (0, size * self.block - tensor.numel())).view(size, self.block)
            for size, tensor in zip(sizes, tensors.values(), strict=True)
        ]
        blocks = torch.cat(padded)  # no block holds numbers of two tensors
        chunks = F.pad(blocks, (0, 0, 0, -len(blocks) % replicas.size)).view(replicas.size, -1, self.block)
        integers, scales = _rounded(chunks)
        sent = integers * scales
        total = torch.zeros_like(chunks[0])
        for theirs, scale in zip(replicas.dealt(integers), replicas.dealt(scales), strict=True):
            total += theirs * scale
        integers, scales = _rounded(total)
        sent[replicas.rank] -= total - integers * scales
        sums = replicas.gathered(integers) * replicas.gathered(scales)
        return tuple(self._apart(each, sizes, tensors) for each in (sums, sent))  # type: ignore[return-value]

    def _apart(self, chunks: Tensor, sizes: Sequence[int], like: Tensors) -> Tensors:
        pieces = chunks.view(-1, self.block)[: sum(sizes)].split(list(sizes))
        return {
            name: piece.flatten()[: tensor.numel()].view_as(tensor)
            for piece, (name, tensor) in zip(pieces, like.items(), strict=True)
        }


def _rounded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [..., block] int8 and scales [..., 1] of numbers [..., block]."""
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / torch.where(scales > 0, scales, 1.0)).round().clamp(-127, 127).to(torch.int8), scales
