"""titan.index: where each chunk of each tensor of a checkpoint is, as arrays.

DCP's `.metadata` says the same, as a pickle with five objects per chunk, and other readers of DCP use that file. A run
on 2,048 ranks has millions of chunks: titan reads these arrays instead, in about a thousandth of the time.

A chunk is a rectangular part of a tensor, as in DCP. The chunks of a tensor are the cells of a grid, so a tensor needs
only the positions at which each dimension is cut.
The file, all numbers little endian:

    int64            length of the header in bytes
    header           JSON: `files`, names of the data files; `tensors`, [name, dtype, shape, cuts by dimension] of each,
                     with `true` behind these where it is stacked
    int64 [cuts]     of each tensor and dimension, the offsets at which cells begin
    int64 [chunks]   of each cell (row-major, tensor by tensor): the number of its file
    int64 [chunks]   the first byte of the chunk in that file
    int64 [chunks]   its length in bytes
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from titan.checkpoint.disk import plain
from titan.checkpoint.disk.plain import read_bytes, synced
from titan.errors import CheckpointError

Ints = npt.NDArray[np.int64]

MODEL, OPTIMIZER, REST = "model.", "optimizer.", "rest."
"""What names of tensors begin with."""
TECHNIQUES = "techniques"
"""The table of the rest that holds techniques' state."""
PREFIX = f"{REST}{TECHNIQUES}"

_TYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64"
)
DTYPES = {f"torch.{name}": getattr(torch, name) for name in _TYPES.split()}
"""Types of tensors that a checkpoint can hold."""

LARGEST = 4 << 30
"""Bytes of an index that are read; a chunk takes 24."""

MOST_DIMENSIONS = 64
MOST_ELEMENTS = 1 << 58
"""Of one tensor: its bytes fit into an int64 whatever its type."""

