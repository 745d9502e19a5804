"""The mesh: named axes over the ranks of a run, each with facts about its ranks.

Only the plugin that owns an axis knows it by name. Loss, data and gradient norm ask for facts. `Layout` is arithmetic
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

DataFact = Literal["same", "dealt", "sliced"]
"""What the ranks along an axis see: the same samples, other samples, or other positions of the same samples.

The host deals samples over axes that are "dealt". Tokens and losses are summed over axes that are "dealt" or "sliced".
"""

WeightsFact = Literal["copies", "slices", "layers"]
"""What the ranks along an axis hold: copies of the weights, slices of the same layers, or other layers.

A gradient is summed over every axis that is "dealt" or "sliced" and along which the parameter is a copy. The global
norm adds the squares over "slices" and "layers".
"""

AxisFact = DataFact | WeightsFact


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis that a plugin owns. Users set its degree in `[mesh]`.

    name: the TOML key.
    data: which data the ranks along the axis see.  weights: which weights they hold.
    topology_order: position from outer axes (slow links) to inner axes (fast links); ranks along the axis with the
        largest value are neighbors. Built-in: pp 0, dp_replicate 10, dp_shard 20, cp 30, tp 40.
    doc: one line for help texts.
    default: degree where the TOML sets none; -1: all remaining ranks (at most one axis of a mesh).

    Raises:
        ValueError: a field has another type, or a value that the field does not allow.
    """

    name: str
    data: DataFact
    weights: WeightsFact
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
        if (self.data, self.weights) == ("same", "copies"):
            what = 'data = "same" with weights = "copies": its ranks would all do the same work'
            raise ValueError(f"mesh axis {self.name!r}: {what}")
        if self.data == "sliced" and self.weights != "copies":
            what = f'data = "sliced" with weights = "{self.weights}": ranks that slice sequences must hold "copies"'
            raise ValueError(f"mesh axis {self.name!r}: {what}")


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

    def axes_of(self, *facts: AxisFact) -> tuple[str, ...]:
        """Names of the axes that state one of these facts, outer to inner."""
        return tuple(axis.name for axis in self.axes if axis.data in facts or axis.weights in facts)

    def degree_of(self, *facts: AxisFact) -> int:
        """Ranks along all axes that state one of these facts: the product of their degrees."""
        return math.prod(self.degrees[name] for name in self.axes_of(*facts))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: axis name -> position, from 0."""
        at = {}
        for axis in reversed(self.axes):
            rank, at[axis.name] = divmod(rank, self.degrees[axis.name])
        return at

    def index_of(self, rank: int, *facts: AxisFact) -> int:
        """Position of a rank among the ranks along all axes that state one of these facts, from 0."""
        at, index = self.coordinate(rank), 0
        for name in self.axes_of(*facts):
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
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
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

    def flat(self, *dimensions: Sequence[str]) -> DeviceMesh:
        """A mesh with one dimension for each sequence of axes, of all ranks along them, for DTensor and FSDP.

        Axes that this mesh has left out count as 1. All ranks call it in the same order: several axes become one
        process group, which is made at the first call.
        """
        found = [self._flattened(axes) for axes in dimensions]
        return found[0] if len(found) == 1 else DeviceMesh._concatenate(found)

    def _flattened(self, axes: Sequence[str]) -> DeviceMesh:
        """One dimension of all ranks along these axes."""
        assert self._mesh is not None, "this run has no mesh"
        there = tuple(axis for axis in axes if axis in self)
        named = tuple(axis for axis in there if self.layout.degrees[axis] > 1) or there[:1]
        if len(named) == 1:
            return self._mesh[named[0]]
        if named not in self._flat:
            own = "nccl" if self.device.type == "cuda" else None
            self._flat[named] = self._mesh[named]._flatten("_".join(named), backend_override=own)
        return self._flat[named]

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis; 0 where the axis does not exist."""
        return self.layout.coordinate(self.rank).get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis of degree above 1; for tensors on the device of the mesh."""
        assert self._mesh is not None
        return self._mesh.get_group(axis)

    def groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """All process groups of this rank: one per axis, and of axes that are one dimension together.

        Each with the axes along which its ranks differ: "dp_shard", or "dp_shard x cp".
        """
        if self._mesh is None:
            return []
        degrees = self.layout.degrees
        flat = [(" x ".join(a for a in axes if degrees[a] > 1), mesh.get_group()) for axes, mesh in self._flat.items()]
        return [(axis, self.group(axis)) for axis in self._mesh.mesh_dim_names or ()] + flat

    def sum(self, tensor: torch.Tensor, *facts: AxisFact) -> torch.Tensor:
        """Sum a tensor in place over the ranks along all axes that state one of these facts, and return it.

        All these ranks must call it, in the same order.
        """
        return self._reduce(tensor, dist.ReduceOp.SUM, facts)

    def max(self, tensor: torch.Tensor, *facts: AxisFact) -> torch.Tensor:
        """The same with the largest value, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX, facts)

    def _reduce(self, tensor: torch.Tensor, operation: Any, facts: Sequence[AxisFact]) -> torch.Tensor:
        for axis in self.layout.axes_of(*facts):
            if self.layout.degrees[axis] > 1:
                dist.all_reduce(tensor, operation, self.group(axis))
        return tensor
