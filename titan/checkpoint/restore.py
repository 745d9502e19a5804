"""Reads a checkpoint into a model and an optimizer. Strict: what is absent, left over or of another shape is refused.

Imported when first used, as DCP is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan.checkpoint import folder as folders
from titan.checkpoint import storage
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import MODEL, OPTIMIZER, model_tensors, rejoin, trained
from titan.errors import CheckpointError
from titan.log import log

if TYPE_CHECKING:
    from titan.contracts import Part

_SHOWN = 10


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says about itself: its state.json, and shape and type of each tensor."""

    path: Path
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorStorageMetadata]

    @classmethod
    def open(cls, path: Path) -> Saved:
        """Read it.

        Raises:
            CheckpointError: it cannot be read, or is of a format this version does not know.
        """
        state = folders.read_state(path)
        if state.get("format") != folders.FORMAT:
            raise CheckpointError(f"{path} has format {state.get('format')!r}; this version reads {folders.FORMAT}")
        return cls(path, state, storage.tensors_of(storage.read_metadata(path)))

    def empty(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A plain tensor to read one of its tensors into.

        Raises:
            CheckpointError: there is none of that name.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} is damaged: {folders.STATE} speaks of {name}, which is not in it")
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def load(path: Path, parts: Sequence[Part], optimizer: torch.optim.Optimizer, ranks: Ranks) -> Any:
    """Fill the parts' tensors and the optimizer's state from a checkpoint; returns the rest of the state.

    Raises:
        CheckpointError: it cannot be read or does not fit.
    """
    saved = ranks.each(lambda: Saved.open(path))
    weights = model_tensors(parts)
    _check_weights(saved, weights, ranks)
    ranks.each(lambda: _check_optimizer(saved, optimizer))
    updated = trained(parts, optimizer)
    slots = _empty_slots(saved, updated)
    others: dict[str, Tensor] = {}
    own = ranks.rank if saved.state.get("world_size") == ranks.size else None
    rest = ranks.each(lambda: rejoin(saved.state["rest"], own, lambda name: others.setdefault(name, saved.empty(name))))
    into = weights | others
    into |= {f"{OPTIMIZER}{name}.{slot}": value for name, one in slots.items() for slot, value in one.items()}
    ranks.each(lambda: storage.read(path, into, ranks.group))
    _give(optimizer, updated, slots, saved.state["values"])
    if not any(name.startswith(OPTIMIZER) for name in saved.tensors):
        log.info(f"optimizer: {path} holds no state of it, it starts anew")
    return rest


def _check_weights(saved: Saved, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Hold the model against the checkpoint, both ways, over all ranks."""
    there = {name: entry.size for name, entry in saved.tensors.items() if name.startswith(MODEL)}
    absent = [name for name in weights if name not in there]
    unlike = [
        f"{name.removeprefix(MODEL)} ({list(there[name])} there, {list(tensor.shape)} here)"
        for name, tensor in weights.items()
        if name in there and there[name] != tensor.shape
    ]
    found = ranks.gather((absent, unlike, list(weights)))
    wanted = {name for *_, names in found for name in names}
    faults = {
        "it lacks": {name.removeprefix(MODEL) for names, *_ in found for name in names},
        "the model lacks": {name.removeprefix(MODEL) for name in there.keys() - wanted},
        "shapes differ in": {text for _, texts, _ in found for text in texts},
    }
    told = [f"{what} {_listed(names)}" for what, names in faults.items() if names]
    if told:
        raise CheckpointError(f"checkpoint {saved.path} does not fit the model: {'; '.join(told)}")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_optimizer(saved: Saved, optimizer: torch.optim.Optimizer) -> None:
    before, now = saved.state.get("optimizer"), type(optimizer).__name__
    if before is not None and before != now:
        raise CheckpointError(f"checkpoint {saved.path} holds the state of {before}, this run's optimizer is {now}")


def _empty_slots(saved: Saved, updated: Mapping[str, tuple[Tensor, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Parameter -> slot -> tensor to read into, for all optimizer state the checkpoint has of these parameters.

    Made from the checkpoint alone: an optimizer step on zero gradients would make it too, and count as a step.
    """
    slots: dict[str, dict[str, Any]] = {}
    for name, entry in saved.tensors.items():
        parameter, _, slot = name.removeprefix(OPTIMIZER).rpartition(".")
        if name.startswith(OPTIMIZER) and parameter in updated:
            like, group = updated[parameter]
            if entry.size == like.shape and slot != "step":
                value = torch.empty_like(like.detach(), dtype=entry.properties.dtype)
            else:
                # torch.optim keeps counts in host memory, except where its kernel reads them on the device.
                near = bool(entry.size) or group.get("fused") or group.get("capturable")
                value = saved.empty(name, like.device if near else "cpu")
            slots.setdefault(parameter, {})[slot] = value
    return slots


def _give(
    optimizer: torch.optim.Optimizer,
    updated: Mapping[str, tuple[Tensor, dict[str, Any]]],
    slots: dict[str, dict[str, Any]],
    values: Mapping[str, Any],
) -> None:
    for name, value in values.items():
        parameter, _, slot = name.rpartition(".")
        if parameter in updated:
            slots.setdefault(parameter, {})[slot] = value
    for parameter, one in slots.items():
        optimizer.state[updated[parameter][0]] = one
