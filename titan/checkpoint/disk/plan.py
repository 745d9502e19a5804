"""Which rank writes which chunk of a checkpoint: each chunk once, though several ranks may hold it.

Of replicas, the one with the fewest bytes so far writes, large tensors first. Planned by rank 0 with arrays, from one
table per rank: for 2,048 ranks and millions of chunks this takes seconds, where lists of objects take minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from titan.checkpoint.disk.index import PREFIX, Index, Ints, StoredTensor, file_of, grid, is_name, stored_name
from titan.checkpoint.disk.plain import shown
from titan.checkpoint.disk.tensor_file import DTYPES, MOST_DIMENSIONS
from titan.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """Some of the tensors that one rank holds. header: JSON, [name, dtype, shape] of each, and `true` where it is
    stacked.  boxes: int64, the offsets and sizes of the part of each tensor that the rank holds. Headers that many
    ranks have alike are read once."""

    header: bytes
    boxes: bytes


ALIKE = 1 << 20
"""Bytes to which a rank's load counts where it is to write a single number."""

Kind = tuple[str, tuple[int, ...], bool]
"""Of a tensor: dtype, shape, whether it is stacked."""

Table = tuple[Block, ...]
"""What one rank holds, all of it. Tensors that only this rank has names for stand in a block of their own."""


@dataclass(frozen=True)
class SavePlan:
    """index: of the checkpoint that will be written.  chosen: for each rank, the numbers of the tensors in its table of
    which it writes its part, in the order in which they stand in its files."""

    index: Index
    chosen: Sequence[Ints]


def make(tables: Sequence[Table]) -> SavePlan:
    """Choose a writer for each chunk; a CheckpointError where tensors of one name do not make one. tables: by rank."""
    tensors: dict[str, StoredTensor] = {}
    found: list[Ints] = [np.empty((0, 4), np.int64)]
    first = 0
    load = np.zeros(len(tables), np.int64)
    held = _by_name(tables)
    called: dict[tuple[str, str], str] = {}
    for name in held:
        if not is_name(name):
            raise CheckpointError(f"no tensor can be called {shown(name)} in a checkpoint")
        stored = stored_name(name)
        if (other := called.setdefault((file_of(name, 0), stored), name)) != name:
            raise CheckpointError(f"{name} and {other} would both be called {stored} in a checkpoint's files")
    largest = {name: max(math.prod(shape) for _, shape, _ in boxes) for name, boxes in held.items()}
    for name in sorted(held, key=lambda name: (-largest[name], name)):
        if len(held[name]) > 1:
            told = " and ".join(f"{list(shape)} of {dtype}" for dtype, shape, _ in sorted(held[name]))
            raise CheckpointError(f"{name} is {told} on different ranks; a checkpoint holds one tensor per name")
        [((dtype, shape, stacked), boxes)] = held[name].items()
        dims, rows = len(shape), np.concatenate(boxes)
        if dims > MOST_DIMENSIONS:
            raise CheckpointError(f"{name} has {dims} dimensions; a checkpoint can hold {MOST_DIMENSIONS}")
        filled = rows[np.all(rows[:, 2 + dims :] > 0, axis=1)]
        rows = filled if len(filled) else rows[:1]
        try:
            cuts, cell = grid(shape, rows[:, 2 : 2 + dims], rows[:, 2 + dims :])
        except ValueError as error:
            raise CheckpointError(f"{name} {list(shape)} cannot be saved: {error}") from error
        # The holders of a cell stand together in this order, the least loaded first. For single numbers, of which an
        # optimizer has one per parameter, little less is no reason: a load would open a file for each.
        order = np.lexsort((load[rows[:, 0]] // (1 if dims else ALIKE), cell))
        holders = np.bincount(cell)
        chosen = rows[order[np.cumsum(holders) - holders]]
        wide = np.full(len(chosen), DTYPES[dtype].itemsize)
        sizes = wide * chosen[:, 2 + dims :].prod(1)
        np.add.at(load, chosen[:, 0], sizes)
        file = 2 * chosen[:, 0] + name.startswith(f"{PREFIX}.")
        found.append(np.column_stack([file, chosen[:, 1], sizes, wide]))
        tensors[name] = StoredTensor(name, DTYPES[dtype], torch.Size(shape), cuts, first, stacked)
        first += len(holders)
    file, item, size, wide = np.ascontiguousarray(np.concatenate(found).T)
    rank = file // 2
    # In a file the widest first, so that each begins at a multiple of its size. One sort, of one number.
    order = np.argsort((file * (1 + wide.max(initial=0)) - wide) * (1 + item.max(initial=0)) + item)
    begins = np.empty_like(size)
    begins[order] = _begins(file[order], size[order])
    written = np.split(item[order], np.searchsorted(rank[order], np.arange(1, len(tables))))
    return SavePlan(Index(tensors, rank.astype(np.int32), begins), written)


def _begins(file: Ints, size: Ints) -> Ints:
    """The first byte of each chunk where those of a file, which stand together, follow each other."""
    begins = np.cumsum(size) - size
    firsts = np.flatnonzero(np.diff(file, prepend=-1))
    found: Ints = begins - np.repeat(begins[firsts], np.diff(firsts, append=len(file)))
    return found


def _by_name(tables: Sequence[Table]) -> dict[str, dict[Kind, list[Ints]]]:
    """Name -> kind, one if ranks agree -> [boxes, 2 + 2 x dimensions]: rank, number in its table, offsets, sizes."""
    headers: dict[bytes, list[list[Any]]] = {}
    alike: dict[bytes, list[tuple[int, int, bytes]]] = {}
    for rank, table in enumerate(tables):
        first = 0
        for block in table:
            if block.header not in headers:
                headers[block.header] = json.loads(block.header)
            alike.setdefault(block.header, []).append((rank, first, block.boxes))
            first += len(headers[block.header])
    held: dict[str, dict[Kind, list[Ints]]] = {}
    for header, holders in alike.items():
        boxes = np.stack([np.frombuffer(numbers, np.int64) for _, _, numbers in holders])
        places = np.array([(rank, first) for rank, first, _ in holders])
        at = 0
        for number, (name, dtype, shape, *stacked) in enumerate(headers[header]):
            end = at + 2 * len(shape)
            rows = np.concatenate([places + np.array([0, number]), boxes[:, at:end]], axis=1)
            held.setdefault(name, {}).setdefault((dtype, tuple(shape), bool(stacked)), []).append(rows)
            at = end
    return held
