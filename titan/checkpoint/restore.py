"""Reads a checkpoint into a model and an optimizer. Strict: missing or extra tensors and other shapes are refused.

Imported at first use, as DTensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint import storage
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import index as indexes
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.index import MODEL, OPTIMIZER, REST, Index, StoredTensor
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import TECHNIQUES, Place, Stacks, firsts, model_tensors, rejoin, trained
from titan.checkpoint.techniques import tensors_in, without
from titan.errors import CheckpointError
from titan.log import log

if TYPE_CHECKING:
    from titan.contracts import ModelPart

_SHOWN = 10
_NOWHERE = Place("", 0, 0, "mean")
_ALL_ALIKE = Place("workers", 0, 1, "mean")
_TOGETHER = 1 << 27
"""Numbers that are read of one rank after the other and added up, in float64: a file is opened once for all of them."""

WEIGHTS = "weights"
"""The table in a technique's state with weights that may be used in place of the trained ones."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files are those that were written, and what it says: its state.json and its index."""

    path: Path
    state: Mapping[str, Any]
    index: Index

    @classmethod
    def open(cls, path: Path, ranks: Ranks) -> Saved:
        """Verify every file against the manifest, each rank a share of them; rank 0 reads what the checkpoint says.

        Raises:
            CheckpointError: it is damaged, cannot be read, or is of a format this version does not know; on all ranks.
        """
        entries = ranks.first(lambda: folders.check_sizes(path))
        mine = manifest.share(entries, ranks.rank, ranks.size)
        faults = ranks.gather(ranks.each(lambda: manifest.wrong_hashes(path, entries, mine)))
        found = [fault for some in faults for fault in some]
        if found:
            raise CheckpointError(f"{path} is damaged: {'; '.join(found)}")
        others = ranks.first(lambda: manifest.unlisted(path, entries))
        if others and ranks.rank == 0:
            log.warning(f"{path} also holds {listed(others)}: not part of the checkpoint, ignored")
        state = ranks.first(lambda: folders.read_state(path))
        sizes = manifest.data_sizes(entries)
        return cls(path, state, ranks.first(lambda: indexes.read(path / manifest.INDEX, sizes)))

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> shape, dtype and cuts of each tensor in the checkpoint; of a stacked one, those of one rank's."""
        return {name: one.of(0) if one.stacked else one for name, one in self.index.tensors.items()}

    def with_weights_of(self, technique: str) -> Saved:
        """The same with the weights that a technique keeps in place of those that were trained; "": itself.

        Raises:
            CheckpointError: the technique keeps none; names those that do.
        """
        if not technique:
            return self
        kept: dict[str, dict[str, StoredTensor]] = {}
        for name, entry in self.index.tensors.items():
            owner, _, parameter = name.removeprefix(f"{REST}{TECHNIQUES}.").partition(f".{WEIGHTS}.")
            if name.startswith(f"{REST}{TECHNIQUES}.") and parameter and "." not in owner:
                kept.setdefault(owner, {})[MODEL + parameter] = entry
        if technique not in kept:
            whose = f"those of {', '.join(sorted(kept))}" if kept else "none but those that were trained"
            raise CheckpointError(f"{self.path} has no weights of {technique!r}; it has {whose}")
        trained = {name for name in self.tensors if name.startswith(MODEL)} - kept[technique].keys()
        if trained:
            names = listed(name.removeprefix(MODEL) for name in trained)
            log.info(f"weights of {technique}: it keeps none of {names}, which are as they were trained")
        return replace(self, index=replace(self.index, tensors={**self.index.tensors, **kept[technique]}))

    def read(self, into: Mapping[str, Tensor], ranks: Ranks, places: Mapping[str, Place] | None = None) -> None:
        """Fill tensors in place, all ranks together; each reads its shards.

        Of tensors that ranks had each of their own, this rank gets its own where as many ranks have one now, and else
        their mean, or its share of their sum.
        places: by name, of those that this rank is to have of its own.

        Raises:
            CheckpointError: one cannot be read, on some rank.
        """
        ranks.each(lambda: self._read(into, places or {}))

    def _read(self, into: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        stored, joined = dict(self.index.tensors), dict[str, tuple[int, Place]]()
        for name in (name for name, tensor in into.items() if tensor.numel()):
            saved, place = stored[name].shape[0] if stored[name].stacked else 1, places.get(name, _NOWHERE)
            if stored[name].stacked and saved == place.ranks:
                stored[name] = stored[name].of(place.rank)
            elif stored[name].stacked or (place.join == "sum" and place.ranks > 1):
                joined[name] = saved, place
        whole = {name: tensor for name, tensor in into.items() if name not in joined}
        storage.read(self.path, whole, replace(self.index, tensors=stored))
        for saved, names in _alike({name: (before, into[name]) for name, (before, _) in joined.items()}):
            parts = [saved if joined[name][1].join == "mean" else joined[name][1].ranks for name in names]
            self._read_joined({name: into[name] for name in names}, saved, parts)

    def _read_joined(self, into: Mapping[str, Tensor], saved: int, parts: Sequence[int]) -> None:
        """Fill tensors with the sum over those that `saved` ranks had, divided by `parts`; of integers, the first."""
        ones = {name: torch.empty_like(tensor) for name, tensor in into.items()}
        totals = [torch.zeros_like(_values(tensor), dtype=torch.float64) for tensor in into.values()]
        for rank in range(saved):
            stored = {name: self.index.tensors[name] for name in into}
            stored = {name: entry.of(rank) if entry.stacked else entry for name, entry in stored.items()}
            storage.read(self.path, ones, replace(self.index, tensors=stored))
            for total, one in zip(totals, ones.values(), strict=True):
                total += _values(one) if one.is_floating_point() or not rank else 0
        for tensor, total, part in zip(into.values(), totals, parts, strict=True):
            _values(tensor).copy_(total / part if tensor.is_floating_point() else total)

    def empty(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A plain tensor to read one of its tensors into.

        Raises:
            CheckpointError: there is none of that name.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path} is damaged: {manifest.STATE} names {name}, which is not in the checkpoint"
            )
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _alike(joined: Mapping[str, tuple[int, Tensor]]) -> Iterator[tuple[int, list[str]]]:
    """(ranks that saved one each, names of tensors) in groups of at most `_TOGETHER` numbers, or of one tensor."""
    for saved in sorted({saved for saved, _ in joined.values()}):
        group: list[str] = []
        numbers = 0
        for name, (before, tensor) in joined.items():
            if before == saved:
                if group and numbers + _values(tensor).numel() > _TOGETHER:
                    yield saved, group
                    group, numbers = [], 0
                group, numbers = [*group, name], numbers + _values(tensor).numel()
        yield saved, group


