"""One safetensors file: a JSON header that says what lies where, then raw tensors. Nothing in it executes.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, little endian; the
header, which gives each tensor's type, shape and place; the data. The library's writer wants all tensors of a file in
memory at once: here a tensor at a time is written, hashed and synced meanwhile. Its reader maps the file, so a failing
disk, or a file that is cut short, kills the process (SIGBUS): here both are an error that can be told.

Of chunks of tensors, the header also has their offsets in the whole, where `torch.distributed.checkpoint` (DCP) puts
them: its `HuggingFaceStorageReader` reads such files, whole or for any other sharding.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import torch
from torch import Tensor

from titan.checkpoint.disk.manifest import FileEntry
from titan.checkpoint.disk.plain import LARGEST, cannot_be_read, parse, shown, size_of
from titan.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types of tensors by the format's words for them: those of every version of the library that pyproject admits."""
WORDS = {dtype: word for word, dtype in DTYPES.items()}

METADATA = "__metadata__"
"""What a header has beside the entries of tensors: texts, by key."""
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Which of these texts has the offsets of the file's chunks: JSON, tensor -> {"saved_offsets": [...]}."""

_LENGTH = 8
"""Bytes of the number that a file begins with, the length of its header."""

MOST_BYTES = 1 << 62
"""What any size or place in a file is at most."""
MOST_DIMENSIONS = 32

WAITING = 1 << 16
"""Bytes of small tensors that wait together to be hashed."""

WRITTEN_OUT = 16 << 20
"""Bytes after which the kernel is told to write them to the disk, so that the sync at the end of the file is short."""

READ_AT_ONCE = 32 << 20
"""Bytes of host memory that a part of a chunk goes through, where it cannot be read into its tensor directly."""


