"""One global gradient norm over every axis of the mesh, and clipping by it.

Each rank sums the squares of what it holds; sums are then added over exactly the groups along which a gradient is
split. Nothing is gathered, nothing is counted twice, and the host never waits for the value.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan.contracts import ModelPart, shard_of
from titan.contracts.base.mesh import Mesh

Groups = tuple[dist.ProcessGroup, ...]
"""Over which a tensor is split; empty where this rank has all of it."""


def global_norm(parts: Iterable[ModelPart], mesh: Mesh) -> Tensor:
    """The 2-norm of the gradients of the whole model, a float32 scalar, equal on all ranks.

    One all-reduce for each group along which a parameter is split, whether or not this rank has a gradient of it.
    """
    alike: dict[tuple[torch.device, torch.dtype], dict[Groups, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    squares: dict[Groups, list[Tensor]] = defaultdict(list)
    for part in parts:
        for name, parameter in part.parameters():
            if name in part.shared:
                continue
            gradient = parameter.grad
            groups = _groups(parameter if gradient is None else gradient)
            squares[groups] += []
            if gradient is not None:
                alike[gradient.device, gradient.dtype][groups].append(shard_of(gradient))
            elif name in part.used_gradients:
                squares[groups].append(part.used_gradients[name].to(mesh.device).double().square())
    for held in alike.values():
        norms = torch._foreach_norm([each for some in held.values() for each in some], dtype=torch.float32)
        all_squares = torch.stack(norms).to(mesh.device).double().square()
        split = torch.split(all_squares, [len(some) for some in held.values()])
        for groups, own in zip(held, split, strict=True):
            squares[groups].append(own.sum())
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    sums = {groups: torch.stack(some).sum() if some else zero for groups, some in squares.items()}
    return mesh.sum(_reduced(sums, zero), "layers").sqrt().float()


def _reduced(sums: dict[Groups, Tensor], zero: Tensor) -> Tensor:
    for group in dict.fromkeys(group for groups in sums for group in groups):
        split = [groups for groups in sums if group in groups]
        table = torch.stack([sums.pop(groups) for groups in split])
        dist.all_reduce(table, group=group)
        for groups, whole in zip(split, table, strict=True):
            rest = tuple(other for other in groups if other != group)
            sums[rest] = sums[rest] + whole if rest in sums else whole
    return sums.get((), zero)


def clip(parts: Iterable[ModelPart], norm: Tensor, limit: float) -> None:
    """Divide all gradients in place by norm / limit where norm exceeds limit."""
    gradients = [shard_of(p.grad) for part in parts for _, p in part.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, clip_divisor(norm, limit).to(gradients[0].device))


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are divided by, a float32 scalar on the device of the norm: norm / limit, and 1 at least."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def _groups(gradient: Tensor) -> Groups:
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in gradient.placements), "gradient is a partial sum"
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, p in enumerate(gradient.placements)
        if not isinstance(p, Replicate) and mesh.size(dim) > 1
    )
