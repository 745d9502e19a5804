"""What a checkpoint holds, by canonical name: tensors for safetensors files, everything else for JSON.

Names of tensors: `model.NAME`, `optimizer.NAME.SLOT`, `rest.PATH`. NAME is a parameter's or persistent buffer's name in
the whole model, so neither stages nor shards show in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan.checkpoint.disk.index import MODEL, OPTIMIZER, PREFIX, REST
from titan.checkpoint.disk.manifest import TECHNIQUES
from titan.checkpoint.disk.plain import shown
from titan.contracts import Alike, Mesh, ModelPart, Own, PerRank, shard_of
from titan.errors import CheckpointError, PluginError

T = TypeVar("T")
Trained = tuple[Tensor, dict[str, Any]]

TENSOR, _OWN = "$tensor", "$own"


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at one step.

    tensors: what is saved, for shape and placement.  local: this rank's values (a shard; of a stacked one [1, ...]).
    values: `NAME.SLOT` -> number, the part of the optimizer's state that is no tensor; of workers `WORKER.NAME.SLOT`.
    optimizer: its class, None without its state.  rest: the other state as JSON, tensors replaced by where they stand.
    """

    tensors: Mapping[str, Tensor | Stacked]
    local: Mapping[str, Tensor]
    values: Mapping[str, Any]
    optimizer: str | None
    rest: Any


def model_tensors(parts: Iterable[ModelPart]) -> dict[str, list[Tensor]]:
    """`model.NAME` -> parameter or persistent buffer, detached but not copied, of each part that holds one.

    Two parts of a rank hold what ties the first stage to the last: one tensor in the whole model, in two copies.
    """
    holders: dict[str, list[Tensor]] = {}
    for part in parts:
        # Before any parameter is asked for: FSDP puts its sharded parameters back when a state dict is taken. After
        # validation, where no backward follows the forward, the module still holds the gathered ones.
        persistent = part.module.state_dict().keys()
        tensors = {name: parameter.detach() for name, parameter in part.parameters()}
        tensors |= {name: buffer for name, buffer in part.module.named_buffers() if name in persistent}
        for name, tensor in tensors.items():
            holders.setdefault(MODEL + name, []).append(tensor)
    return holders


def firsts(holders: Mapping[str, Sequence[T]]) -> dict[str, T]:
    """The holder of each name that is saved, and read into."""
    return {name: held[0] for name, held in holders.items()}


def trained(parts: Iterable[ModelPart], optimizer: Optimizer) -> dict[str, list[Trained]]:
    """Canonical name -> (parameter, its param group) of what the optimizer updates, of each part that holds it."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    holders: dict[str, list[Trained]] = {}
    for part in parts:
        for name, parameter in part.parameters():
            if id(parameter) in groups:
                holders.setdefault(name, []).append((parameter, groups[id(parameter)]))
    return holders


def optimizer_state(parts: Iterable[ModelPart], optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(`optimizer.NAME.SLOT` -> tensor, `NAME.SLOT` -> number) of all parameters that have state.

    A PluginError where it holds neither tensor nor number, or a plain tensor where each rank has a shard.
    """
    tensors, values = {}, {}
    kind = type(optimizer).__name__
    for name, (parameter, _) in firsts(trained(parts, optimizer)).items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                # A plain one is taken for one that all ranks hold alike; of the parameter's shape, it is loaded as it.
                shard = shard_of(parameter).shape
                is_plain = hasattr(parameter, "to_local") and not hasattr(value, "to_local")
                if is_plain and value.ndim and value.shape in (shard, parameter.shape):
                    raise PluginError(
                        f"{kind} keeps {slot!r} of {name} as a plain tensor {list(value.shape)}, but the parameter "
                        f"{list(parameter.shape)} is a DTensor, of which this rank holds {list(shard)}: a "
                        "checkpoint keeps one rank's plain state; make it with torch.zeros_like(parameter)"
                    )
                tensors[f"{OPTIMIZER}{name}.{slot}"] = value.detach()
            elif value is None or isinstance(value, (bool, int, float, str)):
                values[f"{name}.{slot}"] = value
            else:
                told = f"{kind} keeps a {type(value).__name__} as {slot!r} of {name}"
                raise PluginError(f"{told}: only tensors and numbers can be saved")
    return tensors, values


