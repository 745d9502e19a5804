"""Writes and reads the data files of checkpoints: each chunk of a tensor as torch.save writes it, as DCP does.

DCP's own planner gathers and pickles several objects per chunk on rank 0 at each save and load: minutes for 2,048
ranks. Here each rank sends one table of numbers, and only when its tensors have changed since the last save. A load
needs no exchange at all: from the index, each rank knows which chunks overlap its shards.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.disk import plan as plans
from titan.checkpoint.disk.index import REST, Index
from titan.checkpoint.disk.manifest import FileEntry
from titan.checkpoint.disk.payload import read_tensor
from titan.checkpoint.disk.plain import cannot_be_read, size_of
from titan.checkpoint.disk.plan import Block, SavePlan, Table, Written
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import Stacked, local_part
from titan.contracts.base.sharding import slice_of, start_of
from titan.errors import CheckpointError

FILE_BYTES = 4 << 30
"""A data file that has reached this size gets no further chunk, so that few ranks can verify the files of many."""

HASHED_ASIDE = 1 << 16
"""Bytes of a write from which on it is hashed on another thread; a smaller one is hashed before a thread wakes up."""

SYNCED_EARLY = 8 << 20
"""Bytes written after which a sync begins on another thread, so that the one at the end of the file is short."""

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


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
    known: dict[Any, list[int]] = {}

    def numbers(tensor: Tensor | Stacked) -> list[int]:
        # Many tensors are sharded alike, and PyTorch takes 0.1 ms to say how.
        own, rank = (tensor.own, tensor.rank) if isinstance(tensor, Stacked) else (tensor, None)
        key = tensor.shape, rank, getattr(own, "device_mesh", None), getattr(own, "placements", None)
        if key not in known:
            offsets, sizes = box_of(tensor)
            known[key] = [*offsets, *sizes]
        return known[key]

    def block_of(name: str) -> str:
        """Model, optimizer, or a table of the rest: that of random states has other names on each rank."""
        return ".".join(name.split(".")[: 2 if name.startswith(REST) else 1])

    blocks = []
    for _, names in itertools.groupby(tensors, key=block_of):
        some = {name: tensors[name] for name in names}
        header = [[name, str(t.dtype), list(t.shape), *[True] * isinstance(t, Stacked)] for name, t in some.items()]
        boxes = [number for tensor in some.values() for number in numbers(tensor)]
        blocks.append(Block(json.dumps(header).encode(), np.array(boxes, np.int64).tobytes()))
    return tuple(blocks)


def box_of(tensor: Tensor | Stacked) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
) -> Written:
    """Write this rank's part of the tensors of these names; the data is on disk when it returns.

    tensors: for their shape.  local: this rank's values, made where they are asked for if not all fit into memory.
    """
    files: dict[str, FileEntry] = {}
    places = np.empty((len(names), 3), np.int64)
    left = iter(range(len(names)))
    for first in left:
        file_name = f"__{rank}_{len(files)}.distcp"
        with _DataFile.created(path / file_name) as file:
            for number in itertools.chain([first], left):
                start, name = file.size, names[number]
                torch.save(_whole_storage(local[name], tensors[name]), cast(IO[bytes], file))
                places[number] = len(files), start, file.size - start
                if file.size >= FILE_BYTES:
                    break
        files[file_name] = FileEntry(file.size, file.digest.hexdigest())
    return Written(files, places)


def _whole_storage(values: Tensor, tensor: Tensor | Stacked) -> Tensor:
    """Values on the CPU that fill their storage: torch.save writes the storage, not the view."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # a sharded one is stored whole
    values = values.detach().cpu().contiguous()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


class _DataFile(io.RawIOBase):
    """A data file that is hashed and synced by other threads while it is written. size: bytes so far."""

    def __init__(self, file: BinaryIO, aside: Executor) -> None:
        self._file, self._aside, self.digest, self.size = file, aside, hashlib.sha256(), 0
        self._sync: Future[None] | None = None
        self._sync_begun = 0
        self._error: OSError | None = None

    @classmethod
    @contextmanager
    def created(cls, path: Path) -> Iterator[_DataFile]:
        """A new file, on disk when the block ends; raises the OSError that torch.save would wrap."""
        with path.open("wb") as file, ThreadPoolExecutor(2, "checkpoint file") as aside:
            data = cls(file, aside)
            try:
                yield data
                file.flush()
                if data._sync is not None:
                    data._sync.result()  # an error of the disk is told to one sync, and the next one succeeds
                os.fsync(file.fileno())
            except Exception as error:
                raise (data._error or error) from error

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        # It returns when the bytes are hashed: they are the tensor's own memory, of which no copy is made.
        hashed = self._aside.submit(self.digest.update, data) if len(data) >= HASHED_ASIDE else None
        try:
            self._file.write(data)
            self.size += len(data)
            if self.size - self._sync_begun >= SYNCED_EARLY and (self._sync is None or self._sync.done()):
                if self._sync is not None:
                    self._sync.result()
                self._sync = self._aside.submit(_sync_data, self._file.fileno())
                self._sync_begun = self.size
        except OSError as error:
            self._error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()
        if hashed is None:
            self.digest.update(data)
        return len(data)


def read(path: Path, into: Mapping[str, Tensor], index: Index) -> None:
    """Fill tensors (plain, or this rank's shards of DTensors; in place) from a checkpoint."""
    wanted: list[tuple[str, int, str, int]] = []  # chunks, which are read in the order in which they lie in the files
    boxes = {name: box_of(tensor) for name, tensor in into.items()}
    for name, (offsets, sizes) in boxes.items():
        stored = index.tensors[name]
        for number in stored.overlapping(offsets, sizes):
            file, start, _ = index.place(stored.first + number)
            wanted.append((file, start, name, number))
    try:
        for file, chunks in itertools.groupby(sorted(wanted), key=lambda chunk: chunk[0]):
            size_of(path / file)
            with (path / file).open("rb") as opened:
                for _, _, name, number in chunks:
                    _read_chunk(opened, local_part(into[name].detach()), boxes[name][0], index, name, number)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except CheckpointError as error:
        raise type(error)(f"checkpoint {path} cannot be read: {error}") from error


def _read_chunk(file: BinaryIO, target: Tensor, origin: Sequence[int], index: Index, name: str, number: int) -> None:
    """Copy what a chunk and this rank's part of a tensor, which begins at `origin`, share."""
    stored = index.tensors[name]
    where, start, length = index.place(stored.first + number)
    offsets, sizes = stored.cell(number)
    there = (1, *sizes) if stored.one else sizes
    values = read_tensor(file, start, length, stored.dtype, there, f"{name} in {where}").reshape(sizes)
    for dim, (mine, theirs, size) in enumerate(zip(origin, offsets, sizes, strict=True)):
        begin = max(mine, theirs)
        count = min(mine + target.shape[dim], theirs + size) - begin
        target = target.narrow(dim, begin - mine, count)
        values = values.narrow(dim, begin - theirs, count)
    target.copy_(values)
