"""The mesh: named axes over the ranks of a run, each with facts about its ranks.

Only the plugin that owns an axis knows it by name. Loss, data and gradient norm ask for facts. `Layout` is arithmetic
and needs no process group, so the planner uses it; `Mesh` adds the groups.

An axis that folds others is no dimension of its own: it divides the ranks of these axes anew, for some parameters. Let
f be the number of a rank among them, outer axes first. Its place on the folding axis is f mod degree, so ranks along it
are neighbors. What the axis leaves of the axes it folds, its remainder, are the ranks with the same place.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titan.contracts.base.options import coerce, did_you_mean, shown
from titan.contracts.base.spec import nearest
from titan.errors import PluginError

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
    data: which data the ranks along the axis see; None where the axis folds others, which say so.
    weights: which weights they hold.
    folds: axes whose ranks this one divides anew, for the parameters that are slices along it. The degree divides the
        product of theirs and multiplies the world by nothing.
    topology_order: position from outer axes (slow links) to inner axes (fast links); ranks along the axis with the
        largest value are neighbors. Built-in: pp 0, dp_replicate 10, dp_shard 20, cp 30, tp 40. Of an axis that folds
        others, only its place in lists.
    doc: one line for help texts.
    default: degree where the TOML sets none; -1: all remaining ranks (at most one axis of a mesh), or all it folds.

    Raises:
        ValueError: a field has another type, or a value that the field does not allow.
    """

    name: str
    data: DataFact | None = None
    weights: WeightsFact
    folds: tuple[str, ...] = ()
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
        if what := self._contradiction():
            raise ValueError(f"mesh axis {self.name!r}: {what}")

    def _contradiction(self) -> str:
        """What does not go together in the facts; empty where all does."""
        if self.folds and self.data is not None:
            return f'data = "{self.data}" with folds = {self.folds}: the axes that it folds say which data ranks see'
        if self.folds and self.weights != "slices":
            return f'weights = "{self.weights}" with folds = {self.folds}: ranks along such an axis must hold "slices"'
        if not self.folds and self.data is None:
            return f"data: must be one of {', '.join(map(repr, get_args(DataFact)))}, unless the axis folds others"
        if (self.data, self.weights) == ("same", "copies"):
            return 'data = "same" with weights = "copies": its ranks would all do the same work'
        if self.data == "sliced" and self.weights != "copies":
            return f'data = "sliced" with weights = "{self.weights}": ranks that slice sequences must hold "copies"'
        return ""


@dataclass(frozen=True)
class Layout:
    """Degrees of all axes, outer to inner. Pure arithmetic.

    axes: sorted by `topology_order`.  degrees: axis name -> ranks along it.
    """

    axes: tuple[Axis, ...]
    degrees: Mapping[str, int]

    @property
    def dimensions(self) -> tuple[Axis, ...]:
        """The axes whose degrees multiply to the world: all but those that fold others."""
        return tuple(axis for axis in self.axes if not axis.folds)

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs: the product of the degrees of all axes that fold no others."""
        return math.prod(self.degrees[axis.name] for axis in self.dimensions)

    def degree(self, axis: str) -> int:
        """Degree of an axis; 1 where no plugin owns such an axis."""
        return self.degrees.get(axis, 1)

    def axes_of(self, *facts: AxisFact) -> tuple[str, ...]:
        """Names of the axes that state one of these facts, outer to inner; none that folds others.

        So a reduction over them counts each rank once. What is a slice along a folding axis tells so by its placement.
        """
        return tuple(axis.name for axis in self.dimensions if axis.data in facts or axis.weights in facts)

    def degree_of(self, *facts: AxisFact) -> int:
        """Ranks along all axes that state one of these facts: the product of their degrees."""
        return math.prod(self.degrees[name] for name in self.axes_of(*facts))

    def folded(self, axis: str) -> tuple[str, ...]:
        """Names of the axes of this layout that an axis folds, outer to inner; empty where it folds none."""
        folds = next((one.folds for one in self.axes if one.name == axis), ())
        return tuple(one.name for one in self.dimensions if one.name in folds)

    def remainder(self, axis: str) -> int:
        """Ranks that a folding axis leaves of those it folds: they hold the same slices along it."""
        return math.prod(self.degrees[name] for name in self.folded(axis)) // self.degrees[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: axis name -> position, from 0."""
        at = {}
        for axis in reversed(self.dimensions):
            rank, at[axis.name] = divmod(rank, self.degrees[axis.name])
        for axis in self.axes:
            if axis.folds:
                at[axis.name] = self._index(at, self.folded(axis.name)) % self.degrees[axis.name]
        return at

    def index_of(self, rank: int, *facts: AxisFact) -> int:
        """Position of a rank among the ranks along all axes that state one of these facts, from 0."""
        return self._index(self.coordinate(rank), self.axes_of(*facts))

    def _index(self, at: Mapping[str, int], names: Sequence[str]) -> int:
        index = 0
        for name in names:
            index = index * self.degrees[name] + at[name]
        return index

    def product(self, names: Sequence[str]) -> str:
        """`dp_shard 4 x cp 2`, of those above 1; empty where all are 1."""
        return " x ".join(f"{name} {self.degrees[name]}" for name in names if self.degrees[name] > 1)

    def __str__(self) -> str:
        folding = [f"{axis.name} {self.degrees[axis.name]}" for axis in self.axes if axis.folds]
        world = self.product([axis.name for axis in self.dimensions]) or "one rank"
        return ", ".join([world, *(part for part in folding if not part.endswith(" 1"))])


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
    layout = Layout(ordered, degrees)
    left = [axis.name for axis in layout.dimensions if degrees[axis.name] == -1]
    for name in left[1:]:
        faults.append(
            (name, f"= -1: only one axis can take all remaining ranks, and {left[0]} already does; set a degree")
        )
    for name in left:
        degrees[name] = 1
    fixed = layout.world_size
    if left and world_size is None:
        degrees[left[0]] = _least(layout, left[0])
    elif left and world_size is not None and world_size % fixed == 0:
        degrees[left[0]] = world_size // fixed
    for axis in layout.axes:
        if degrees[axis.name] == -1:
            degrees[axis.name] = math.prod(degrees[name] for name in layout.folded(axis.name))
    if world_size is not None and layout.world_size != world_size:
        return layout, [*faults, ("", _misfit(layout, world_size))]
    return layout, [*faults, *unfoldable(layout)]


