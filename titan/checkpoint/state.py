"""What a checkpoint holds, by canonical name: tensors for DCP, everything else for JSON.

Names of tensors: `model.NAME`, `optimizer.NAME.SLOT`, `rest.PATH`. NAME is a parameter's or persistent buffer's name in
the whole model, so neither stages nor shards show in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from titan.checkpoint.disk.index import MODEL, OPTIMIZER, REST
from titan.contracts.base.mesh import Mesh
from titan.contracts.technique import Alike, Own, PerRank
from titan.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from titan.contracts import ModelPart

T = TypeVar("T")

TECHNIQUES = "techniques"
"""The table of the rest that holds techniques' state."""
TENSOR, _OWN = "$tensor", "$own"


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at one step.

    tensors: what is saved, for shape and placement.  local: this rank's own values of each (a DTensor's shard; of one
        that is stacked, [1, ...]).
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
    """One of the holders of each name: the one that is saved, and read into."""
    return {name: held[0] for name, held in holders.items()}


def trained(
    parts: Iterable[ModelPart], optimizer: torch.optim.Optimizer
) -> dict[str, list[tuple[Tensor, dict[str, Any]]]]:
    """Canonical name -> (parameter, its param group) of what the optimizer updates, of each part that holds it."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    holders: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {}
    for part in parts:
        for name, parameter in part.parameters():
            if id(parameter) in groups:
                holders.setdefault(name, []).append((parameter, groups[id(parameter)]))
    return holders


def optimizer_state(
    parts: Iterable[ModelPart], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, int | float | bool | str | None]]:
    """(`optimizer.NAME.SLOT` -> tensor, `NAME.SLOT` -> number) of all parameters that have state.

    Raises:
        PluginError: something in it is neither tensor nor number, or a plain tensor where each rank has a shard.
    """
    tensors, values = {}, {}
    for name, (parameter, _) in firsts(trained(parts, optimizer)).items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                _check_kind(optimizer, name, parameter, slot, value)
                tensors[f"{OPTIMIZER}{name}.{slot}"] = value.detach()
            elif value is None or isinstance(value, (bool, int, float, str)):
                values[f"{name}.{slot}"] = value
            else:
                raise PluginError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of {name}: "
                    "only tensors and numbers can be saved"
                )
    return tensors, values


def _check_kind(optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, slot: str, value: Tensor) -> None:
    """A plain tensor is taken for one that all ranks hold alike, and what has the parameter's shape is loaded as it."""
    if not hasattr(parameter, "to_local") or hasattr(value, "to_local") or not value.ndim:
        return
    shard = parameter.to_local().shape
    if value.shape in (shard, parameter.shape):
        raise PluginError(
            f"{type(optimizer).__name__} keeps {slot!r} of {name} as a plain tensor {list(value.shape)}, but the "
            f"parameter {list(parameter.shape)} is a DTensor, of which this rank holds {list(shard)}: a "
            "checkpoint keeps one rank's plain state; make it with torch.zeros_like(parameter)"
        )