_INT = np.dtype("<i8")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    cuts: of each dimension, the offsets at which cells begin.  first: its first chunk.
    stacked: it is [ranks, ...], of which each rank along an axis saved one, a tensor of its own.
    one: it is one of these, without that dimension; its chunks have it, of size 1.
    """

    dtype: torch.dtype
    shape: torch.Size
    cuts: tuple[Ints, ...]
    first: int
    stacked: bool = False
    one: bool = False

    def of(self, rank: int) -> StoredTensor:
        """Of a stacked one, the tensor of that rank along the axis."""
        own = StoredTensor(self.dtype, self.shape[1:], self.cuts[1:], 0, one=True)
        return replace(own, first=self.first + rank * own.chunks)

    @property
    def chunks(self) -> int:
        """Number of chunks it is stored in."""
        return math.prod(map(len, self.cuts))

    def cells(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, sizes) of each chunk, in row-major order."""
        dims = zip(self.cuts, self.shape, strict=True)
        spans = [zip(cuts.tolist(), np.diff(cuts, append=whole).tolist(), strict=True) for cuts, whole in dims]
        for cell in itertools.product(*spans):
            yield tuple(offset for offset, _ in cell), tuple(size for _, size in cell)

    def cell(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, sizes) of one chunk, counted from 0 in row-major order."""
        at = np.unravel_index(number, [len(cuts) for cuts in self.cuts]) if self.cuts else ()
        dims = zip(at, self.cuts, self.shape, strict=True)
        spans = [np.append(cuts[i : i + 2], whole)[:2].tolist() for i, cuts, whole in dims]
        return tuple(start for start, _ in spans), tuple(end - start for start, end in spans)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
        """The numbers of the chunks that a box of the tensor needs."""
        if 0 in sizes:
            return
        spans = [
            range(int(np.searchsorted(cuts, start, side="right")) - 1, int(np.searchsorted(cuts, start + length)))
            for cuts, start, length in zip(self.cuts, offsets, sizes, strict=True)
        ]
        counts = [len(cuts) for cuts in self.cuts]
        for at in itertools.product(*spans):
            yield int(np.ravel_multi_index(at, counts)) if at else 0


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint by name, and of each chunk its file, first byte and length, tensor after tensor."""

    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    file: Ints
    start: Ints
    length: Ints

    def agrees_with(self, other: Index) -> bool:
        """Whether another index says the same of every tensor; files and tensors may be in another order."""
        return self.tensors.keys() == other.tensors.keys() and all(
            (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            and all(map(np.array_equal, mine.cuts, theirs.cuts))
            and [*self._places(mine)] == [*other._places(theirs)]
            for mine, theirs in ((self.tensors[name], other.tensors[name]) for name in self.tensors)
        )

    def _places(self, tensor: StoredTensor) -> Iterator[tuple[str, int, int]]:
        return map(self.place, range(tensor.first, tensor.first + tensor.chunks))

    def place(self, chunk: int) -> tuple[str, int, int]:
        """(file, first byte, length) of a chunk, counted over all tensors."""
        return self.files[self.file[chunk]], int(self.start[chunk]), int(self.length[chunk])


def grid(shape: Sequence[int], offsets: Ints, sizes: Ints) -> tuple[tuple[Ints, ...], Ints]:
    """How boxes cut a tensor. offsets, sizes: [boxes, dimensions], none of them empty unless the tensor is.

    Returns:
        The cuts of each dimension, and the number of each box's cell in row-major order; equal boxes have equal cells.

    Raises ValueError: the boxes are not the cells of a grid, or leave a cell out.
    """
    cuts: list[Ints] = []
    cells = np.zeros(len(offsets), np.int64)
    for dim, whole in enumerate(shape):
        begins, at = np.unique(offsets[:, dim], return_inverse=True)
        ends = np.append(begins[1:], whole)
        if not len(begins) or begins[0] != 0 or np.any(offsets[:, dim] + sizes[:, dim] != ends[at]):
            raise ValueError("its chunks do not make it up")
        cuts.append(begins)
        cells = cells * len(begins) + at
    if len(np.unique(cells)) != math.prod(map(len, cuts)):
        raise ValueError("its chunks do not make it up")
    return tuple(cuts), cells


def write(path: Path, index: Index) -> None:
    """Write the index to a file, and wait until it is on the disk."""
    tensors = [
        [name, str(tensor.dtype), list(tensor.shape), [len(cuts) for cuts in tensor.cuts], *[True] * tensor.stacked]
        for name, tensor in index.tensors.items()
    ]
    header = json.dumps({"files": list(index.files), "tensors": tensors}).encode()
    cuts = [cuts for tensor in index.tensors.values() for cuts in tensor.cuts]
    with synced(path) as file:
        file.write(len(header).to_bytes(_INT.itemsize, "little") + header)
        for array in (*cuts, index.file, index.start, index.length):
            file.write(np.ascontiguousarray(array, _INT).data)


def read(path: Path, sizes: Mapping[str, int]) -> Index:
    """The index in a file; a CheckpointError where it names what the data files do not hold. sizes: bytes of each."""
    try:
        index = _parsed(read_bytes(path, LARGEST))
        check(index, sizes)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a valid index of a checkpoint: {error}") from error
    return index


def _parsed(data: bytes) -> Index:
    start = _INT.itemsize + int.from_bytes(data[: _INT.itemsize], "little")
    if start > plain.LARGEST:
        raise ValueError(f"its header has {start:,} bytes; at most {plain.LARGEST:,} are read")
    header = json.loads(data[_INT.itemsize : start])
    numbers = np.frombuffer(data, _INT, offset=start)
    files, entries = header["files"], header["tensors"]
    if type(files) is not list or type(entries) is not list or not all(type(file) is str for file in files):
        raise ValueError("its header names no files and tensors")
    tensors: dict[str, StoredTensor] = {}
    at = chunks = 0
    for name, dtype, shape, counts, *stacked in entries:
        lists = type(shape) is list and type(counts) is list and len(shape) == len(counts)
        if name in tensors or not lists or stacked not in ([], [True]):
            raise ValueError("a tensor's entry is wrong")
        if not all(type(number) is int and number >= 0 for number in (*shape, *counts)):
            raise ValueError(f"{name} has a size that is no number")
        ends = list(itertools.accumulate(counts, initial=at))
        cuts = tuple(numbers[a:b] for a, b in itertools.pairwise(ends))
        if stacked and not (shape and (counts[0] == shape[0] or 0 in shape[1:])):
            raise ValueError(f"{name} is stacked, but not by rank")
        tensors[name] = StoredTensor(DTYPES[dtype], torch.Size(shape), cuts, chunks, bool(stacked))
        at, chunks = ends[-1], chunks + math.prod(counts)
    if len(numbers) != at + 3 * chunks:
        raise ValueError(f"it has {len(numbers):,} numbers, not the {at + 3 * chunks:,} of its header")
    places = numbers[at:].reshape(3, chunks)
    return Index(tuple(files), tensors, *places)


def check(index: Index, sizes: Mapping[str, int]) -> None:
    """A ValueError where a tensor is larger than its place in the files (`sizes`), or two chunks share bytes."""
    for name, tensor in index.tensors.items():
        if type(name) is not str or not name.startswith((MODEL, OPTIMIZER, REST)):
            raise ValueError("a tensor's name is none")
        if len(tensor.shape) > MOST_DIMENSIONS or math.prod(max(1, size) for size in tensor.shape) > MOST_ELEMENTS:
            raise ValueError(f"the size of {name} is beyond all memory")
        needed = np.full((), tensor.dtype.itemsize, np.int64)
        for cuts, whole in zip(tensor.cuts, tensor.shape, strict=True):
            # Compared, not subtracted: a difference can overflow. Steps between 0 and the size cannot.
            ascending = len(cuts) and cuts[0] == 0 and np.all(cuts[1:] > cuts[:-1])
            if not ascending or not (cuts[-1] < whole or (len(cuts) == 1 and whole == 0)):
                raise ValueError(f"the chunks of {name} do not make it up")
            needed = np.multiply.outer(needed, np.diff(cuts, append=whole))
        if np.any(needed.reshape(-1) > index.length[tensor.first : tensor.first + tensor.chunks]):
            raise ValueError(f"a chunk of {name} is larger than its place")
    unknown = [file for file in index.files if file not in sizes]
    if unknown or len(set(index.files)) != len(index.files):
        raise ValueError(f"it names {(unknown or ['a file twice'])[0][:200]!r}, which its manifest does not list")
    if np.any((index.file < 0) | (index.file >= len(index.files))):
        raise ValueError("a chunk is in no file")
    ends = np.array([sizes[file] for file in index.files], np.int64)[index.file]
    if np.any((index.start < 0) | (index.length <= 0) | (index.start > ends) | (index.length > ends - index.start)):
        raise ValueError("a chunk ends behind the end of its file")
    order = np.lexsort((index.start, index.file))
    file, start, end = index.file[order], index.start[order], (index.start + index.length)[order]
    shared = np.flatnonzero((file[1:] == file[:-1]) & (end[:-1] > start[1:]))
    if len(shared):
        raise ValueError(f"two chunks overlap in {index.files[file[shared[0]]]}")