def _least(layout: Layout, axis: str) -> int:
    """The smallest degree of an axis for which those that fold it come out even."""
    least = 1
    for folding in layout.axes:
        folded, degree = layout.folded(folding.name), layout.degrees[folding.name]
        if axis in folded and degree > 1:
            others = math.prod(layout.degrees[name] for name in folded if name != axis)
            least = math.lcm(least, degree // math.gcd(degree, others))
    return least


def unfoldable(layout: Layout) -> Iterator[tuple[str, str]]:
    """(axis, sentence) for each folding axis that does not divide what it folds, or that another divides already."""
    folding = [axis.name for axis in layout.axes if axis.folds and layout.degrees[axis.name] > 1]
    for axis in folding:
        degree, folded = layout.degrees[axis], layout.folded(axis)
        ranks = math.prod(layout.degrees[name] for name in folded)
        if ranks % degree:
            of = layout.product(folded) or " x ".join(f"{name} 1" for name in folded) or "no axis"
            of += f" = {ranks}" if " x " in of else ""
            near = nearest(degree, partial(_divides, ranks), most=ranks)
            yield axis, f"= {degree}: must divide the ranks of the axes that it folds, {of}; nearest: {near}"
    for first, second in combinations(folding, 2):
        if both := set(layout.folded(first)) & set(layout.folded(second)):
            what = f"mesh.{first} divides the ranks of {' and '.join(sorted(both))} already; set one of them to 1"
            yield second, f"= {layout.degrees[second]}: {what}"


def _divides(whole: int, number: int) -> bool:
    return whole % number == 0


def _misfit(layout: Layout, world_size: int) -> str:
    product = layout.product([axis.name for axis in layout.dimensions]) or "1"
    needed = layout.world_size
    nearest = max(needed, round(world_size / needed) * needed)
    advice = f"launch {needed} ranks" + (f" (or {nearest} with dp_shard = -1)" if nearest != needed else "")
    return f"{product} = {needed} ranks, but {world_size} were launched; {advice}"


class Mesh:
    """A layout with its process groups, on one rank.

    An axis of degree 1 is left out unless its owner is on (`keep`): every axis costs time. One that folds others and
    has degree 1 divides nothing, and is always left out.

    On GPUs the groups of axes are NCCL's alone, for tensors on the device. Each would otherwise get a gloo group too,
    with its threads and sockets. What needs the CPU uses the process group of all ranks, which has both.
    """

    def __init__(self, layout: Layout, device: torch.device, rank: int, keep: Sequence[str] = ()) -> None:
        self.layout, self.device, self.rank = layout, device, rank
        degrees = layout.degrees
        names = tuple(axis.name for axis in layout.dimensions if degrees[axis.name] > 1 or axis.name in keep)
        self._mesh: DeviceMesh | None = None
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        self._folds: dict[str, DeviceMesh] = {}
        if names:
            shape = tuple(degrees[name] for name in names)
            backends = self._backends(names, shape)
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=backends)
        for axis in layout.axes:
            if axis.folds and degrees[axis.name] > 1:
                folded = self._flattened(layout.folded(axis.name))
                shape, names = (layout.remainder(axis.name), degrees[axis.name]), (_rest(axis.name), axis.name)
                backends = self._backends(names, shape)
                self._folds[axis.name] = folded._unflatten(0, shape, names, backend_override=backends)

    def _backends(self, names: Sequence[str], shape: Sequence[int]) -> Any:
        """Dimension -> backend of its group. One of all ranks uses the process group of all, which is there."""
        world = self.layout.world_size
        own = {name: "nccl" for name, size in zip(names, shape, strict=True) if size < world}
        return own if self.device.type == "cuda" and own else None

    def __contains__(self, axis: str) -> bool:
        return axis in self._folds or (self._mesh is not None and axis in (self._mesh.mesh_dim_names or ()))

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of these axes, for DTensor and FSDP; never of an axis together with one that it folds."""
        assert self._mesh is not None, f"this run has no mesh, so no axis {axes}"
        names = (axes,) if isinstance(axes, str) else axes
        if not any(name in self._folds for name in names):
            return self._mesh[axes]
        return _beside([self._folds[name][name] if name in self._folds else self._mesh[name] for name in names])

    def flat(self, *dimensions: Sequence[str], without: str = "") -> DeviceMesh:
        """A mesh with one dimension for each sequence of axes, of all ranks along them, for DTensor and FSDP.

        Axes that this mesh has left out count as 1. All ranks call it in the same order: several axes become one
        process group, which is made at the first call.

        without: an axis that folds others, for parameters that are slices along it: of the axes that it folds, the
            ranks count among which the slices are the same. Its dimension must name all of them or none.
        """
        return _beside([self._flattened(axes, without) for axes in dimensions])

    def _flattened(self, axes: Sequence[str], without: str = "") -> DeviceMesh:
        """One dimension of all ranks along these axes."""
        assert self._mesh is not None, "this run has no mesh"
        there = tuple(axis for axis in axes if axis in self)
        named = tuple(axis for axis in there if self.layout.degrees[axis] > 1) or there[:1]
        pieces = {name: self._mesh[name] for name in named}
        folded = self._wide(without) if without in self._folds else ()
        if set(folded) & set(named):
            assert set(folded) <= set(named), f"{without} folds {folded}, but {named} has some of these axes alone"
            others = {name: piece for name, piece in pieces.items() if name not in folded}
            rest, ranks = _rest(without), self.layout.remainder(without)
            pieces = others if others and ranks == 1 else {rest: self._folds[without][rest], **others}
        key = tuple(pieces)
        if len(key) == 1:
            return pieces[key[0]]
        if key not in self._flat:
            own = "nccl" if self.device.type == "cuda" else None
            self._flat[key] = _beside(list(pieces.values()))._flatten("_".join(key), backend_override=own)
        return self._flat[key]

    def fold_of(self, parameter: Tensor) -> str:
        """The axis that folds others and along which a parameter is a slice; empty where there is none.

        Raises:
            PluginError: it is a DTensor along such an axis, but no slice: its gradient is to be summed over the axes
                that this one folds, which are no dimensions of its own.
        """
        if not self._folds or not isinstance(parameter, DTensor):
            return ""
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name in self._folds and not placement.is_shard():
                what = f"is {placement} along mesh axis {name!r}, which folds {', '.join(self.layout.folded(name))}"
                raise PluginError(
                    f"a parameter of shape {list(parameter.shape)} {what}: make it a slice, or no DTensor"
                )
        return next((name for name in names if name in self._folds), "")

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis; 0 where the axis does not exist."""
        return self.layout.coordinate(self.rank).get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis of degree above 1; for tensors on the device of the mesh."""
        mesh = self._folds.get(axis, self._mesh)
        assert mesh is not None
        return mesh.get_group(axis)

    def groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """All process groups of this rank: one per axis, and of axes that are one dimension together.

        Each with the axes along which its ranks differ: "dp_shard", or "dp_shard x cp"; "dp_shard x cp / ep" is what an
        axis leaves of those it folds.
        """
        if self._mesh is None:
            return []
        rests = {_rest(axis): f"{' x '.join(self._wide(axis))} / {axis}" for axis in self._folds}
        found = [(axis, self.group(axis)) for axis in self._mesh.mesh_dim_names or ()]
        for mesh in self._folds.values():
            found += [(rests.get(name, name), mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
        flat = [(" x ".join(rests.get(name, name) for name in key), mesh) for key, mesh in self._flat.items()]
        return found + [(axes, mesh.get_group()) for axes, mesh in flat]

    def _wide(self, axis: str) -> tuple[str, ...]:
        """Of the axes that this one folds, those above 1."""
        return tuple(name for name in self.layout.folded(axis) if self.layout.degrees[name] > 1)

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


def _rest(axis: str) -> str:
    """Name of the mesh dimension that a folding axis leaves of the axes it folds."""
    return f"{axis}_rest"


def _beside(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of all of these."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)
