"""titan.index: of each tensor of a checkpoint its type and shape, how it is cut into chunks, and where these lie.

The headers of the data files say the same, each of its own. A run on 2,048 ranks has as many of them, and millions of
chunks: rank 0 reads this one file instead, and sends it to all.

A chunk is a rectangular part of a tensor. The chunks of a tensor are the cells of a grid, so a tensor needs only the
positions at which each dimension is cut. The index is a safetensors file too:

    __metadata__    `tensors`: JSON, [name, dtype, shape, cuts by dimension] of each, with `true` behind these where it
                    is stacked
    cuts            int64, of each tensor and dimension the offsets at which cells begin
    begins          int64, of each cell (row-major, tensor by tensor) its first byte behind the header of its file
    ranks           int32, of each cell the rank that wrote it, which names the file
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from titan.checkpoint.disk import tensor_file
from titan.checkpoint.disk.manifest import TECHNIQUES, FileEntry, data_file, rank_of
from titan.checkpoint.disk.plain import parse, shown
from titan.checkpoint.disk.tensor_file import DTYPES, WORDS, Chunk, DataFile, Entry, are_sizes
from titan.errors import CheckpointError

Ints = npt.NDArray[np.int64]
Writers = npt.NDArray[np.int32]

MODEL, OPTIMIZER, REST = "model.", "optimizer.", "rest."
"""What names of tensors begin with."""
PREFIX = f"{REST}{TECHNIQUES}"
"""What those of techniques' tensors begin with."""

LONGEST_NAME = 1000
MOST_ELEMENTS = 1 << 58
"""Of one tensor: its bytes fit into an int64 whatever its type."""


def is_name(name: object) -> bool:
    """Whether a tensor can be called so: also in a message, on one line."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        return False
    return name.startswith((MODEL, OPTIMIZER, REST)) and name.isprintable()


def stored_name(name: str) -> str:
    """What a tensor is called in its file: a weight as in the model, a technique's behind the technique's name."""
    for kind in (MODEL, f"{PREFIX}.", REST):
        if name.startswith(kind):
            return name.removeprefix(kind)
    return name


def file_of(name: str, rank: int) -> str:
    """The file in which a rank's chunk of a tensor stands."""
    return data_file(rank, of_technique=name.startswith(f"{PREFIX}."))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    name: its own, also where it is read in place of another.
    cuts: of each dimension, the offsets at which cells begin.  first: its first chunk.
    stacked: it is [ranks, ...], of which each rank along an axis saved one, a tensor of its own.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    cuts: tuple[Ints, ...]
    first: int
    stacked: bool = False

    def of(self, rank: int) -> StoredTensor:
        """Of a stacked one, the tensor of that rank along the axis."""
        own = StoredTensor(self.name, self.dtype, self.shape[1:], self.cuts[1:], 0)
        return replace(own, first=self.first + rank * own.chunks)

    @property
    def chunks(self) -> int:
        """Number of chunks it is stored in."""
        return math.prod(map(len, self.cuts))

    def cell(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, sizes) of one chunk, counted from 0 in row-major order."""
        at: list[int] = []
        for cuts in reversed(self.cuts):
            number, place = divmod(number, len(cuts))
            at.insert(0, place)
        dims = zip(at, self.cuts, self.shape, strict=True)
        spans = [[*cuts[i : i + 2].tolist(), whole][:2] for i, cuts, whole in dims]
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
    """The tensors of a checkpoint by name, and of each chunk, tensor after tensor, the rank that wrote it and its first
    byte behind the header of its file."""

    tensors: Mapping[str, StoredTensor]
    ranks: Writers
    begins: Ints

    def place(self, tensor: StoredTensor, number: int) -> tuple[str, int]:
        """(file, first byte) of a tensor's chunk."""
        chunk = tensor.first + number
        return file_of(tensor.name, int(self.ranks[chunk])), int(self.begins[chunk])

    def header(self, file: str) -> dict[str, Entry]:
        """What the header of a data file has to say."""
        tensors = list(self.tensors.values())
        firsts = [tensor.first for tensor in tensors]
        entries = {}
        for chunk in np.flatnonzero(self.ranks == rank_of(file)).tolist():
            tensor = tensors[bisect.bisect_right(firsts, chunk) - 1]
            place, begin = self.place(tensor, chunk - tensor.first)
            if place == file:
                offsets, sizes = tensor.cell(chunk - tensor.first)
                entries[stored_name(tensor.name)] = Entry(Chunk(tensor.dtype, sizes, offsets), begin)
        return entries


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


def write(path: Path, index: Index) -> FileEntry:
    """Write the index to a file, and wait until it is on the disk."""
    tensors = [
        [name, WORDS[tensor.dtype], list(tensor.shape), [len(cuts) for cuts in tensor.cuts], *[True] * tensor.stacked]
        for name, tensor in index.tensors.items()
    ]
    cuts = np.concatenate([np.empty(0, np.int64), *(cuts for tensor in index.tensors.values() for cuts in tensor.cuts)])
    arrays = {"cuts": cuts, "begins": index.begins, "ranks": index.ranks}
    found = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    chunks = {name: Chunk(array.dtype, tuple(array.shape)) for name, array in found.items()}
    return tensor_file.write(path, chunks, found.__getitem__, {"tensors": json.dumps(tensors)})


