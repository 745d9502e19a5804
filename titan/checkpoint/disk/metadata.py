"""DCP's `.metadata`, read without executing it, and checked against the files it names.

Every field is checked before a DCP object is made of it. The pieces of a tensor tile it. Each piece has one place in a
file of the checkpoint, which is large enough and not shared with another piece. So no tensor is allocated that is
larger than the files, and none stays partly uninitialized.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan.checkpoint.disk import manifest, unpickle
from titan.checkpoint.disk.plain import read_bytes
from titan.checkpoint.disk.unpickle import Name, Pairs, Record
from titan.errors import CheckpointError

MODEL, OPTIMIZER, REST = "model.", "optimizer.", "rest."
"""What names of tensors begin with."""

LARGEST = 2 << 30
"""Bytes of metadata that are read; a piece takes about 150."""

DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
        "bool", "complex128", "complex64",
    )
}  # fmt: skip
"""Types of tensors that a checkpoint can hold."""

_DCP = "torch.distributed.checkpoint.metadata."
_BYTES, _INFO = f"{_DCP}BytesStorageMetadata", "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT, _SIZE, _FORMAT = "torch.serialization._get_layout", "torch.Size", f"{_DCP}_MEM_FORMAT_ENCODING"
_OBJECTS = tuple(
    f"{_DCP}{name}"
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
)
_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _INDEX = _OBJECTS
_KNOWN = frozenset({*DTYPES, *_OBJECTS, _BYTES, _INFO, _LAYOUT, _SIZE, _FORMAT})

_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 60


def read(path: Path, pieces: Mapping[str, manifest.Piece]) -> Metadata:
    """The metadata of a checkpoint whose manifest lists these pieces.

    Raises:
        CheckpointError: it is not what a writer of checkpoints leaves, or does not agree with the pieces.
    """
    file = path / manifest.METADATA
    tree = unpickle.read(read_bytes(file, LARGEST), _KNOWN, str(file))
    try:
        return _metadata(tree, {name: piece.size for name, piece in pieces.items() if name.endswith(".distcp")})
    except _Unlike as unlike:
        raise CheckpointError(f"{file} is not valid checkpoint metadata: {unlike}") from unlike


class _Unlike(ValueError):
    """A part of the tree that is not as the writer makes it."""


def _require(holds: object, what: str) -> None:
    if not holds:
        raise _Unlike(what)


def _metadata(tree: Any, sizes: Mapping[str, int]) -> Metadata:
    fields = _fields(tree, _METADATA)
    _require(fields.get("planner_data") is None, "planner_data is not empty")
    _require(fields.get("storage_meta") is None, "storage_meta is not empty")
    version = fields.get("version")
    _require(version is None or type(version) is str, "its version is no text")
    stored = _stored(fields.get("storage_data"), sizes)
    entries = _table(fields.get("state_dict_metadata"), "state_dict_metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = 0
    for name, entry in entries:
        _require(type(name) is str and name.startswith((MODEL, OPTIMIZER, REST)), "a tensor's name is none")
        _require(name not in tensors, f"{name} stands there twice")
        tensors[name] = tensor = _tensor(name, entry, stored)
        places += len(tensor.chunks)
    _require(places == len(stored), "it has places of pieces that no tensor has")
    return Metadata(tensors, storage_data=stored, storage_meta=StorageMeta(), version=version)


def _fields(tree: Any, maker: str) -> dict[str, Any]:
    """Fields of an object that was made without arguments and then given its state as a table."""
    _require(type(tree) is Record and tree.maker == maker and tree.args == (), f"a {maker} is something else")
    pairs = _table(tree.state, maker)
    _require(all(type(key) is str for key, _ in pairs), f"a field of {maker} has no name")
    return dict(pairs)


def _table(value: Any, what: str) -> Pairs:
    _require(type(value) is Pairs, f"{what} is no table")
    pairs: Pairs = value
    return pairs


def _text(value: Any, what: str) -> str:
    _require(type(value) is str, f"{what} is no text")
    text: str = value
    return text


def _count(value: Any, what: str) -> int:
    _require(type(value) is int and 0 <= value < _MOST_ELEMENTS, f"{what[:200]} is somewhere that is no number")
    count: int = value
    return count


def _size(tree: Any) -> torch.Size:
    """A shape or an offset."""
    _require(type(tree) is Record and tree.maker == _SIZE and tree.state is None and len(tree.args) == 1, "a bad size")
    numbers = tree.args[0]
    _require(type(numbers) is tuple and len(numbers) <= _MOST_DIMENSIONS, "a bad size")
    _require(all(type(number) is int and number >= 0 for number in numbers), "a size that is no number")
    _require(math.prod(max(number, 1) for number in numbers) <= _MOST_ELEMENTS, "a size beyond all memory")
    return torch.Size(numbers)


def _stored(tree: Any, sizes: Mapping[str, int]) -> dict[MetadataIndex, _StorageInfo]:
    """Where each piece stands; no two overlap."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in _table(tree, "storage_data"):
        index, info = _fields(key, _INDEX), _fields(value, _INFO)
        _require(info.keys() == {"relative_path", "offset", "length"}, "the place of a piece is no place")
        name, file = _text(index.get("fqn"), "the name of a piece"), _text(info["relative_path"], "the file of a piece")
        offset, length = _count(info["offset"], name), _count(info["length"], name)
        _require(file in sizes, f"{name} is in {file[:200]!r}, which its manifest does not list")
        _require(length and offset + length <= sizes[file], f"{name} ends behind the end of {file}")
        place = MetadataIndex(name, _size(index.get("offset")))
        _require(place not in places, f"a piece of {name} has two places")
        places[place] = _StorageInfo(file, offset, length)
    ordered = sorted((info.relative_path, info.offset, info.length) for info in places.values())
    for (file, offset, length), (following, start, _) in itertools.pairwise(ordered):
        _require(file != following or offset + length <= start, f"two pieces overlap in {file}")
    return places


