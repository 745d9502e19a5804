"""The tensors of a checkpoint, described from its index alone; and their norms, which are read from its data files."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from titan.checkpoint import storage
from titan.checkpoint.disk.index import MODEL, OPTIMIZER, PREFIX, REST, Index, StoredTensor, file_of, stored_name
from titan.checkpoint.disk.tensor_file import DataFile
from titan.errors import CheckpointError

KINDS = {MODEL: "weights", OPTIMIZER: "optimizer", f"{PREFIX}.": "techniques", f"{REST}rng.": "rng", REST: "other"}
"""What a tensor is, by the first of these that its name in the index begins with; in the order of the table."""

READ_AT_ONCE = 1 << 22
"""Elements whose norm is computed together: 32 MiB in float64."""


@dataclass(frozen=True)
class Row:
    """A tensor as it is shown. name: in its data file; with `[RANK]` behind it where it is one rank's of a stacked one.
    ranks: those that wrote its chunks, in their order."""

    name: str
    kind: str
    stored: StoredTensor
    ranks: Sequence[int]

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return self.stored.shape.numel() * self.stored.dtype.itemsize

    @property
    def files(self) -> list[str]:
        """The data files that hold its chunks."""
        return [file_of(self.stored.name, rank) for rank in sorted({*self.ranks})]


@dataclass
class Norm:
    """Of the finite elements of a tensor the sum of squares and the largest magnitude, in float64.
    finite, others: how many elements are finite, and how many are NaN or infinite."""

    squares: float = 0.0
    largest: float = 0.0
    finite: int = 0
    others: int = 0

    def add(self, values: Tensor) -> None:
        """Take more elements in; `values` is one-dimensional and not empty."""
        numbers = values.double()
        if not (finite := numbers.isfinite()).all():
            numbers = numbers[finite]
        self.others += values.numel() - numbers.numel()
        if numbers.numel():
            self.finite += numbers.numel()
            self.squares += numbers.dot(numbers).item()
            self.largest = max(self.largest, numbers.abs().max().item())

    def table(self) -> dict[str, float | int | None]:
        """The numbers by what they are called in the output; without finite elements only how many others there are."""
        if not self.finite:
            return {"l2": None, "rms": None, "max_abs": None, "non_finite": self.others}
        l2, rms = math.sqrt(self.squares), math.sqrt(self.squares / self.finite)
        return {"l2": l2, "rms": rms, "max_abs": self.largest, "non_finite": self.others}


def rows_of(index: Index, by_rank: bool = False) -> list[Row]:
    """The tensors of a checkpoint: by kind, then by name, layer 2 before layer 10.

    by_rank: a stacked tensor gives a row per rank that saved one.
    """
    rows = [row for stored in index.tensors.values() for row in _rows(index, stored, by_rank)]
    order = list(KINDS.values())
    return sorted(rows, key=lambda row: (order.index(row.kind), _natural(row.name)))


def _rows(index: Index, stored: StoredTensor, by_rank: bool) -> Iterator[Row]:
    kind = next(kind for prefix, kind in KINDS.items() if stored.name.startswith(prefix))
    name = stored_name(stored.name)
    parts = {name: stored}
    if by_rank and stored.stacked and stored.shape.numel():
        parts = {f"{name}[{rank}]": stored.of(rank) for rank in range(stored.shape[0])}
    for shown, part in parts.items():
        yield Row(shown, kind, part, index.ranks[part.first : part.first + part.chunks].tolist())


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts names with the numbers in them by value."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part) if number % 2 else 0, part) for number, part in enumerate(parts)]


def matching(rows: Iterable[Row], glob: str) -> list[Row]:
    """The rows of which the name, or the stacked tensor's name, is or matches a pattern of the shell."""
    pattern = re.compile(fnmatch.translate(glob))
    named = [(row, (row.name, stored_name(row.stored.name))) for row in rows]
    return [row for row, names in named if glob in names or any(map(pattern.match, names))]


def norms(path: Path, index: Index, rows: Sequence[Row], read: Callable[[int], object]) -> list[Norm | None]:
    """The norm of each row, None of one that is not of floating point. `read` is told the bytes of each part.

    Each file is read once, in order, and a part at a time.

    Raises CheckpointError: a header differs from the index, or a file cannot be read.
    """
    found = [Norm() if row.stored.dtype.is_floating_point else None for row in rows]
    chunks: dict[str, list[tuple[int, int, Norm, torch.dtype]]] = {}
    for row, norm in zip(rows, found, strict=True):
        if norm is None or not row.bytes:
            continue
        for number in range(row.stored.chunks):
            file, begin = index.place(row.stored, number)
            size = math.prod(row.stored.cell(number)[1])
            chunks.setdefault(file, []).append((begin, size, norm, row.stored.dtype))
    if faults := storage.wrong_headers(path, index, sorted(chunks)):
        raise CheckpointError(f"{path} is damaged: {'; '.join(faults)}")
    for file, places in sorted(chunks.items()):
        with DataFile.open(path / file) as opened:
            for begin, size, norm, dtype in sorted(places, key=itemgetter(0)):
                for first in range(0, size, READ_AT_ONCE):
                    part = slice(first, min(first + READ_AT_ONCE, size))
                    values = torch.empty(part.stop - part.start, dtype=dtype)
                    opened.read(values, begin, (size,), dtype, [part])
                    norm.add(values)
                    read(values.nbytes)
    return found
