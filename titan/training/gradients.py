"""One global gradient norm over every axis of the mesh, and clipping by it.

Each rank sums the squares of what it holds; sums are then added over exactly the groups along which a gradient is
split. Nothing is gathered, nothing is counted twice, and the host never waits for the value.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan.contracts import ModelPart
from titan.contracts.base.mesh import Mesh


def global_norm(parts: Iterable[ModelPart], mesh: Mesh) -> Tensor:
    """The 2-norm of the gradients of the whole model, a float32 scalar, equal on all ranks."""
    split_over: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for part in parts:
        for name, parameter in part.parameters():
            if parameter.grad is not None and name not in part.shared:
                split_over[_groups(parameter)].append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for groups, gradients in split_over.items():
        squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double().square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return mesh.sum(total, "layers").sqrt().float()


def clip(parts: Iterable[ModelPart], norm: Tensor, limit: float) -> None:
    """Scale all gradients in place by limit / norm where norm exceeds limit."""
    gradients = [_local(p.grad) for part in parts for _, p in part.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))


def _groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a gradient is split; a gradient that is still a partial sum has no norm yet."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in gradient.placements), "gradient is a partial sum"
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, p in enumerate(gradient.placements)
        if not isinstance(p, Replicate) and mesh.size(dim) > 1
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
