"""Which slice of a tensor a rank holds, and how ranks join slices of hidden states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

ops = torch.ops._c10d_functional


def slice_of(whole: Tensor, like: DTensor) -> Tensor:
    """The slice of `whole` that this rank's shard of `like` covers, without communication.

    A strided shard (FSDP over tensor parallelism) slices what the mesh dimensions to its right have left, so those mesh
    dimensions are applied first.
    """
    mesh, piece = like.device_mesh, whole
    for dim in sorted(range(mesh.ndim), key=lambda dim: _is_strided(like.placements[dim])):
        placement = like.placements[dim]
        if isinstance(placement, Replicate):
            continue
        assert hasattr(placement, "dim"), f"cannot slice for {placement}"
        pieces = piece.chunk(mesh.size(dim), dim=placement.dim)
        at = mesh.get_local_rank(dim)
        piece = pieces[at] if at < len(pieces) else piece.narrow(placement.dim, 0, 0)
    return piece


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor") and type(placement) is not Shard


class Slices(NamedTuple):
    """The ranks that share the linears of a layer: their process group, their number, and this one's place.

    positions: between pairs of linears, each rank holds S / size positions of a sequence (arXiv 2205.05198); else all.
    """

    group: str
    size: int
    rank: int
    positions: bool


class _Gathered(torch.autograd.Function):
    """Hidden states made whole before a pair of linears; each rank's gradient of them is a summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return _gather(x, slices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.slices), None


class _Summed(torch.autograd.Function):
    """The sum over ranks after a pair of linears; its gradient is every summand's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return _sum(x, slices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.slices), None


gathered: Callable[[Tensor, Slices], Tensor] = _Gathered.apply
"""Hidden states of all positions, [B, S, D], from those that this rank holds; the gradient is summed over ranks."""

summed: Callable[[Tensor, Slices], Tensor] = _Summed.apply
"""Summands [B, S, D] -> their sum over ranks, of the positions that this rank holds; the gradient is gathered."""


def _gather(x: Tensor, slices: Slices) -> Tensor:
    if not slices.positions:
        return x
    rows: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), slices.size, slices.group))
    return rows.view(slices.size, *x.shape).transpose(0, 1).flatten(1, 2)


def _sum(x: Tensor, slices: Slices) -> Tensor:
    if slices.positions:
        rows = torch.cat(x.chunk(slices.size, dim=1))
        total: Tensor = ops.reduce_scatter_tensor(rows, "sum", slices.size, slices.group)
    else:
        total = ops.all_reduce(x, "sum", slices.group)
    return ops.wait_tensor(total)  # type: ignore[no-any-return]
