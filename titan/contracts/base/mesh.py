"""The mesh: the process groups of a layout, on one rank. The host reduces by facts of axes, plugins over their own."""

import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titan.contracts.base.layout import AxisFact, Layout
from titan.errors import PluginError

ON_GPUS = "nccl"
"""The backend of groups of ranks on GPUs; RCCL, AMD's, has the same name."""


def made_when_used() -> Any:
    """Options of a group of NCCL whose members connect when they first use it; None where they do so without. One group
    each: PyTorch keeps the object.

    PyTorch 2.15 would connect all ranks at the start, and split every other group from theirs: in a call of all ranks,
    lost ones too, for each group along each axis. Its former implementation does not.
    """
    options: Any = dist.ProcessGroupNCCL.Options() if dist.is_nccl_available() else None
    if not hasattr(options, "lazy_init") or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return None
    options.lazy_init = True
    return options


def _on_gpus() -> Any:
    return ON_GPUS if (options := made_when_used()) is None else (ON_GPUS, options)


class Mesh:
    """A layout with its process groups, on one rank.

    An axis of degree 1 is left out unless its owner is on (`keep`): every axis costs time. One that folds others and
    has degree 1 divides nothing, and is always left out.

    On GPUs the groups of axes are NCCL's alone, for tensors on the device, to spare the threads and sockets of gloo.
    What needs the CPU uses the process group of all ranks, which has both.
    """

    def __init__(self, layout: Layout, device: torch.device, rank: int, keep: Sequence[str] = ()) -> None:
        self.layout, self.device, self.rank = layout, device, rank
        degrees = layout.degrees
        names = tuple(axis.name for axis in layout.dimensions if degrees[axis.name] > 1 or axis.name in keep)
        self._mesh: DeviceMesh | None = None
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        self._folds: dict[str, DeviceMesh] = {}
        self._there = list(range(layout.workers))
        self._remaining: dist.ProcessGroup | None = None
        self.spared: tuple[int, ...] = ()  # workers that may die without ending the run; see `spare`
        self.apart = False  # workers keep their own pace, and have not met: no reduction reaches another one
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
        # A dimension of all ranks uses the process group of all, which is there.
        if self.device.type != "cuda":
            return None
        smaller = (name for name, size in zip(names, shape, strict=True) if size < self.layout.world_size)
        return {name: _on_gpus() for name in smaller} or None

    def __contains__(self, axis: str) -> bool:
        return axis in self._folds or (self._mesh is not None and axis in (self._mesh.mesh_dim_names or ()))

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of these axes, for DTensor and FSDP; never of an axis together with one that it folds."""
        assert self._mesh is not None, f"this run has no mesh, so no axis {axes}"
        names = (axes,) if isinstance(axes, str) else axes
        if not any(name in self._folds for name in names):
            return self._mesh[axes]
        return _beside([self._folds.get(name, self._mesh)[name] for name in names])

    def flat(self, *dimensions: Sequence[str], without: str = "") -> DeviceMesh:
        """A mesh with one dimension for each sequence of axes, of all ranks along them, for DTensor and FSDP.

        Axes that this mesh has left out count as 1. All ranks call it in the same order: several axes become one
        process group, which is made at the first call.
        without: an axis that folds others, for parameters that are slices along it: of the axes that it folds, the
            ranks count among which the slices are the same. Its dimension must name all of them or none.
        """
        return _beside([self._flattened(axes, without) for axes in dimensions])

    def _flattened(self, axes: Sequence[str], without: str = "") -> DeviceMesh:
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
            own = _on_gpus() if self.device.type == "cuda" else None
            self._flat[key] = _beside(list(pieces.values()))._flatten("_".join(key), backend_override=own)
        return self._flat[key]

    def fold_of(self, parameter: Tensor) -> str:
        """The axis that folds others and along which a parameter is a slice; empty where there is none.

        Raises:
            PluginError: it is a DTensor along such an axis, but no slice: its gradient could not be summed over the
                axes that this one folds.
        """
        if not self._folds or not isinstance(parameter, DTensor):
            return ""
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name in self._folds and not placement.is_shard():
                what = f"a parameter of shape {list(parameter.shape)} is {placement} along mesh axis {name!r}"
                folded = ", ".join(self.layout.folded(name))
                raise PluginError(f"{what}, which folds {folded}: make it a slice, or no DTensor")
        return next((name for name in names if name in self._folds), "")

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis; 0 where the axis does not exist."""
        return self.layout.coordinate(self.rank).get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis of degree above 1; for tensors on the device of the mesh."""
        if self._remaining is not None and axis == self.layout.worker_axis:
            return self._remaining
        mesh = self._folds.get(axis, self._mesh)
        assert mesh is not None
        return mesh.get_group(axis)

    @property
    def workers(self) -> int:
        """Workers that are there: all of the layout's, but for those that the run has lost; 1 without such an axis."""
        return len(self._there)

    @property
    def worker(self) -> int:
        """This rank's worker, counted among those that are there, from 0."""
        return self._there.index(self.at(self.layout.worker_axis))

    def spare(self, workers: Collection[int]) -> None:
        """Say, before training begins, which workers (places along their axis) may die without ending the run.

        Raises:
            PluginError: there is no such worker, or it is the first one, which the others need.
        """
        if wrong := [worker for worker in workers if worker not in range(1, self.layout.workers)]:
            why = f"there are {self.layout.workers}, from 0, and the others need the first"
            raise PluginError(f"Mesh.spare: worker {wrong[0]} cannot be spared: {why}")
        self.spared = tuple(sorted({*self.spared, *workers}))

    def lose(self, workers: Collection[int]) -> list[int]:
        """Go on without workers (places along their axis) whose ranks are gone; returns the ranks that remain.

        From now on reductions over the axis with weights of their own are those of the remaining workers. All remaining
        ranks must call it, at the same point; each makes the groups of all, as PyTorch names groups by their number.
        By their ranks, as `use_local_synchronization` does, names depend on how many groups a rank has destroyed.
        """
        self._there = [worker for worker in self._there if worker not in workers]
        axis, on_gpus = self.layout.worker_axis, self.device.type == "cuda"
        own: dict[str, Any] = {"backend": ON_GPUS, "pg_options": made_when_used()} if on_gpus else {}
        groups: dict[tuple[int, ...], list[int]] = {}  # by the place inside of a worker
        for rank in range(self.layout.world_size):
            at = self.layout.coordinate(rank)
            if at.pop(axis) in self._there:
                groups.setdefault(tuple(at.values()), []).append(rank)
        for ranks in groups.values():
            group = dist.new_group(ranks, **own)
            self._remaining = group if self.rank in ranks else self._remaining
        return sorted(rank for ranks in groups.values() for rank in ranks)

    def groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """All process groups of this rank, each with the axes along which its ranks differ.

        "dp_shard", or "dp_shard x cp"; "dp_shard x cp / ep" is what an axis leaves of those it folds.
        """
        if self._mesh is None:
            return []
        rests = {_rest(axis): f"{' x '.join(self._wide(axis))} / {axis}" for axis in self._folds}
        found = [(axis, self.group(axis)) for axis in self._mesh.mesh_dim_names or ()]
        for mesh in self._folds.values():
            found += [(rests.get(name, name), mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
        flat = [(" x ".join(rests.get(name, name) for name in key), mesh) for key, mesh in self._flat.items()]
        return found + [(axes, mesh.get_group()) for axes, mesh in flat]

    def _wide(self, axis: str) -> tuple[str, ...]:  # of the axes that this one folds, those above 1
        return tuple(name for name in self.layout.folded(axis) if self.layout.degrees[name] > 1)

    def sum(self, tensor: torch.Tensor, *facts: AxisFact) -> torch.Tensor:
        """Sum a tensor in place over the ranks along all axes that state one of these facts, and return it.

        Not over axes with weights of their own, unless "own" is among the facts. All these ranks must call it, in the
        same order.
        """
        return self._reduce(tensor, dist.ReduceOp.SUM, facts)

    def max(self, tensor: torch.Tensor, *facts: AxisFact) -> torch.Tensor:
        """The same with the largest value, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX, facts)

    def _reduce(self, tensor: torch.Tensor, operation: Any, facts: Sequence[AxisFact]) -> torch.Tensor:
        own = self.layout.worker_axis
        left_out = () if "own" in facts else self.layout.axes_of("own")
        for axis in self.layout.axes_of(*facts):
            if self.layout.degrees[axis] > 1 and axis not in left_out and not (self.apart and axis == own):
                dist.all_reduce(tensor, operation, self.group(axis))
        return tensor

    def of_workers(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all workers, [workers, ...]; its own alone, [1, ...], where there is one or they are apart.

        All ranks must call it, in the same order, with tensors of one shape.
        """
        if not (axis := self.layout.worker_axis) or self.apart:
            return tensor[None]
        found = tensor.new_empty(self.workers, *tensor.shape)
        dist.all_gather(list(found), tensor.contiguous(), self.group(axis))
        return found


def _rest(axis: str) -> str:  # the mesh dimension that a folding axis leaves of the axes it folds
    return f"{axis}_rest"


def _beside(meshes: list[DeviceMesh]) -> DeviceMesh:
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)
