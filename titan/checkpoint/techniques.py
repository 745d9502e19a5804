"""State of techniques: merged over all ranks when it is saved, and distributed again on a load.

Each rank returns its own. Tables are merged key by key; a tensor is saved under its name from a rank that has it, the
shards of a DTensor together. What several ranks return under one name must be equal, or the save is refused. On a load,
plain values go to every rank. A tensor goes to the ranks that name it in their own state then, or to all if none does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.checkpoint.disk.index import MODEL, OPTIMIZER, PREFIX
from titan.checkpoint.disk.manifest import TECHNIQUES
from titan.checkpoint.state import TENSOR, Snapshot, Stacked, separate
from titan.checkpoint.storage import box_of
from titan.errors import CheckpointError

_RULE = (
    "state under one name is saved once, so it must be equal on all ranks that return it; use a name per owner, "
    "or make it a DTensor"
)


class Print(NamedTuple):
    """What tells whether two ranks hold the same of a tensor: its shape, where their shard begins, a hash of it.

    Small, because rank 0 is sent those of every rank at each save.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    digest: bytes


Keys = tuple[str, ...]
"""Where a value stands in the tables of techniques."""

Given = tuple[Mapping[str, Any], Mapping[str, Print]]
"""What one rank gives: tables by technique, and the print of each tensor that others may give too."""


def given(snapshot: Snapshot) -> Given:
    """What this rank gives, with the values of its snapshot."""
    own = {name: each.own if isinstance(each, Stacked) else each for name, each in snapshot.tensors.items()}

    def can_differ(name: str) -> bool:
        """Whether ranks could hold the tensor differently under one name, of which one is saved."""
        if name.startswith(f"{PREFIX}."):
            return snapshot.local[name].numel() > 0
        if not name.startswith(OPTIMIZER) or not own[name].ndim or hasattr(own[name], "to_local"):
            return False
        return hasattr(own[MODEL + name.removeprefix(OPTIMIZER).rpartition(".")[0]], "to_local")

    prints = {}
    for name in filter(can_differ, own):
        tensor, values = snapshot.tensors[name], snapshot.local[name]
        digest = hashlib.blake2b(f"{values.dtype} {list(values.shape)}".encode(), digest_size=16)
        digest.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        prints[name] = Print(tuple(tensor.shape), box_of(tensor)[0], digest.digest())
    return snapshot.rest.get(TECHNIQUES, {}), prints


def united(everyone: Sequence[Given]) -> dict[str, Any]:
    """The tables of all ranks in one; a CheckpointError where two ranks give something else under one name."""
    tables: dict[str, Any] = {}
    givers: dict[Keys, int] = {}
    seen: set[str] = set()  # most ranks of a stage give the same
    for rank, (given_tables, _) in enumerate(everyone):
        if (text := _text(given_tables)) not in seen:
            _unite(tables, given_tables, rank, givers)
            seen.add(text)
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    shards: dict[tuple[str, tuple[int, ...]], tuple[int, bytes]] = {}
    for rank, (_, prints) in enumerate(everyone):
        for name, mark in prints.items():
            first, shape = shapes.setdefault(name, (rank, mark.shape))
            holder, digest = shards.setdefault((name, mark.offsets), (rank, mark.digest))
            if shape != mark.shape:
                what = f"is {list(shape)} on rank {first} and {list(mark.shape)} on rank {rank}"
            elif digest != mark.digest:
                what = f"has other values on rank {rank} than on rank {holder}"
            else:
                continue
            technique, _, key = name.removeprefix(f"{PREFIX}.").partition(".")
            state = f"optimizer: the state {name.removeprefix(OPTIMIZER)!r}"
            owner = state if name.startswith(OPTIMIZER) else f"technique {technique}: the tensor {key!r}"
            raise CheckpointError(f"{owner} {what}; {_RULE}")
    return tables


def _unite(into: dict[str, Any], table: Mapping[str, Any], rank: int, givers: dict[Keys, int], path: Keys = ()) -> None:
    for key, value in table.items():
        at = (*path, key)
        first = givers.setdefault(at, rank)
        if _is_table(value) and _is_table(into.get(key, {})):
            _unite(into.setdefault(key, {}), value, rank, givers, at)
        elif _text(into.setdefault(key, value)) != _text(value):
            technique, name = path[0] if path else key, ".".join(at[1:])
            what = f"{_text(into[key])[:100]} on rank {first} and {_text(value)[:100]} on rank {rank}"
            raise CheckpointError(f"technique {technique}: {name!r} is {what}; {_RULE}")


def _is_table(value: Any) -> bool:
    """Whether it is a table of a technique's own, not one that stands for a tensor."""
    return isinstance(value, dict) and not any(key.startswith("$") for key in value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def tensors_in(techniques: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Name in a checkpoint -> tensor of what techniques hold now; they ask for these."""
    return separate(techniques, rank, PREFIX)[1]


def without(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A table of a state.json without the tensors of these names, nor lists and tables that held nothing else."""
    return {
        key: without(value, names) if _is_table(value) else value
        for key, value in table.items()
        if not _holds_only(value, names)
    }


def _holds_only(value: Any, names: Collection[str]) -> bool:
    """Whether a value is a tensor of one of these names, or a list or table of such tensors alone."""
    if isinstance(value, dict) and isinstance(value.get(TENSOR), str):
        return value[TENSOR] in names
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return bool(items) and all(_holds_only(item, names) for item in items)
