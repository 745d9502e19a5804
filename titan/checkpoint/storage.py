"""Writes and reads the data files of checkpoints: safetensors, one of each rank, in which each chunk is one tensor.

DCP's own planner gathers and pickles several objects per chunk on rank 0 at each save and load: minutes for 2,048
ranks. Here each rank sends one table of numbers, and only when its tensors have changed since the last save. A load
needs no exchange at all: from the index, each rank knows which chunks overlap its shards.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.disk import plan as plans
from titan.checkpoint.disk import tensor_file
from titan.checkpoint.disk.index import REST, Index, StoredTensor, file_of, stored_name
from titan.checkpoint.disk.manifest import INDEX, FileEntry
from titan.checkpoint.disk.plain import shown
from titan.checkpoint.disk.plan import Block, SavePlan, Table
from titan.checkpoint.disk.tensor_file import WORDS, Chunk, DataFile, read_header
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import Stacked
from titan.contracts.base.sharding import shard_of, slice_of, start_of
from titan.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


class Planner:
    """Chooses which rank writes what. The plan is kept, on all ranks, until the tensors of some rank change."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._table: Table | None = None
        self._mine: Sequence[int] = ()
        self.plan: SavePlan | None = None  # on rank 0

    def choose(self, tensors: Mapping[str, Tensor | Stacked]) -> list[str]:
        """The names of the tensors of which this rank writes its part; all ranks together."""
        ranks = self._ranks
        table = ranks.each(lambda: table_of(tensors))
        if not all(ranks.gather(table == self._table)):
            tables = ranks.gather_first(table)
            self.plan = ranks.each(lambda: plans.make(tables) if ranks.rank == 0 else None)
            self._mine = ranks.scatter(None if self.plan is None else self.plan.chosen).tolist()
            self._table = table
        names = list(tensors)
        return [names[number] for number in self._mine]


def table_of(tensors: Mapping[str, Tensor | Stacked]) -> Table:
    """Names, types, shapes and this rank's part of each tensor, plain or DTensor; in the order given."""
    boxes = boxes_of(tensors)

    def block_of(name: str) -> str:
        """Model, optimizer, or a table of the rest: that of random states has other names on each rank."""
        return ".".join(name.split(".")[: 2 if name.startswith(REST) else 1])

    blocks = []
    for _, names in itertools.groupby(tensors, key=block_of):
        some = {name: tensors[name] for name in names}
        header = [[name, WORDS[t.dtype], list(t.shape), *[True] * isinstance(t, Stacked)] for name, t in some.items()]
        numbers = [number for name in some for part in boxes[name] for number in part]
        blocks.append(Block(json.dumps(header).encode(), np.array(numbers, np.int64).tobytes()))
    return tuple(blocks)


def boxes_of(tensors: Mapping[str, Tensor | Stacked]) -> dict[str, Box]:
    """`box_of` each. Many tensors are sharded alike, and PyTorch takes 0.1 ms to say how."""
    known: dict[Any, Box] = {}
    boxes = {}
    for name, tensor in tensors.items():
        own, rank = (tensor.own, tensor.rank) if isinstance(tensor, Stacked) else (tensor, None)
        key = tensor.shape, rank, getattr(own, "device_mesh", None), getattr(own, "placements", None)
        if key not in known:
            known[key] = box_of(tensor)
        boxes[name] = known[key]
    return boxes


def box_of(tensor: Tensor | Stacked) -> Box:
    """(offsets, sizes) of this rank's part of a tensor; of a tensor without elements, all of it.

    PyTorch's own `__create_chunk_list__` names other rows than a rank holds where FSDP shards uneven slices of tensor
    parallelism: of 257 rows over 4 x 2 ranks, the last shard of the first slice has 30, not 31.

    Raises CheckpointError: what the rank holds is not what its placements say.
    """
    if isinstance(tensor, Stacked):
        offsets, sizes = box_of(tensor.own)
        return ((tensor.rank, *offsets), (1, *sizes)) if tensor.own.numel() else ((0, *offsets), tuple(tensor.shape))
    if not tensor.numel() or not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    part, held = slice_of(torch.empty(tensor.shape, device="meta"), tensor), tensor.to_local().shape
    if part.shape != held:
        raise CheckpointError(f"a rank holds {list(held)} of a tensor, but its placements give it {list(part.shape)}")
    return start_of(tensor), tuple(held)


def write(
    path: Path, rank: int, names: Sequence[str], tensors: Mapping[str, Tensor | Stacked], local: Mapping[str, Tensor]
) -> dict[str, FileEntry]:
    """Write this rank's part of the tensors of these names; returns the files, which are on the disk.

    tensors: for their shape.  local: this rank's values, made where they are asked for if not all fit into memory.
    """
    files: dict[str, dict[str, str]] = {}
    for name in names:
        files.setdefault(file_of(name, rank), {})[stored_name(name)] = name

    boxes = boxes_of({name: tensors[name] for name in names})
    entries = {}
    for file, ours in files.items():

        def value(name: str, ours: Mapping[str, str] = ours) -> Tensor:
            tensor = tensors[ours[name]]
            # A shard without rows of a tensor without elements stands for all of it.
            return local[ours[name]] if 0 not in tensor.shape else torch.empty(tensor.shape, dtype=tensor.dtype)

        (path / file).parent.mkdir(exist_ok=True)
        chunks = {stored: Chunk(tensors[name].dtype, boxes[name][1], boxes[name][0]) for stored, name in ours.items()}
        entries[file] = tensor_file.write(path / file, chunks, value)
    return entries


def read(path: Path, into: Mapping[str, Tensor], index: Index) -> None:
    """Fill tensors (plain, or this rank's shards of DTensors; in place) from a checkpoint."""
    wanted: dict[str, list[tuple[int, str, int]]] = {}
    boxes = boxes_of(into)
    for name, (offsets, sizes) in boxes.items():
        stored = index.tensors[name]
        for number in stored.overlapping(offsets, sizes):
            file, begin = index.place(stored, number)
            wanted.setdefault(file, []).append((begin, name, number))
    try:
        for file, chunks in sorted(wanted.items()):
            with DataFile.open(path / file) as opened:
                for begin, name, number in sorted(chunks):
                    target = shard_of(into[name].detach())
                    _read_chunk(opened, begin, target, boxes[name][0], index.tensors[name], number)
    except CheckpointError as error:
        error.args = (f"checkpoint {path} cannot be read: {error}",)
        raise


def _read_chunk(
    file: DataFile, begin: int, target: Tensor, origin: Sequence[int], stored: StoredTensor, number: int
) -> None:
    """Copy what a chunk and this rank's part of a tensor, which begins at `origin`, share."""
    offsets, sizes = stored.cell(number)
    bounds = []
    for dim, (mine, theirs, size) in enumerate(zip(origin, offsets, sizes, strict=True)):
        first, end = max(mine, theirs), min(mine + target.shape[dim], theirs + size)
        target = target.narrow(dim, first - mine, end - first)
        bounds.append(slice(first - theirs, end - theirs))
    file.read(target, begin, sizes, stored.dtype, bounds)


def wrong_headers(path: Path, index: Index, files: Iterable[str]) -> list[str]:
    """A sentence for each of these data files whose header says something else than the checkpoint's index."""
    faults = []
    for file in files:
        found, wanted = read_header(path / file)[0], index.header(file)
        if unlike := sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name)):
            faults.append(f"the header of {file} and {INDEX} differ in {shown(unlike[0])}")
    return faults
