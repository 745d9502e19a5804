"""Reads a checkpoint into a model and an optimizer. Strict: missing or extra tensors and other shapes are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan.checkpoint import storage
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import index as indexes
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.index import MODEL, OPTIMIZER, PREFIX, Index, StoredTensor
from titan.checkpoint.disk.manifest import TECHNIQUES
from titan.checkpoint.disk.plain import shown
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import Place, Stacks, Trained, firsts, model_tensors, rejoin, trained
from titan.checkpoint.techniques import tensors_in, without
from titan.contracts import ModelPart, shard_of
from titan.errors import CheckpointError
from titan.log import log

_SHOWN = 10
_ALL_ALIKE = Place("workers", 0, 1, "mean")
_TOGETHER = 1 << 27
"""Numbers that are read of one rank after the other and added up, in float64: a file is opened once for all of them."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files are those that were written, and what it says: its state.json and its index."""

    path: Path
    state: Mapping[str, Any]
    index: Index

    @classmethod
    def open(cls, path: Path, ranks: Ranks) -> Saved:
        """Verify every file against the manifest, each rank a share of them; rank 0 reads what the checkpoint says."""
        entries = ranks.first(lambda: folders.check_sizes(path))
        by_size = sorted(entries, key=lambda name: (-entries[name].size, name))
        mine = by_size[ranks.rank :: ranks.size]  # about as many bytes as any other rank
        faults = ranks.gather(ranks.each(lambda: manifest.wrong_hashes(path, entries, mine)))
        folders.refuse_damaged(path, [*chain(*faults)])
        others = ranks.first(lambda: manifest.unlisted(path, entries))
        if others and ranks.rank == 0:
            log.warning(f"{path} also holds {listed(others)}: not part of the checkpoint, ignored")
        state = ranks.first(lambda: folders.read_state(path))
        sizes = manifest.data_sizes(entries)
        index = ranks.first(lambda: indexes.read(path / manifest.INDEX, sizes))
        headers = [name for name in mine if name in sizes]
        faults = ranks.gather(ranks.each(lambda: storage.wrong_headers(path, index, headers)))
        folders.refuse_damaged(path, [*chain(*faults)])
        return cls(path, state, index)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> shape, dtype and cuts of each tensor in the checkpoint; of a stacked one, those of one rank's."""
        return {name: one.of(0) if one.stacked else one for name, one in self.index.tensors.items()}

    def with_weights_of(self, technique: str) -> Saved:
        """The same with the weights that a technique keeps in place of those that were trained; "": itself."""
        if not technique:
            return self
        kept: dict[str, dict[str, StoredTensor]] = {}
        for name, entry in self.index.tensors.items():
            # The table `weights` in a technique's state has weights that may be used in place of the trained ones.
            owner, _, parameter = name.removeprefix(f"{PREFIX}.").partition(".weights.")
            if name.startswith(f"{PREFIX}.") and parameter and "." not in owner:
                kept.setdefault(owner, {})[MODEL + parameter] = entry
        if technique not in kept:
            whose = f"those of {', '.join(sorted(kept))}" if kept else "none but those that were trained"
            raise CheckpointError(f"{self.path} has no weights of {technique!r}; it has {whose}")
        if trained := {name for name in self.tensors if name.startswith(MODEL)} - kept[technique].keys():
            names = listed(name.removeprefix(MODEL) for name in trained)
            log.info(f"weights of {technique}: it keeps none of {names}, which are as they were trained")
        return replace(self, index=replace(self.index, tensors={**self.index.tensors, **kept[technique]}))

    def read(self, into: Mapping[str, Tensor], ranks: Ranks, places: Mapping[str, Place] | None = None) -> None:
        """Fill tensors in place, all ranks together; each reads its shards.

        places: by name, of those that this rank is to have of its own. Of what ranks had each of their own, it gets its
            own where as many ranks have one now, and else their mean, or its share of their sum.
        """
        ranks.each(lambda: self._read(into, places or {}))

    def _read(self, into: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        terms = {name: self._terms(name, places.get(name)) for name, tensor in into.items() if tensor.numel()}
        alone = {name: entries[0] for name, (entries, parts) in terms.items() if len(entries) == parts == 1}
        storage.read(self.path, {name: into[name] for name in alone}, replace(self.index, tensors=alone))
        joined = [name for name in terms if name not in alone]
        ends = dict(zip(joined, accumulate(shard_of(into[name]).numel() for name in joined), strict=True))
        for _, names in groupby(joined, lambda name: ends[name] // _TOGETHER):
            self._read_joined({name: into[name] for name in names}, terms)

    def _terms(self, name: str, place: Place | None) -> tuple[list[StoredTensor], int]:
        """What to add up for this rank's tensor of a name, and what to divide the sum by. place: see `read`."""
        entry = self.index.tensors[name]
        if entry.stacked and place and place.ranks == entry.shape[0]:
            return [entry.of(place.rank)], 1
        entries = [entry.of(rank) for rank in range(entry.shape[0])] if entry.stacked else [entry]
        return entries, place.ranks if place and place.join == "sum" else len(entries)

    def _read_joined(self, into: Mapping[str, Tensor], terms: Mapping[str, tuple[list[StoredTensor], int]]) -> None:
        """Fill tensors with the sums of their terms, divided; of integers, with the first term."""
        ones = {name: torch.empty_like(tensor) for name, tensor in into.items()}
        totals = {name: torch.zeros_like(shard_of(one), dtype=torch.float64) for name, one in ones.items()}
        for number in range(max(len(terms[name][0]) for name in into)):
            stored = {name: terms[name][0][number] for name in into if number < len(terms[name][0])}
            storage.read(self.path, {name: ones[name] for name in stored}, replace(self.index, tensors=stored))
            for name in stored:
                totals[name] += shard_of(ones[name]).double() if ones[name].is_floating_point() or not number else 0
        for name, total in totals.items():
            shard_of(into[name]).copy_(total / terms[name][1] if into[name].is_floating_point() else total)

    def empty(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A plain tensor to read one of its tensors into; raises a CheckpointError where there is none of that name."""
        entry = self.tensors.get(name)
        if entry is None:
            what = f"{manifest.STATE} names {shown(name)}, which is not in the checkpoint"
            raise CheckpointError(f"{self.path} is damaged: {what}")
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _saved_by(stored: StoredTensor) -> int:
    return stored.shape[0] if stored.stacked else 1


def load(
    saved: Saved,
    parts: Sequence[ModelPart],
    optimizer: Optimizer,
    ranks: Ranks,
    states: Mapping[str, Any] | None,
    stacks: Stacks,
    changed: Sequence[str],
) -> Any:
    """Fill the parts' tensors and the optimizer's state from a checkpoint; returns the rest of the state.

    states, changed: see `Checkpointer.load`.  stacks: of this run's mesh.
    """
    holders, updated = model_tensors(parts), trained(parts, optimizer)
    weights = firsts(holders)
    check_weights(saved, weights, ranks)
    ranks.each(lambda: _check_optimizer(saved, optimizer, changed))
    slots = _empty_slots(saved, firsts(updated), getattr(optimizer, "state_like", torch.empty_like))
    rest, others = _rest(saved, states, ranks)
    into = weights | slots | others
    places = stacks.places(into, states or {})
    _tell_joined(saved, into, places)
    saved.read(into, ranks, places)
    _copy_to_others(holders)
    stored = saved.index.tensors
    workers = max((_saved_by(entry) for name, entry in stored.items() if name.startswith(MODEL)), default=1)
    mine = stacks.numbered("", workers)
    state = {name.removeprefix(OPTIMIZER): tensor for name, tensor in slots.items()}
    state |= {name.removeprefix(mine): n for name, n in saved.state["values"].items() if name.startswith(mine)}
    _give(optimizer, updated, state)
    if not any(name.startswith(OPTIMIZER) for name in saved.tensors):
        log.info(f"optimizer: {saved.path} holds no optimizer state; the optimizer starts from zero")
    return rest


def _tell_joined(saved: Saved, into: Iterable[str], places: Mapping[str, Place]) -> None:
    """Say once of each axis that its ranks' own tensors, `into` of them, become those of more or fewer ranks."""
    loaded = [(_saved_by(saved.index.tensors[name]), places.get(name, _ALL_ALIKE)) for name in into]
    changes = {(before, place.ranks, place.axis, place.join) for before, place in loaded if before != place.ranks}
    for before, now, axis, join in sorted(changes):
        what = {"mean": "their mean goes to each", "sum": "their sum is shared among"}[join]
        log.info(f"{axis}: {before} rank{'s'[: before != 1]} had tensors of their own; {what} of {now}")


def _rest(saved: Saved, states: Mapping[str, Any] | None, ranks: Ranks) -> tuple[Any, dict[str, Tensor]]:
    """The rest of the state for this rank, and by name the tensors in it, which are still to be read into."""
    mine = ranks.each(lambda: tensors_in(states or {}, ranks.rank))
    elsewhere = _held_by_any([*saved.tensors], mine, ranks) - mine.keys()
    plain = saved.state["rest"]
    if states is not None and TECHNIQUES in plain:
        theirs = {name: state for name, state in plain[TECHNIQUES].items() if name in states}
        plain = {**plain, TECHNIQUES: without(theirs, elsewhere)}
    own = ranks.rank if saved.state.get("world_size") == ranks.size else None
    tensors: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        """To read one into: sharded as a technique's is now, or else whole and on the CPU."""
        like = mine.get(name)
        if not isinstance(like, DTensor):
            return tensors.setdefault(name, saved.empty(name))
        stored = saved.empty(name, "meta")
        if unlike := other_shapes({name: stored.shape}, {name: like.shape}):
            raise CheckpointError(f"checkpoint {saved.path} does not fit: {unlike[0]}")
        return tensors.setdefault(name, torch.empty_like(like.detach(), dtype=stored.dtype))

    return ranks.each(lambda: rejoin(plain, own, tensor, saved.path / manifest.STATE)), tensors


def load_weights(path: Path, parts: Sequence[ModelPart], ranks: Ranks, technique: str) -> None:
    """Fill the parts' tensors alone, as `load` does, with the weights that a technique keeps, if one is named."""
    with folders.named():
        saved = Saved.open(path, ranks)
    saved, holders = saved.with_weights_of(technique), model_tensors(parts)
    weights = firsts(holders)
    check_weights(saved, weights, ranks)
    saved.read(weights, ranks)
    _copy_to_others(holders)


def _copy_to_others(holders: Mapping[str, Sequence[Tensor]]) -> None:
    for first, *others in holders.values():
        for other in others:
            other.copy_(first)


def check_weights(saved: Saved, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Hold the model against the checkpoint, both ways, over all ranks; of `weights` only the shapes count."""
    there = {name.removeprefix(MODEL): each.shape for name, each in saved.tensors.items() if name.startswith(MODEL)}
    here = {name.removeprefix(MODEL): tensor.shape for name, tensor in weights.items()}
    wrong = zip(*ranks.gather(([*here.keys() - there.keys()], other_shapes(there, here))), strict=True)
    absent, unlike = (sorted({*chain(*each)}) for each in wrong)
    unknown = there.keys() - _held_by_any(list(there), here, ranks)
    if faults := listed_faults({"it lacks": absent, "the model lacks": unknown, "shapes differ in": unlike}):
        raise CheckpointError(f"checkpoint {saved.path} does not fit the model: {faults}")


def _held_by_any(names: Sequence[str], mine: Collection[str], ranks: Ranks) -> set[str]:
    """Of names that all ranks have in one order, those of which some rank holds a tensor. Each sends a bit per name."""
    bits = np.bitwise_or.reduce(ranks.gather(np.packbits(np.array([name in mine for name in names], bool))))
    return {name for name, held in zip(names, np.unpackbits(bits, count=len(names)), strict=True) if held}


def other_shapes(there: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]]) -> list[str]:
    """Tensors of another shape in the folder (`there`) than in the model (`here`), each with both shapes."""
    both = [(name, list(there[name]), list(shape)) for name, shape in here.items() if name in there]
    return [f"{name} ({theirs} there, {ours} here)" for name, theirs, ours in both if theirs != ours]


def listed_faults(faults: Mapping[str, Iterable[str]]) -> str:
    """Each kind of fault with the names it is about, without those that are of none; empty where there are none."""
    return "; ".join(f"{what} {listed(names)}" for what, names in faults.items() if names)


def listed(names: Iterable[str]) -> str:
    """Names in order, the first ten of them and how many more."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_optimizer(saved: Saved, optimizer: Optimizer, changed: Sequence[str]) -> None:
    before, now = saved.state.get("optimizer"), type(optimizer).__name__
    if before not in (None, now):
        why = f" ({'; '.join(changed)})" if changed else ""
        raise CheckpointError(
            f"checkpoint {saved.path} holds optimizer state of {shown(before)}, but this run's optimizer is {now}{why};"
            " restore the old values, or start another run with checkpoint.init_from to keep the weights alone"
        )


def _empty_slots(saved: Saved, updated: Mapping[str, Trained], make: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Tensors to read into, for all optimizer state the checkpoint has of these parameters.

    Made from the checkpoint alone: an optimizer step on zero gradients would make it too, and count as a step. State in
    the dtype that the weights had there gets the one that they have here, as an optimizer makes it.
    """
    slots = {}
    for name, entry in saved.tensors.items():
        parameter, _, slot = name.removeprefix(OPTIMIZER).rpartition(".")
        if name.startswith(OPTIMIZER) and parameter in updated:
            like, group = updated[parameter]
            if entry.shape == like.shape and slot != "step":
                as_weight = entry.dtype == saved.tensors[MODEL + parameter].dtype
                slots[name] = make(like.detach(), dtype=like.dtype if as_weight else entry.dtype)
            else:
                # torch.optim keeps counts in host memory, except where its kernel reads them on the device.
                near = bool(entry.shape) or group.get("fused") or group.get("capturable")
                slots[name] = saved.empty(name, like.device if near else "cpu")
    return slots


def _give(optimizer: Optimizer, updated: Mapping[str, Sequence[Trained]], values: Mapping[str, Any]) -> None:
    """Hand state, `NAME.SLOT` -> tensor or number, to the optimizer, to each holder of a parameter its own."""
    states: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, _, slot = name.rpartition(".")
        if parameter in updated:
            states.setdefault(parameter, {})[slot] = value
    for parameter, state in states.items():
        (first, _), *others = updated[parameter]
        optimizer.state[first] = state
        for other, _ in others:
            copies = {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in state.items()}
            optimizer.state[other] = copies
