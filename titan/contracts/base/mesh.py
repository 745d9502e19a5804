"""The mesh: named axes, each with a role, over the ranks of a run.

Only the plugin that owns an axis knows it by name. Loss, data and gradient norm ask for roles. `Layout` is arithmetic
and needs no process group, so the planner uses it; `Mesh` adds the groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan.contracts.base.options import coerce, did_you_mean, shown

Role = Literal["stage", "batch", "sequence", "model", "expert"]
"""What differs between ranks along an axis.

stage: the layers (pipeline parallelism).  batch: the samples (data parallelism).
sequence: the tokens of a sample (context parallelism).  model: the slice of each layer (tensor parallelism).
expert: the experts, and the samples too (expert parallelism).
"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis that a plugin owns. Users set its degree in `[mesh]`.

    name: the TOML key.  role: what ranks along the axis do differently.
    topology_order: position from outer axes (slow links) to inner axes (fast links); ranks along the axis with the
        largest value are neighbors. Built-in: pp 0, dp_replicate 10, dp_shard 20, tp 40; 30 is for context parallelism.
    doc: one line for help texts.
    default: degree where the TOML sets none; -1: all remaining ranks (at most one axis of a mesh).

    Raises:
        ValueError: a field has another type, or a value that the field does not allow.
    """

    name: str
    role: Role
    topology_order: float
    doc: str
    default: int = 1

    def __post_init__(self) -> None:
        for field, hint in get_type_hints(Axis).items():
            value = getattr(self, field)
            try:
                coerce(value, hint)
            except ValueError as error:
                raise ValueError(f"mesh axis {self.name!r}: {field} = {shown(value)}: {error}") from None
        if not self.name.isidentifier():
            raise ValueError(f"mesh axis {self.name!r}: name: must be a Python identifier")
        if self.default < 1 and self.default != -1:
            what = "must be at least 1, or -1 for all remaining ranks"
            raise ValueError(f"mesh axis {self.name!r}: default = {self.default}: {what}")


@dataclass(frozen=True)
class Layout:
    """Degrees of all axes, outer to inner. Pure arithmetic.

    axes: sorted by `topology_order`.  degrees: axis name -> ranks along it.
    """

    axes: tuple[Axis, ...]
    degrees: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs: the product of all degrees."""
        return math.prod(self.degrees.values())

    def degree(self, axis: str) -> int:
        """Degree of an axis; 1 where no plugin owns such an axis."""
        return self.degrees.get(axis, 1)

    def of_role(self, *roles: Role) -> tuple[str, ...]:
        """Names of the axes that have one of these roles, outer to inner."""
        return tuple(axis.name for axis in self.axes if axis.role in roles)

    def role_degree(self, *roles: Role) -> int:
        """Ranks along all axes of these roles: the product of their degrees."""
        return math.prod(self.degrees[name] for name in self.of_role(*roles))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: axis name -> position, from 0."""
        at = {}
        for axis in reversed(self.axes):
            rank, at[axis.name] = divmod(rank, self.degrees[axis.name])
        return at

    def role_index(self, rank: int, *roles: Role) -> int:
        """Position of a rank among the ranks that differ in these roles, from 0."""
        at, index = self.coordinate(rank), 0
        for name in self.of_role(*roles):
            index = index * self.degrees[name] + at[name]
        return index

    def __str__(self) -> str:
        parts = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1]
        return " x ".join(parts) or "one rank"


def lay_out(
    axes: Sequence[Axis], wanted: Mapping[str, int], world_size: int | None
) -> tuple[Layout, list[tuple[str, str]]]:
    """The layout of the wanted degrees over `world_size` ranks (None: as many as the degrees need).

    Returns the layout, and the errors found as (axis, sentence). With errors, use the layout for further checks only.
    """
    ordered = tuple(sorted(axes, key=lambda axis: axis.topology_order))
    known = {axis.name for axis in ordered}
    faults = [(name, f"no plugin owns this axis{did_you_mean(name, known)}") for name in wanted if name not in known]
    degrees = {axis.name: wanted.get(axis.name, axis.default) for axis in ordered}
    for name, degree in degrees.items():
        if degree < 1 and degree != -1:
            faults.append((name, f"= {degree}: must be a positive degree, or -1 for all remaining ranks"))
            degrees[name] = 1
    left = [name for name, degree in degrees.items() if degree == -1]
    fixed = math.prod(degree for degree in degrees.values() if degree > 0)
    for name in left[1:]:
        faults.append(
            (name, f"= -1: only one axis can take all remaining ranks, and {left[0]} already does; set a degree")
        )
    for name in left:
        degrees[name] = 1
    if left and world_size is not None and world_size % fixed == 0:
        degrees[left[0]] = world_size // fixed
    layout = Layout(ordered, degrees)
    if world_size is not None and layout.world_size != world_size:
        faults.append(("", _misfit(layout, world_size)))
    return layout, faults


def _misfit(layout: Layout, world_size: int) -> str:
    product = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items() if degree > 1) or "1"
    needed = layout.world_size
    nearest = max(needed, round(world_size / needed) * needed)
    advice = f"launch {needed} ranks" + (f" (or {nearest} with dp_shard = -1)" if nearest != needed else "")
    return f"{product} = {needed} ranks, but {world_size} were launched; {advice}"


class Mesh:
    """A layout with its process groups, on one rank.

    An axis of degree 1 is left out unless its owner is on (`keep`): every axis costs time.

    On GPUs the groups of axes are NCCL's alone, for tensors on the device. Each would otherwise get a gloo group too,
    with its threads and sockets. What needs the CPU uses the process group of all ranks, which has both.
    """

    def __init__(self, layout: Layout, device: torch.device, rank: int, keep: Sequence[str] = ()) -> None:
        self.layout, self.device, self.rank = layout, device, rank
        names = tuple(name for name, degree in layout.degrees.items() if degree > 1 or name in keep)
        self._mesh: DeviceMesh | None = None
        if names:
            shape = tuple(layout.degrees[name] for name in names)
            # An axis of all ranks uses the process group of all, which is there.
            own: Any = {name: "nccl" for name, degree in zip(names, shape, strict=True) if degree < layout.world_size}
            backends = own if device.type == "cuda" and own else None
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=backends)

    def __contains__(self, axis: str) -> bool:
        return self._mesh is not None and axis in (self._mesh.mesh_dim_names or ())

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of these axes, for DTensor and FSDP."""
        assert self._mesh is not None, f"this run has no mesh, so no axis {axes}"
        return self._mesh[axes]

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis; 0 where the axis does not exist."""
        return self.layout.coordinate(self.rank).get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis of degree above 1; for tensors on the device of the mesh."""
        assert self._mesh is not None
        return self._mesh.get_group(axis)

    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups of this rank, one per axis."""
        return [] if self._mesh is None else list(self._mesh.get_all_groups())

    def sum(self, tensor: torch.Tensor, *roles: Role) -> torch.Tensor:
        """Sum a tensor in place over the ranks that differ in these roles, and return it.

        All these ranks must call it, in the same order.
        """
        for axis in self.layout.of_role(*roles):
            if self.layout.degrees[axis] > 1:
                dist.all_reduce(tensor, group=self.group(axis))
        return tensor