def separate(value: Any, rank: int, path: str = REST[:-1]) -> tuple[Any, dict[str, Tensor]]:
    """A nested state as a JSON value of its own, and the tensors that stood in it by where they stood.

    Raises:
        PluginError: something in it is neither tensor nor JSON; names its place.
    """
    if isinstance(value, Tensor):
        return {TENSOR: path}, {path: value.detach()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value, {}
    if isinstance(value, Own):
        return {_OWN: path, "keys": list(value)}, {f"{path}.{rank}.{key}": tensor for key, tensor in value.items()}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        if wrong:
            raise PluginError(f"state at {path} has the key {wrong[0]!r}: keys must be strings without $")
        below = {key: separate(item, rank, f"{path}.{key}") for key, item in value.items()}
        return {key: plain for key, (plain, _) in below.items()}, _united(tensors for _, tensors in below.values())
    if isinstance(value, (list, tuple)):
        items = [separate(item, rank, f"{path}.{index}") for index, item in enumerate(value)]
        return [plain for plain, _ in items], _united(tensors for _, tensors in items)
    raise PluginError(f"state at {path} is a {type(value).__name__}: must be a tensor, number, string, list or table")


def _united(found: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    united: dict[str, Tensor] = {}
    for tensors in found:
        twice = united.keys() & tensors.keys()
        if twice:
            raise PluginError(f"two tensors of the state have the path {min(twice)}; keys must not contain dots")
        united |= tensors
    return united


def rejoin(value: Any, rank: int | None, tensor: Callable[[str], Tensor], where: object, path: str = REST[:-1]) -> Any:
    """The inverse of `separate`; tuples come back as lists.

    rank: whose `Own` tensors to take; None leaves those tables empty.  tensor: the one of a name.
    where: the file, for messages.

    Raises:
        CheckpointError: a tensor is said to stand elsewhere than where it belongs, where it could pass for another.
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
    strange = [key for key in value if key.startswith("$")]
    if strange:
        raise CheckpointError(f"{where} has the key {strange[0][:200]!r} at {path}, which no save writes")
    return {key: rejoin(item, rank, tensor, where, f"{path}.{key}") for key, item in value.items()}


def rng_state(device: torch.device) -> Own:
    """Device type -> state [bytes] uint8 of its default generator: the CPU's, and `device`'s if it is another."""
    states = Own(cpu=torch.get_rng_state())
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Take back what `rng_state` gave, for the devices that are here.

    Raises:
        CheckpointError: it is the state of no generator of this PyTorch.
    """
    try:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"the random number generator state of the checkpoint cannot be restored: {error}"
        ) from error


class Place(NamedTuple):
    """Where a rank is among those that each have a tensor of their own, and what a load at another number gives them.

    axis: along which they are.  join: see `PerRank`.
    """

    axis: str
    rank: int
    ranks: int
    join: Literal["mean", "sum"]


class Stacked(NamedTuple):
    """A tensor [ranks, ...], seen from a rank that has one of these. own: that one, plain or a DTensor."""

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

    With an axis whose ranks have weights of their own: weights, optimizer state, and what techniques do not say is
    alike. On any mesh, what techniques say is each rank's.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh

    def places(self, names: Iterable[str], techniques: Mapping[str, Any]) -> dict[str, Place]:
        """Name -> this rank's place, of those tensors that ranks have each of their own.

        techniques: their state, by name.
        """
        if self._mesh is None:
            return {}
        said = dict(_said(techniques, f"{REST}{TECHNIQUES}"))
        found = {name: self._place_of(name, said.get(name), self._mesh) for name in names}
        return {name: place for name, place in found.items() if place is not None}

    def check(self, techniques: Mapping[str, Any]) -> None:
        """Hold what techniques say against the mesh.

        Raises:
            PluginError: ranks have state of their own along an axis, and workers weights of their own.
        """
        self.places((name for name, _ in _said(techniques, f"{REST}{TECHNIQUES}")), techniques)

    def _place_of(self, name: str, said: PerRank | Alike | None, mesh: Mesh) -> Place | None:
        workers = mesh.layout.worker_axis
        if isinstance(said, PerRank):
            if workers and mesh.layout.degree(said.axis) > 1 and said.axis != workers:
                at = f"mesh.{said.axis} = {mesh.layout.degree(said.axis)}"
                what = f"mesh.{workers} = {mesh.layout.workers} gives ranks weights of their own; set one of them to 1"
                raise PluginError(f"{name.removeprefix(REST)} is each rank's own along {at}, and {what}")
            if not workers:
                return Place(said.axis, mesh.at(said.axis), mesh.layout.degree(said.axis), said.join)
            if said.axis == workers:
                return Place(workers, mesh.worker, mesh.workers, said.join)
        if workers and not isinstance(said, Alike) and name.startswith((MODEL, OPTIMIZER, f"{REST}{TECHNIQUES}.")):
            return Place(workers, mesh.worker, mesh.workers, "mean")
        return None

    def numbered(self, name: str, workers: int | None = None) -> str:
        """Under which name this rank's worker saves a number of the optimizer's state; by itself without workers.

        workers: that have saved it; the first one's, where they are not as many as there are now.
        """
        now = 1 if self._mesh is None else self._mesh.workers
        place = self._mesh.worker if self._mesh and workers in (None, now) else 0
        return f"{place}.{name}" if (now if workers is None else workers) > 1 else name


def _said(state: Any, path: str) -> Iterator[tuple[str, PerRank | Alike]]:
    """Name of a tensor -> the table that says of whom it is."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, PerRank | Alike):
            yield from ((f"{path}.{key}.{name}", value) for name in value)
        else:
            yield from _said(value, f"{path}.{key}")


def collect(
    parts: Sequence[ModelPart], optimizer: torch.optim.Optimizer, rest: Any, rank: int, stacks: Stacks | None = None
) -> Snapshot:
    """This rank's state as it is now; nothing is copied, so it holds only until training goes on."""
    tensors = firsts(model_tensors(parts))  # first: it may put back what the optimizer's state is found by
    slots, values = optimizer_state(parts, optimizer)
    plain, others = separate(rest, rank)
    tensors |= slots | others
    stacks = stacks or Stacks(None)
    places = stacks.places(tensors, rest.get(TECHNIQUES, {}))
    stacked = {name: place for name, place in places.items() if place.ranks > 1}
    local = {name: _local(tensor)[None] if name in stacked else _local(tensor) for name, tensor in tensors.items()}
    values = {stacks.numbered(name): value for name, value in values.items()}
    united = tensors | {name: Stacked(tensors[name], place.rank, place.ranks) for name, place in stacked.items()}
    return Snapshot(united, local, values, type(optimizer).__name__, plain)


def _local(tensor: Tensor) -> Tensor:
    """This rank's own values, as a plain tensor: another type would need its package wherever they are read."""
    # A DTensor is told by its shard: importing its class takes half a second that a run on one device need not spend.
    values: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(values) is Tensor:
        return values
    plain = torch.empty(values.shape, dtype=values.dtype)  # on the host: it may be larger than what is kept
    plain.copy_(values)
    return plain


class Aside:
    """Copies from a GPU to host memory beside what it computes next, where its memory has room for a clone.

    device: the GPU.  module: `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module, self._stream = device, module, module.Stream(device)
        self._cloned = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Begin to copy (to, from) pairs as they are now; training may then go on. Returns what waits for the copies.

        Without memory for a clone, it returns when the copies are done.
        """
        computing, size = self._module.current_stream(self._device), sum(source.nbytes for _, source in pairs)
        fits = size <= CLONE_SHARE * self._available()
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
        """Bytes of memory that PyTorch has not even cached, as the next step needs again what it has; but for the last
        clone's, which is cached since."""
        cached: int = self._module.memory_reserved(self._device) - self._module.memory_allocated(self._device)
        free: int = self._module.mem_get_info(self._device)[0]
        return free + min(self._cloned, cached)


CLONE_SHARE = 0.8
"""Share of the available memory that a clone may take; the rest is for a validation, or groups that first send now."""


@dataclass
class Staging:
    """Host memory that snapshots are copied into; kept from save to save, because page-locked memory is slow to get."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    _aside: Aside | None = None

    def copy(self, snapshot: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        """The snapshot with values of its own in host memory, which training no longer changes.

        They are there when the second has been called, from any thread.
        """
        self.buffers = {name: self._buffer(name, tensor) for name, tensor in snapshot.local.items()}
        copied = replace(snapshot, local=self.buffers)
        on_device = [(self.buffers[name], tensor) for name, tensor in snapshot.local.items() if tensor.is_cuda]
        for name, tensor in snapshot.local.items():
            if not tensor.is_cuda:
                self.buffers[name].copy_(tensor)
        if not on_device:
            return copied, lambda: None
        self._aside = self._aside or Aside(on_device[0][1].device, torch.cuda)
        return copied, self._aside.copy(on_device)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        kept = self.buffers.get(name)
        if kept is not None and kept.shape == like.shape and kept.dtype == like.dtype:
            return kept
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
