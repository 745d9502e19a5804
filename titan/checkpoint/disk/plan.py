"""Which rank writes which chunk of a checkpoint: each chunk once, though several ranks may hold it.

Of replicas, the one with the fewest bytes so far writes, large tensors first. Planned by rank 0 with arrays, from one
table per rank: for 2,048 ranks and millions of chunks this takes seconds, where lists of objects take minutes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from titan.checkpoint.disk.index import DTYPES, Index, Ints, StoredTensor, grid
from titan.checkpoint.disk.manifest import FileEntry
from titan.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """Some of the tensors that one rank holds. header: JSON, [name, dtype, shape] of each, and `true` where it is
    stacked.  boxes: int64, the offsets and sizes of the part of each tensor that the rank holds. Headers that many
    ranks have alike are read once."""

    header: bytes
    boxes: bytes


Kind = tuple[str, tuple[int, ...], bool]
"""Of a tensor: dtype, shape, whether it is stacked."""

Table = tuple[Block, ...]
"""What one rank holds, all of it. Tensors that only this rank has names for stand in a block of their own."""


@dataclass(frozen=True)
class Written:
    """What one rank wrote. files: its data files by name.  places: [chunks, 3] of each tensor that the rank was to
    write, in the order of its table: number of the file among these, first byte, length in bytes."""

    files: Mapping[str, FileEntry]
    places: Ints


@dataclass(frozen=True)
class SavePlan:
    """tensors: what the checkpoint will hold.  chosen: for each rank, the numbers of the tensors in its table that it
    writes.  order: of all chunks that are written, rank by rank, the number of the chunk in the index."""

    tensors: Mapping[str, StoredTensor]
    chosen: Sequence[Ints]
    order: Ints

    def index(self, written: Sequence[Written]) -> Index:
        """Where each chunk is, from what each rank wrote."""
        names = [list(one.files) for one in written]
        firsts = itertools.accumulate(map(len, names), initial=0)
        places = [one.places + np.array([first, 0, 0]) for one, first in zip(written, firsts, strict=False)]
        ordered = np.empty((3, len(self.order)), np.int64)
        ordered[:, self.order] = np.concatenate(places).T
        return Index(tuple(itertools.chain(*names)), self.tensors, *ordered)


def make(tables: Sequence[Table]) -> SavePlan:
    """Choose a writer for each chunk; a CheckpointError where tensors of one name do not make one. tables: by rank."""
    tensors: dict[str, StoredTensor] = {}
    ranks, items, cells = [], [], []
    first = 0
    load = np.zeros(len(tables), np.int64)
    held = _by_name(tables)
    largest = {name: max(math.prod(shape) for _, shape, _ in boxes) for name, boxes in held.items()}
    for name in sorted(held, key=lambda name: (-largest[name], name)):
        if len(held[name]) > 1:
            told = " and ".join(f"{list(shape)} of {dtype}" for dtype, shape, _ in sorted(held[name]))
            raise CheckpointError(f"{name} is {told} on different ranks; a checkpoint holds one tensor per name")
        [((dtype, shape, stacked), boxes)] = held[name].items()
        dims, rows = len(shape), np.concatenate(boxes)
        filled = rows[np.all(rows[:, 2 + dims :] > 0, axis=1)]
        rows = filled if len(filled) else rows[:1]
        try:
            cuts, cell = grid(shape, rows[:, 2 : 2 + dims], rows[:, 2 + dims :])
        except ValueError as error:
            raise CheckpointError(f"{name} {list(shape)} cannot be saved: {error}") from error
        # The holders of a cell stand together in this order, the least loaded first.
        order = np.lexsort((load[rows[:, 0]], cell))
        holders = np.bincount(cell)
        chosen = order[np.cumsum(holders) - holders]
        np.add.at(load, rows[chosen, 0], DTYPES[dtype].itemsize * rows[chosen, 2 + dims :].prod(1))
        ranks.append(rows[chosen, 0])
        items.append(rows[chosen, 1])
        cells.append(first + np.arange(len(holders)))
        tensors[name] = StoredTensor(DTYPES[dtype], torch.Size(shape), cuts, first, stacked)
        first += len(holders)
    rank, item, chunk = (np.concatenate([np.empty(0, np.int64), *some]) for some in (ranks, items, cells))
    order = np.lexsort((item, rank))
    ends = np.searchsorted(rank[order], np.arange(1, len(tables)))
    return SavePlan(tensors, np.split(item[order], ends), chunk[order])


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