class Chunk(NamedTuple):
    """A tensor in a file, or a chunk of one. offsets: of a chunk in the whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(NamedTuple):
    """A chunk in a header. begin: its first byte, counted from the end of the header."""

    chunk: Chunk
    begin: int


def write(
    path: Path, tensors: Mapping[str, Chunk], value: Callable[[str], Tensor], about: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new file, in which tensors stand in the order given; it is on the disk when this returns.

    value: gives a tensor when its turn has come; none is kept.  about: texts for the header, by key.
    """
    places = {name: {OFFSETS: each.offsets} for name, each in tensors.items() if each.offsets is not None}
    sharding = {SHARDING: json.dumps(places, separators=(",", ":"))} if places else {}
    header: dict[str, Any] = {METADATA: {"format": "pt", **sharding, **(about or {})}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with _HashedFile.created(path) as file:
        file.write(memoryview(len(text).to_bytes(_LENGTH, "little") + text))
        for name, tensor in tensors.items():
            given = value(name).detach()
            assert tuple(given.shape) == tuple(tensor.shape) and given.dtype is tensor.dtype
            file.write(_bytes_of(given.cpu().contiguous()))
    return FileEntry(file.size, file.digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory


class _HashedFile:
    """A file that another thread hashes while it is written. size: bytes so far."""

    def __init__(self, file: FileIO, aside: Executor) -> None:
        self._file, self._aside, self.digest, self.size = file, aside, hashlib.sha256(), 0
        self._hashing: Future[None] | None = None
        self._waiting = self._written_out = 0

    @classmethod
    @contextmanager
    def created(cls, path: Path) -> Iterator[_HashedFile]:
        """A new file, hashed and on disk when the block ends."""
        with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "checkpoint hash") as aside:
            hashed = cls(file, aside)
            yield hashed
            os.fsync(file.fileno())

    def write(self, data: memoryview) -> None:
        # Of a tensor no copy is made, so that at most two are in memory, the one that is written and the one before it:
        # or some small ones, for which a thread would take longer to wake up than to hash.
        self._waiting += len(data)
        if self._hashing is not None and self._waiting > WAITING:
            self._hashing.result()
            self._waiting = len(data)
        self._hashing = self._aside.submit(self.digest.update, data)
        while data:
            count = self._file.write(data[:WRITTEN_OUT])
            self.size, data = self.size + count, data[count:]
            if self.size - self._written_out >= WRITTEN_OUT:
                _write_out(self._file.fileno(), self._written_out, self.size)
                self._written_out = self.size


def _write_out(file: int, begin: int, end: int) -> None:
    """Let the kernel begin to write these bytes to the disk; it keeps an error of the disk for the next sync."""
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with suppress(OSError):  # advice that a file system does not take
            os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and texts of the header of a plain file, by name. Nothing is allocated that is larger than the file.

    Raises CheckpointError: the header is longer than the file or is none; tensors overlap, leave gaps, are not as long
    as their type and shape say, or end elsewhere than the file does; a name stands there twice.
    """
    size = size_of(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > (most := min(size - _LENGTH, LARGEST)):
                raise ValueError(f"its header would have {length:,} bytes, and at most {max(most, 0):,} can be read")
            found = parse(file.read(length).decode())
        return _parsed(found, size - _LENGTH - length)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a valid safetensors file: {shown(error)}") from error


def _parsed(header: Any, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and texts of a header. size: bytes of data behind it."""
    about = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise ValueError("its header is no table of tensors and texts")
    sharding = parse(about.get(SHARDING, "{}"))
    if not isinstance(sharding, dict):
        raise ValueError(f"{SHARDING} is no table")
    entries = {name: _entry(name, entry, sharding) for name, entry in header.items()}
    end = 0
    for chunk, begin in sorted(entries.values(), key=lambda entry: (entry.begin, entry.chunk.bytes)):
        if begin != end:
            raise ValueError(f"its tensors leave a gap, or overlap, at byte {min(begin, end)} of the data")
        end += chunk.bytes
    if end != size:
        raise ValueError(f"its tensors have {end:,} bytes, and {size:,} follow the header")
    return entries, about


def _entry(name: str, entry: Any, sharding: Mapping[str, Any]) -> Entry:
    places: Any = sharding.get(name)
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    offsets: Any = places.get(OFFSETS) if isinstance(places, dict) else None
    if not isinstance(dtype, str) or dtype not in DTYPES or not are_sizes(shape) or not are_sizes(ends):
        raise ValueError(f"{name} has no valid dtype, shape and data_offsets")
    if name in sharding and (not are_sizes(offsets) or len(offsets) != len(shape)):
        raise ValueError(f"{name} has no valid {OFFSETS}")
    chunk = Chunk(DTYPES[dtype], tuple(shape), tuple(offsets) if name in sharding else None)
    if len(ends) != 2 or ends[1] - ends[0] != chunk.bytes:
        raise ValueError(f"{name} is not as long as its type and shape say")
    return Entry(chunk, ends[0])


def are_sizes(numbers: object, least: int = 0) -> TypeGuard[list[int]]:
    """Whether a value read from JSON is a list of whole numbers that can be sizes of a tensor, or places in a file."""
    if not isinstance(numbers, list) or len(numbers) > MOST_DIMENSIONS:
        return False
    return all(type(number) is int and least <= number <= MOST_BYTES for number in numbers)


class DataFile:
    """A file that is open to read. Errors of its disk, and an end before its time, are raised as CheckpointErrors."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begin = file, _LENGTH + int.from_bytes(file.read(_LENGTH), "little")

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[DataFile]:
        """A plain file, which no link leads to, and of which somebody has read the header."""
        size_of(path)
        try:
            with path.open("rb", buffering=0) as file:
                yield cls(file)
        except OSError as error:
            raise cannot_be_read(path, error) from error

    def read(self, into: Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype, bounds: Sequence[slice]) -> None:
        """Copy a part of a chunk into a tensor, of that part's shape.

        begin: of the chunk, counted from the end of the header.  bounds: a slice of each dimension of its `shape`.
        """
        if not shape:
            into, shape, bounds = into[None], (1,), (slice(0, 1),)
        rows, *others = bounds
        row = math.prod(shape[1:]) * dtype.itemsize
        whole = all(bound == slice(0, size) for bound, size in zip(others, shape[1:], strict=True))
        step = max(1, READ_AT_ONCE // row)
        for first in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - first)
            part = into[first - rows.start :][:count]
            straight = whole and part.device.type == "cpu" and part.dtype is dtype and part.is_contiguous()
            values = part if straight else torch.empty((count, *shape[1:]), dtype=dtype)
            self._fill(_bytes_of(values), self._begin + begin + first * row)
            if not straight:
                part.copy_(values[(slice(None), *others)])

    def _fill(self, memory: memoryview, at: int) -> None:
        self._file.seek(at)
        while len(memory):
            count = self._file.readinto(memory)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{self._file.name} is truncated")
            memory = memory[count:]