def read(path: Path, sizes: Mapping[str, int]) -> Index:
    """The index in a file; a CheckpointError where it names what the data files do not hold. sizes: bytes of each."""
    entries, about = tensor_file.read_header(path)
    try:
        with DataFile.open(path) as file:
            cuts, begins, ranks = (_array(file, entries, name) for name in ("cuts", "begins", "ranks"))
        index = _parsed(parse(about.get("tensors", "null")), cuts, begins, ranks)
        check(index, sizes)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a valid index of a checkpoint: {shown(error)}") from error
    return index


def _array(file: DataFile, entries: Mapping[str, Entry], name: str) -> npt.NDArray[Any]:
    chunk, begin = entries.get(name, (None, 0))
    if chunk is None or len(chunk.shape) != 1 or chunk.dtype is not (torch.int32 if name == "ranks" else torch.int64):
        raise ValueError(f"its {name} are no array of integers")
    array = torch.empty(chunk.shape, dtype=chunk.dtype)
    file.read(array, begin, chunk.shape, chunk.dtype, [slice(0, chunk.shape[0])])
    return array.numpy()


def _parsed(entries: object, numbers: Ints, begins: Ints, ranks: Writers) -> Index:
    if not isinstance(entries, list):
        raise ValueError("its header names no tensors")
    tensors: dict[str, StoredTensor] = {}
    at = chunks = 0
    for name, dtype, shape, counts, *stacked in entries:
        if not is_name(name):
            raise ValueError("a tensor's name is none")
        lists = type(shape) is list and type(counts) is list and len(shape) == len(counts)
        if name in tensors or dtype not in DTYPES or not lists or stacked not in ([], [True]):
            raise ValueError(f"the entry of {name} is wrong")
        # With no cell in one dimension there would be none at all, however many there are in the others.
        if not are_sizes(shape) or not are_sizes(counts, 1):
            raise ValueError(f"{name} has a size that is none")
        ends = list(itertools.accumulate(counts, initial=at))
        cuts = tuple(numbers[a:b] for a, b in itertools.pairwise(ends))
        if stacked and not (shape and (counts[0] == shape[0] or 0 in shape[1:])):
            raise ValueError(f"{name} is stacked, but not by rank")
        tensors[name] = StoredTensor(name, DTYPES[dtype], torch.Size(shape), cuts, chunks, bool(stacked))
        at, chunks = ends[-1], chunks + math.prod(counts)
    if len(numbers) != at or not len(begins) == len(ranks) == chunks:
        raise ValueError(f"it has {len(numbers):,} cuts and {len(ranks):,} chunks, not the {at:,} and {chunks:,} named")
    return Index(tensors, ranks, begins)


def check(index: Index, sizes: Mapping[str, int]) -> None:
    """A ValueError where the chunks of a tensor do not make it up, one lies outside of its file, those of a file are
    larger than it, or a file has none. sizes: of each file."""
    needed = np.empty(len(index.ranks), np.float64)
    file = 2 * index.ranks.astype(np.int64)
    lengths: dict[object, npt.NDArray[np.float64]] = {}  # layers are cut alike
    for name, tensor in index.tensors.items():
        cut = (tensor.dtype, tensor.shape, *(cuts.tobytes() for cuts in tensor.cuts))
        if cut not in lengths:
            lengths[cut] = _lengths(tensor)
        chunks = slice(tensor.first, tensor.first + tensor.chunks)
        needed[chunks] = lengths[cut]
        file[chunks] += name.startswith(f"{PREFIX}.")
    files = sorted((2 * rank_of(name) + name.startswith(TECHNIQUES), name) for name in sizes)
    numbers = np.array([number for number, _ in files] or [-1])
    place = np.searchsorted(numbers, file).clip(max=len(numbers) - 1)
    if np.any(unlisted := (numbers[place] != file) | (file < 0)):
        rank, of_technique = divmod(int(file[np.argmax(unlisted)]), 2)
        raise ValueError(f"it names {data_file(rank, bool(of_technique))}, which its manifest does not list")
    counts = np.bincount(place, minlength=len(numbers))
    if empty := [name for (_, name), count in zip(files, counts, strict=False) if not count]:
        raise ValueError(f"it does not name {empty[0]}, which its manifest lists")
    longest = np.array([sizes[name] for _, name in files], np.float64)
    outside = (index.begins < 0) | (index.begins + needed > longest[place])
    outside |= (np.bincount(place, needed, len(files)) > longest)[place]
    if np.any(outside):
        raise ValueError(f"{files[place[np.argmax(outside)]][1]} is smaller than the chunks that it is to hold")


def _lengths(tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Bytes of each chunk of a tensor; a ValueError where its cuts make no grid."""
    if math.prod(max(1, size) for size in tensor.shape) > MOST_ELEMENTS:
        raise ValueError(f"the size of {tensor.name} is beyond all memory")
    lengths = np.full((), tensor.dtype.itemsize, np.float64)
    for cuts, whole in zip(tensor.cuts, tensor.shape, strict=True):
        # Compared, not subtracted: a difference can overflow. Steps between 0 and the size cannot.
        ascending = len(cuts) and cuts[0] == 0 and np.all(cuts[1:] > cuts[:-1])
        if not ascending or not (cuts[-1] < whole or (len(cuts) == 1 and whole == 0)):
            raise ValueError(f"the chunks of {tensor.name} do not make it up")
        lengths = np.multiply.outer(lengths, np.diff(cuts, append=whole))
    return lengths.reshape(-1)
