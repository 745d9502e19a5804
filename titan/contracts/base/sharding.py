"""Which slice of a tensor a rank holds, how its forward reads it, and how ranks join slices of hidden states."""

from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

ops = torch.ops._c10d_functional


def shard_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_of(whole: Tensor, like: DTensor) -> Tensor:
    """The slice of `whole` that this rank's shard of `like` covers, without communication.

    A strided shard (FSDP over tensor parallelism) slices what the mesh dimensions to its right, applied first, leave.
    """
    mesh, piece = like.device_mesh, whole
    strided = [hasattr(placement, "split_factor") and type(placement) is not Shard for placement in like.placements]
    for dim in sorted(range(mesh.ndim), key=strided.__getitem__):
        placement = like.placements[dim]
        if isinstance(placement, Replicate):
            continue
        assert hasattr(placement, "dim"), f"cannot slice for {placement}"
        size = piece.shape[placement.dim]
        each = -(-size // mesh.size(dim))  # as torch.chunk, which makes a tensor for every rank
        start = mesh.get_local_rank(dim) * each
        count = max(0, min(each, size - start))
        piece = piece.narrow(placement.dim, start if count else 0, count)
    return piece


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """Along each dimension, where this rank's shard begins in the whole, by metadata; of an empty one, anything."""
    whole = torch.empty(tensor.shape, device="meta")
    offset, starts = slice_of(whole, tensor).storage_offset() if isinstance(tensor, DTensor) else 0, []
    for stride in whole.stride():
        starts.append(offset // stride)
        offset %= stride
    return tuple(starts)


def slice_parameters(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int | None], *, zero: str = "") -> None:
    """Make a module's parameters DTensors, of which its own forward reads this rank's slices as plain tensors.

    Several axes may slice a parameter, each along another dimension. No communication: ranks hold equal whole tensors,
    or none yet on the meta device.
    mesh: of one dimension.
    dims: name in the module -> the dimension to slice, which must come out even along with another axis; None: each
        rank has the whole.
    zero: a parameter of which this rank's forward reads zeros.
    """
    ndims = {}
    for name, dim in dims.items():
        parameter: Any = module._parameters[name]  # a module that reads slices has no other way to it
        slices = _sliced(parameter.data, mesh, Replicate() if dim is None else Shard(dim))
        module.register_parameter(name, nn.Parameter(slices, requires_grad=parameter.requires_grad))
        ndims[name] = slices.device_mesh.ndim
    if dims:
        of: Any = type(module)
        module.__class__ = _reading_slices(of, tuple(ndims.items()), zero)


def _sliced(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    local = distribute_tensor(tensor.to_local(), mesh, [placement], src_data_rank=None).to_local()
    both, placements = DeviceMesh._concatenate([mesh, tensor.device_mesh]), (placement, *tensor.placements)
    return DTensor.from_local(local, both, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@cache
def _reading_slices(of: type[nn.Module], names: tuple[tuple[str, int], ...], zero: str) -> type[nn.Module]:
    """A subclass in which `module.weight` is this rank's slice: one for all layers, as they share a compiled graph.

    names: with the mesh dimensions that slice each. A parameter with more is sharded by data parallelism, and is not
        there in forward.
    """
    return type(of.__name__, (of,), {name: property(_reader(name, ndim, name == zero)) for name, ndim in names})


def _reader(name: str, ndim: int, zero: bool) -> Callable[[nn.Module], Tensor | None]:
    def read(module: nn.Module) -> Tensor | None:
        parameter: Any = module._parameters[name]
        if parameter is None or parameter.device_mesh.ndim > ndim:
            return parameter  # type: ignore[no-any-return]
        local = local_of(parameter)
        return local * 0 if zero else local

    return read


class _Local(torch.autograd.Function):
    """`DTensor.to_local` with a backward of less host time, for a gradient that is laid out as the parameter is."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        local = parameter.to_local()  # the tensor itself of a DTensor that is no parameter
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor(gradient.contiguous(), copy(ctx.spec), requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(parameter: DTensor) -> Tensor:
    """This rank's shard of a parameter, for whose gradient a shard is enough."""
    return parameter.to_local() if torch.compiler.is_compiling() else _Local.apply(parameter)  # type: ignore[no-untyped-call]


class Slices(NamedTuple):
    """The ranks that share the linears of a layer: their process group, their number, and this one's place.

    positions: between pairs of linears, each rank holds S / size positions of a sequence (arXiv 2205.05198); else all.
    pipelined: what is gathered or scattered is split and joined, as PyTorch's pass for asynchronous tensor parallelism
        looks for it (torch/_inductor/fx_passes/micro_pipeline_tp.py).
    """

    group: str
    size: int
    rank: int
    positions: bool
    pipelined: bool = False


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return _gather(x, slices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.slices), None


class _Summed(torch.autograd.Function):
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


class _Normed(torch.autograd.Function):
    """y = w x / sqrt(mean of squares + eps); the mean, and that of the products dy w y in backward, is of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, width: int, slices: Slices) -> Tensor:
        wide = x.float()
        squares = _total(wide.square().sum(-1, keepdim=True), slices)
        scale = torch.rsqrt(squares / width + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.width, ctx.slices = width, slices
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, through = x.float() * scale, gradient * weight.float()
        products = _total((through * normed).sum(-1, keepdim=True), ctx.slices)
        of_x = scale * (through - normed * (products / ctx.width))
        return of_x.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype), None, None, None


normed: Callable[[Tensor, Tensor, float | None, int, Slices], Tensor] = _Normed.apply
"""(x [..., F], weight [F], eps, features of all ranks, ranks) -> RMSNorm over the features of all ranks [..., F]."""


class SlicedRMSNorm(nn.RMSNorm):
    """An RMSNorm (arXiv 1910.07467) over features that are split over ranks; `weight` is this rank's slice.

    Both forward and backward sum one float32 number per position over the ranks, `slices`.
    """

    slices: Slices

    def forward(self, x: Tensor) -> Tensor:
        """This rank's features [..., F], before and after."""
        return normed(x, self.weight, self.eps, self.normalized_shape[0], self.slices)


def _total(x: Tensor, slices: Slices) -> Tensor:
    total: Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", slices.group))
    return total


def _gather(x: Tensor, slices: Slices) -> Tensor:
    if not slices.positions:
        return x
    rows: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), slices.size, slices.group))
    if len(x) == 1 and not slices.pipelined:
        return rows.view(1, -1, x.shape[-1])  # without the copy that torch.cat would make of a single sequence
    return torch.cat(rows.chunk(slices.size), dim=1)


def _sum(x: Tensor, slices: Slices) -> Tensor:
    if slices.positions:
        rows = torch.cat(x.chunk(slices.size, dim=1))
        return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", slices.size, slices.group))  # type: ignore[no-any-return]
    return _total(x, slices)