def _tensor(name: str, tree: Any, stored: Mapping[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    if type(tree) is Record and tree.maker == _BYTES:
        raise _Unlike(f"{name} is a serialized object, not a tensor")
    fields = _fields(tree, _TENSOR)
    dtype, size = _dtype(name, fields.get("properties")), _size(fields.get("size"))
    listed = fields.get("chunks")
    _require(type(listed) is list and 0 < len(listed) <= len(stored), f"{name} has no pieces")
    said = [_fields(each, _CHUNK) for each in listed or ()]
    chunks = [ChunkStorageMetadata(_size(one.get("offsets")), _size(one.get("sizes"))) for one in said]
    _require(_tile(size, chunks), f"the pieces of {name} do not make it up")
    for chunk in chunks:
        info = stored.get(MetadataIndex(name, chunk.offsets))
        _require(info is not None, f"a piece of {name} has no place")
        needed = chunk.sizes.numel() * dtype.itemsize
        _require(info is not None and needed <= info.length, f"a piece of {name} is larger than its place")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _dtype(name: str, tree: Any) -> torch.dtype:
    """The type, from properties of which nothing else is used."""
    good = type(tree) is Record and tree.maker == _PROPERTIES and tree.args == ()
    _require(good and type(tree.state) is tuple and len(tree.state) == 5, f"{name} has no properties")
    dtype, layout, *_ = tree.state
    _require(type(dtype) is Name and dtype.full in DTYPES, f"{name} has no dtype")
    _require(type(layout) is Record and layout.args == ("torch.strided",), f"{name} is not strided")
    found: torch.dtype = DTYPES[dtype.full]
    return found


def _tile(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether chunks make up a tensor: cut along each dimension, one chunk for each cell, as all sharding leaves them.

    Ranks without a share leave empty chunks, which count for nothing.
    """
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    within = all(
        offset + length <= whole
        for chunk in chunks
        for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )
    filled = [chunk for chunk in chunks if chunk.sizes.numel()]
    if not within or not filled:
        return within and size.numel() == 0
    ends = [_ends((chunk.offsets[dim] for chunk in filled), size[dim]) for dim in range(len(size))]
    fit = all(
        offset + length == ends[dim][offset]
        for chunk in filled
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True))
    )
    starts = all(0 in cuts for cuts in ends)
    distinct = len({tuple(chunk.offsets) for chunk in filled}) == len(filled)
    return fit and starts and distinct and len(filled) == math.prod(map(len, ends))


def _ends(offsets: Iterable[int], whole: int) -> dict[int, int]:
    """Where a cell that starts at each of these offsets ends."""
    cuts = sorted(set(offsets))
    return dict(zip(cuts, [*cuts[1:], whole], strict=True))