def separate(value: Any, rank: int, path: str = REST[:-1]) -> tuple[Any, dict[str, Tensor]]:
    """A nested state as a JSON value of its own, and its tensors by where they stood; a PluginError for all else."""
    tensors: dict[str, Tensor] = {}

    def keep(path: str, tensor: Tensor) -> None:
        if path in tensors:
            raise PluginError(f"two tensors of the state have the path {path}; keys must not contain dots")
        tensors[path] = tensor.detach()

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Own):
            for key, tensor in value.items():
                keep(f"{path}.{rank}.{key}", tensor)
            return {_OWN: path, "keys": list(value)}
        if isinstance(value, Tensor):
            keep(path, value)
            return {TENSOR: path}
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str) or key.startswith("$")]:
                raise PluginError(f"state at {path} has the key {wrong[0]!r}: keys must be strings without $")
            return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, f"{path}.{index}") for index, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        kind = type(value).__name__
        raise PluginError(f"state at {path} is a {kind}: must be a tensor, number, string, list or table")

    return plain(value, path), tensors


def rejoin(value: Any, rank: int | None, tensor: Callable[[str], Tensor], where: object, path: str = REST[:-1]) -> Any:
    """The inverse of `separate`; tuples come back as lists.

    rank: whose `Own` tensors to take; None leaves those tables empty.  tensor: the one of a name.  where: the file.
    Raises CheckpointError: a tensor is said to stand elsewhere than where it belongs, where it could pass for another.
    """
    if isinstance(value, list):
        return [rejoin(item, rank, tensor, where, f"{path}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value == {TENSOR: path}:
        return tensor(path)
    keys = value.get("keys")
    if value == {_OWN: path, "keys": keys} and isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        return {} if rank is None else {key: tensor(f"{path}.{rank}.{key}") for key in keys}
    if strange := [key for key in value if key.startswith("$")]:
        raise CheckpointError(f"{where} has the key {strange[0][:200]!r} at {shown(path)}, which no save writes")
    return {key: rejoin(item, rank, tensor, where, f"{path}.{key}") for key, item in value.items()}


def rng_state(device: torch.device) -> Own:
    """Device type -> state [bytes] uint8 of its default generator: the CPU's, and `device`'s if it is another."""
    states = Own(cpu=torch.get_rng_state())
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Take back what `rng_state` gave, for the devices here; raises a CheckpointError where it fits no generator."""
    try:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except (RuntimeError, TypeError) as error:
        what = "the random number generator state of the checkpoint"
        raise CheckpointError(f"{what} cannot be restored: {error}") from error


class Place(NamedTuple):
    """Where a rank is along the axis whose ranks each have a tensor of their own.  join: see `PerRank`."""

    axis: str
    rank: int
    ranks: int
    join: Literal["mean", "sum"]


class Stacked(NamedTuple):
    """A tensor [ranks, ...], whose shape and dtype it has, of which this rank has `own`, plain or a DTensor."""

    own: Tensor
    rank: int
    ranks: int

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return torch.Size((self.ranks, *self.own.shape))

    @property
    def dtype(self) -> torch.dtype:
        """Of all of them."""
        return self.own.dtype


class Stacks:
    """Which tensors each rank along an axis has of its own; a checkpoint has them as one, [ranks, ...].

    These are what techniques declare; with workers also weights, optimizer state, and what they do not declare alike.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh

    def places(self, names: Iterable[str], techniques: Mapping[str, Any]) -> dict[str, Place]:
        """Name -> this rank's place, of those tensors that ranks have each of their own. techniques: state by name."""
        if self._mesh is None:
            return {}
        declared = dict(_declared(techniques, PREFIX))
        places = {name: self._place(name, declared.get(name), self._mesh) for name in names}
        return {name: place for name, place in places.items() if place is not None}

    def check(self, techniques: Mapping[str, Any]) -> None:
        """Raise a PluginError where ranks have state of their own along an axis, and workers weights of their own."""
        self.places((name for name, _ in _declared(techniques, PREFIX)), techniques)

    def _place(self, name: str, declared: PerRank | Alike | None, mesh: Mesh) -> Place | None:
        workers = mesh.layout.worker_axis
        join: Literal["mean", "sum"] = "mean"
        if isinstance(declared, PerRank):
            axis, degree = declared.axis, mesh.layout.degree(declared.axis)
            if not workers:
                return Place(axis, mesh.at(axis), degree, declared.join)
            if degree > 1 and axis != workers:
                what = f"mesh.{workers} = {mesh.layout.workers} gives ranks weights of their own; set one of them to 1"
                at = f"mesh.{axis} = {degree}"
                raise PluginError(f"{name.removeprefix(REST)} is each rank's own along {at}, and {what}")
            join = declared.join if axis == workers else join
        if workers and not isinstance(declared, Alike) and name.startswith((MODEL, OPTIMIZER, f"{PREFIX}.")):
            return Place(workers, mesh.worker, mesh.workers, join)
        return None

    def numbered(self, name: str, workers: int | None = None) -> str:
        """Under which name this rank's worker saves a number of the optimizer's state; by itself without workers.

        workers: that have saved it; the first one's, where they are not as many as there are now.
        """
        now, worker = (1, 0) if self._mesh is None else (self._mesh.workers, self._mesh.worker)
        workers = now if workers is None else workers
        return f"{worker if workers == now else 0}.{name}" if workers > 1 else name


def _declared(state: Any, path: str) -> Iterator[tuple[str, PerRank | Alike]]:
    """(name of a tensor, the table that says of whom it is)."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, PerRank | Alike):
            yield from ((f"{path}.{key}.{name}", value) for name in value)
        else:
            yield from _declared(value, f"{path}.{key}")


def collect(parts: Sequence[ModelPart], optimizer: Optimizer, rest: Any, rank: int, stacks: Stacks) -> Snapshot:
    """This rank's state as it is now; nothing is copied, so it holds only until training goes on."""
    tensors = firsts(model_tensors(parts))  # first: it may put back what the optimizer's state is found by
    slots, values = optimizer_state(parts, optimizer)
    plain, others = separate(rest, rank)
    tensors |= slots | others
    local = {name: _plain_part(tensor) for name, tensor in tensors.items()}
    whole: dict[str, Tensor | Stacked] = {**tensors}
    for name, place in stacks.places(tensors, rest.get(TECHNIQUES, {})).items():
        if place.ranks > 1:
            local[name], whole[name] = local[name][None], Stacked(tensors[name], place.rank, place.ranks)
    values = {stacks.numbered(name): value for name, value in values.items()}
    return Snapshot(whole, local, values, type(optimizer).__name__, plain)


def _plain_part(tensor: Tensor) -> Tensor:
    values = shard_of(tensor)
    if type(values) is Tensor:
        return values
    # Another type would need its package wherever the values are read. On the host: it may be larger than what is kept.
    return torch.empty(values.shape, dtype=values.dtype).copy_(values)


class Aside:
    """Copies from a GPU to host memory beside what it computes next, where its memory has room for a clone."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module, self._stream = device, module, module.Stream(device)
        self._cloned = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy (to, from) pairs as they are now; returns what waits for it, where there is memory for a clone."""
        computing, size = self._module.current_stream(self._device), sum(source.nbytes for _, source in pairs)
        # The rest of the memory is for a validation, or groups that first send now.
        fits = size <= 0.8 * self._available()
        self._cloned = size if fits else 0
        clones = [(to, source.clone() if fits else source) for to, source in pairs]
        self._stream.wait_stream(computing)
        with self._module.stream(self._stream):
            for to, source in clones:
                to.copy_(source, non_blocking=True)

        def finish() -> None:
            self._stream.synchronize()
            clones.clear()  # not before: the computing stream may then write to their memory

        if not fits:
            finish()
        return finish

    def _available(self) -> float:
        """Bytes that PyTorch has not even cached, as the next step needs those again; and the last clone's, cached."""
        cached: int = self._module.memory_reserved(self._device) - self._module.memory_allocated(self._device)
        free: int = self._module.mem_get_info(self._device)[0]
        return free + min(self._cloned, cached)


class Staging:
    """Host memory that snapshots are copied into; kept from save to save, because page-locked memory is slow to get."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._aside: Aside | None = None

    def copy(self, snapshot: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        """(the snapshot with values of its own in host memory, what waits for them to be there, from any thread)."""
        former, self.buffers = self.buffers, {}
        for name, tensor in snapshot.local.items():
            kept = former.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.buffers[name] = kept if tensor.is_cuda else kept.copy_(tensor)
        copied = replace(snapshot, local=self.buffers)
        on_device = [(self.buffers[name], tensor) for name, tensor in snapshot.local.items() if tensor.is_cuda]
        if not on_device:
            return copied, lambda: None
        self._aside = self._aside or Aside(on_device[0][1].device, torch.cuda)
        return copied, self._aside.copy(on_device)