def _values(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load(
    saved: Saved, parts: Sequence[ModelPart], optimizer: torch.optim.Optimizer, ranks: Ranks,
    states: Mapping[str, Any] | None = None, stacks: Stacks | None = None, changed: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Fill the parts' tensors and the optimizer's state from a checkpoint; returns the rest of the state.

    states, changed: see `Checkpointer.load`.  stacks: of this run's mesh.

    Raises:
        CheckpointError: it cannot be read or does not fit.
    """
    holders, updated = model_tensors(parts), trained(parts, optimizer)
    weights = firsts(holders)
    check_weights(saved, weights, ranks)
    ranks.each(lambda: _check_optimizer(saved, optimizer, changed))
    slots = _empty_slots(saved, firsts(updated), getattr(optimizer, "state_like", torch.empty_like))
    rest, others = _rest(saved, states, ranks)
    into = weights | others
    into |= {f"{OPTIMIZER}{name}.{slot}": value for name, one in slots.items() for slot, value in one.items()}
    places = stacks.places(into, states or {}) if stacks else {}
    _tell_joined(saved, into, places)
    saved.read(into, ranks, places)
    _copy_to_others(holders)
    _give(optimizer, updated, slots, _numbers(saved, stacks or Stacks(None)))
    if not any(name.startswith(OPTIMIZER) for name in saved.tensors):
        log.info(f"optimizer: {saved.path} holds no optimizer state; the optimizer starts from zero")
    return rest


def _numbers(saved: Saved, stacks: Stacks) -> dict[str, Any]:
    """`NAME.SLOT` -> number of the optimizer's state for this rank."""
    workers = max((one.shape[0] for name, one in saved.index.tensors.items() if _of_worker(name, one)), default=1)
    values = saved.state["values"]
    if workers == 1:
        return dict(values)
    mine = stacks.numbered("", workers)
    return {name.removeprefix(mine): value for name, value in values.items() if name.startswith(mine)}


def _of_worker(name: str, stored: StoredTensor) -> bool:
    return name.startswith(MODEL) and stored.stacked


def _tell_joined(saved: Saved, into: Iterable[str], places: Mapping[str, Place]) -> None:
    """Say once of each axis that its ranks' own tensors become those of more or fewer ranks.

    into: names of what is loaded.
    """
    changes = set()
    for name in into:
        before = saved.index.tensors[name].shape[0] if saved.index.tensors[name].stacked else 1
        place = places.get(name, _ALL_ALIKE)
        changes |= {(before, place.ranks, place.axis, place.join)} if before != place.ranks else set()
    for before, now, axis, join in sorted(changes):
        what = {"mean": "their mean goes to each", "sum": "their sum is shared among"}[join]
        ranks = "1 rank" if before == 1 else f"{before} ranks"
        log.info(f"{axis}: {ranks} had tensors of their own; {what} of {now}")


def _rest(saved: Saved, states: Mapping[str, Any] | None, ranks: Ranks) -> tuple[Any, dict[str, Tensor]]:
    """The rest of the state for this rank, and by name the tensors in it, which are still to be read into."""
    mine = ranks.each(lambda: tensors_in(states or {}, ranks.rank))
    elsewhere = {name for names in ranks.gather(list(mine)) for name in names} - mine.keys()
    plain = saved.state["rest"]
    if states is not None and TECHNIQUES in plain:
        theirs = {name: state for name, state in plain[TECHNIQUES].items() if name in states}
        plain = {**plain, TECHNIQUES: without(theirs, elsewhere)}
    own = ranks.rank if saved.state.get("world_size") == ranks.size else None
    tensors: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        return tensors.setdefault(name, _allocated(saved, name, mine.get(name)))

    return ranks.each(lambda: rejoin(plain, own, tensor, saved.path / manifest.STATE)), tensors


def _allocated(saved: Saved, name: str, like: Tensor | None) -> Tensor:
    """A tensor to read one of the rest into: sharded as a technique's is now, or else whole and on the CPU."""
    if not isinstance(like, DTensor):
        return saved.empty(name)
    stored = saved.empty(name, "meta")
    if stored.shape != like.shape:
        shapes = f"{list(stored.shape)} there, {list(like.shape)} here"
        raise CheckpointError(f"checkpoint {saved.path} does not fit: {name} ({shapes})")
    return torch.empty_like(like.detach(), dtype=stored.dtype)


def load_weights(path: Path, parts: Sequence[ModelPart], ranks: Ranks, technique: str = "") -> None:
    """Fill the parts' tensors alone from a checkpoint, with the weights that a technique keeps, if one is named.

    Raises:
        CheckpointError: it cannot be read or does not fit.
    """
    saved = Saved.open(path, ranks).with_weights_of(technique)
    holders = model_tensors(parts)
    weights = firsts(holders)
    check_weights(saved, weights, ranks)
    saved.read(weights, ranks)
    _copy_to_others(holders)


def _copy_to_others(holders: Mapping[str, Sequence[Tensor]]) -> None:
    """Give what was read into the first holder of each name to the others of this rank."""
    for first, *others in holders.values():
        for other in others:
            other.copy_(first)


def check_weights(saved: Saved, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Hold the model against the checkpoint, both ways, over all ranks; of `weights` only the shapes count.

    Raises:
        CheckpointError: a tensor is absent, left over or of another shape.
    """
    there = {name: entry.shape for name, entry in saved.tensors.items() if name.startswith(MODEL)}
    absent = [name for name in weights if name not in there]
    unlike = [
        f"{name.removeprefix(MODEL)} ({list(there[name])} there, {list(tensor.shape)} here)"
        for name, tensor in weights.items()
        if name in there and there[name] != tensor.shape
    ]
    everyone = ranks.gather_first((absent, unlike, list(weights)))
    told = ranks.first(lambda: _misfits(there, everyone))
    if told:
        raise CheckpointError(f"checkpoint {saved.path} does not fit the model: {'; '.join(told)}")


def _misfits(there: Mapping[str, object], found: Sequence[tuple[list[str], list[str], list[str]]]) -> list[str]:
    """What to tell, from (absent, of another shape, wanted) of each rank; nothing where the model fits."""
    wanted = {name for *_, names in found for name in names}
    faults = {
        "it lacks": {name.removeprefix(MODEL) for names, *_ in found for name in names},
        "the model lacks": {name.removeprefix(MODEL) for name in there.keys() - wanted},
        "shapes differ in": {text for _, texts, _ in found for text in texts},
    }
    return [f"{what} {listed(names)}" for what, names in faults.items() if names]


def listed(names: Iterable[str]) -> str:
    """Names in order, the first ten of them and how many more."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_optimizer(saved: Saved, optimizer: torch.optim.Optimizer, changed: Sequence[str]) -> None:
    before, now = saved.state.get("optimizer"), type(optimizer).__name__
    if before is not None and before != now:
        why = f" ({'; '.join(changed)})" if changed else ""
        raise CheckpointError(
            f"checkpoint {saved.path} holds optimizer state of {before}, but this run's optimizer is {now}{why}; "
            "restore the old values, or start another run with checkpoint.init_from to keep the weights alone"
        )


def _empty_slots(
    saved: Saved,
    updated: Mapping[str, tuple[Tensor, dict[str, Any]]],
    make: Callable[..., Tensor],
) -> dict[str, dict[str, Any]]:
    """Parameter -> slot -> tensor to read into, for all optimizer state the checkpoint has of these parameters.

    make: as `torch.empty_like`.

    Made from the checkpoint alone: an optimizer step on zero gradients would make it too, and count as a step. State in
    the dtype that the weights had there gets the one that they have here, as an optimizer makes it.
    """
    slots: dict[str, dict[str, Any]] = {}
    for name, entry in saved.tensors.items():
        parameter, _, slot = name.removeprefix(OPTIMIZER).rpartition(".")
        if name.startswith(OPTIMIZER) and parameter in updated:
            like, group = updated[parameter]
            if entry.shape == like.shape and slot != "step":
                as_weight = entry.dtype == saved.tensors[MODEL + parameter].dtype
                value = make(like.detach(), dtype=like.dtype if as_weight else entry.dtype)
            else:
                # torch.optim keeps counts in host memory, except where its kernel reads them on the device.
                near = bool(entry.shape) or group.get("fused") or group.get("capturable")
                value = saved.empty(name, like.device if near else "cpu")
            slots.setdefault(parameter, {})[slot] = value
    return slots


def _give(
    optimizer: torch.optim.Optimizer,
    updated: Mapping[str, Sequence[tuple[Tensor, dict[str, Any]]]],
    slots: dict[str, dict[str, Any]],
    values: Mapping[str, Any],
) -> None:
    """Hand state to the optimizer, to each holder of a parameter its own."""
    for name, value in values.items():
        parameter, _, slot = name.rpartition(".")
        if parameter in updated:
            slots.setdefault(parameter, {})[slot] = value
    for parameter, one in slots.items():
        (first, _), *others = updated[parameter]
        optimizer.state[first] = one
        for other, _ in others:
            copies = {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in one.items()}
            optimizer.state[other] = copies
