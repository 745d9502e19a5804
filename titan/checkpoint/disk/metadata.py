"""DCP's `.metadata`: written for other readers of DCP, and held against the index by `titan checkpoint verify`.

It is read without executing it, and checked against the files it names. Every field is checked before it is used. The
chunks of a tensor tile it. Each chunk has one place in a file of the checkpoint, which is large enough and not shared
with another chunk. So no tensor is allocated that is larger than the files, and none stays partly uninitialized.
"""

import copyreg
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import IO, Any, cast

import numpy as np
import torch

from titan.checkpoint.disk import index as indexes
from titan.checkpoint.disk import manifest, unpickle
from titan.checkpoint.disk.index import DTYPES, MODEL, OPTIMIZER, REST, Index, Ints, StoredTensor, grid
from titan.checkpoint.disk.plain import read_bytes, synced
from titan.checkpoint.disk.unpickle import Name, Pairs, Record
from titan.errors import CheckpointError
from titan.log import log

LARGEST = 2 << 30
"""Bytes of metadata that are read; a chunk takes about 150."""

ASIDE = 50_000
"""More chunks than this are pickled by another process: a second of it would take Python's lock from training."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""What that process does not hear."""

_DCP = "torch.distributed.checkpoint.metadata."
_BYTES, _INFO = f"{_DCP}BytesStorageMetadata", "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT, _SIZE, _FORMAT = "torch.serialization._get_layout", "torch.Size", f"{_DCP}_MEM_FORMAT_ENCODING"
_OBJECTS = tuple(
    f"{_DCP}{name}"
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
)
_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _INDEX = _OBJECTS
_KNOWN = frozenset({*DTYPES, *_OBJECTS, _BYTES, _INFO, _LAYOUT, _SIZE, _FORMAT})

Place = tuple[str, int, int]
"""Of a chunk: its file, first byte and length."""
Key = tuple[str, torch.Size]  # of a chunk: (tensor, offsets)
Chunk = tuple[torch.Size, torch.Size]  # (offsets, sizes)


def write(path: Path, index: Index) -> None:
    """Write the `.metadata` of a checkpoint whose index has been written."""
    if len(index.file) <= ASIDE or not _pickle_aside(path):
        _pickle(path, index)


def _pickle_aside(path: Path) -> bool:
    """Let another process write `.metadata` from the index; returns whether it has.

    A scheduler's signals go to every process of a job, and must not end this one: the save goes on. It ends when this
    process does, so that it writes nothing into a folder that is a later run's by then.
    """
    words = [sys.executable, "-c", f"from {__name__} import main; main()", str(path)]
    places = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a new process inherits the mask
    try:
        child = subprocess.Popen(words, env=places, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        log.warning(f"the process that writes {path / manifest.METADATA} could not be started: {error}")
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with child:
        assert child.stderr is not None
        said = child.stderr.read().strip().splitlines()
    if child.returncode:
        why = said[-1] if said else f"exit code {child.returncode}"
        log.warning(f"the process that writes {path / manifest.METADATA} failed ({why}); this one writes it")
    return not child.returncode


def main() -> None:
    """Write the `.metadata` of the folder that is the only argument."""
    Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # its passes over millions of objects, none of them garbage, take as long as the rest
    folder = Path(sys.argv[1])
    on_disk = {file.name: file.stat().st_size for file in folder.iterdir()}
    _pickle(folder, indexes.read(folder / manifest.INDEX, on_disk))


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent, which writes nothing, is gone
    os._exit(1)


def _pickle(path: Path, index: Index) -> None:
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    tensors: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places = {}
    for name, stored in index.tensors.items():
        chunks = []
        for number, (offsets, sizes) in enumerate(stored.cells()):
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = filesystem._StorageInfo(*index.place(stored.first + number))
            places[dcp.MetadataIndex(name, offsets, number)] = place
        tensors[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=stored.dtype), stored.shape, chunks)
    # Nothing of DCP's own: its storage_meta would tell the folder's path to whoever gets the checkpoint.
    whole = dcp.Metadata(tensors, storage_data=places, version=filesystem.CURRENT_DCP_VERSION)
    with synced(path / manifest.METADATA) as file:
        dump(whole, file)


def dump(metadata: Any, file: IO[bytes]) -> None:
    """Pickle DCP's metadata, alike on every Python: 3.11.0 to 3.11.3 would write a call of getattr for an enum, which
    readers refuse."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    pickler = pickle.Pickler(file)
    by_value: dict[type, Any] = {_MEM_FORMAT_ENCODING: lambda member: (type(member), (member.value,))}
    pickler.dispatch_table = copyreg.dispatch_table | by_value
    pickler.dump(metadata)


def read(path: Path, entries: Mapping[str, manifest.FileEntry]) -> Index:
    """Where the tensors of a checkpoint are; takes 0.1 ms per chunk.

    entries: what its manifest lists.  Raises a CheckpointError where this does not agree with it.
    """
    file = path / manifest.METADATA
    tree = unpickle.read(read_bytes(file, LARGEST), _KNOWN, str(file))
    try:
        return _index(tree, manifest.data_sizes(entries))
    except ValueError as unlike:
        raise CheckpointError(f"{file} is not valid checkpoint metadata: {unlike}") from unlike


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _index(tree: Any, sizes: Mapping[str, int]) -> Index:
    fields = _fields(tree, _METADATA)
    _require(fields.get("planner_data") is None, "planner_data is not empty")
    _require(fields.get("storage_meta") is None, "storage_meta is not empty")
    version = fields.get("version")
    _require(version is None or type(version) is str, "its version is no text")
    stored = _stored(fields.get("storage_data"), sizes)
    tensors: dict[str, StoredTensor] = {}
    places: list[Place] = []
    listed = 0
    for name, entry in _table(fields.get("state_dict_metadata"), "state_dict_metadata"):
        _require(type(name) is str and name.startswith((MODEL, OPTIMIZER, REST)), "a tensor's name is none")
        _require(name not in tensors, f"{name} stands there twice")
        dtype, shape, chunks = _tensor(name, entry, stored)
        cuts, found = _cells(name, shape, chunks, stored)
        tensors[name] = StoredTensor(dtype, shape, cuts, len(places))
        places += found
        listed += len(chunks)
    _require(listed == len(stored), "it has places of chunks that no tensor has")
    number = {file: i for i, file in enumerate(sizes)}
    columns = np.array([(number[file], start, length) for file, start, length in places], np.int64).reshape(-1, 3).T
    index = Index(tuple(sizes), tensors, *columns)
    indexes.check(index, sizes)
    return index


def _fields(tree: Any, maker: str) -> dict[str, Any]:
    """Fields of an object that was made without arguments and then given its state as a table."""
    _require(type(tree) is Record and tree.maker == maker and tree.args == (), f"a {maker} is something else")
    pairs = _table(tree.state, maker)
    _require(all(type(key) is str for key, _ in pairs), f"a field of {maker} has no name")
    return dict(pairs)


def _table(value: Any, what: str) -> Pairs:
    _require(type(value) is Pairs, f"{what} is no table")
    return cast(Pairs, value)


def _text(value: Any, what: str) -> str:
    _require(type(value) is str, f"{what} is no text")
    return cast(str, value)


def _count(value: Any, what: str) -> int:
    _require(type(value) is int and 0 <= value < indexes.MOST_ELEMENTS, f"{what[:200]} is somewhere that is no number")
    return cast(int, value)


def _size(tree: Any) -> torch.Size:
    """A shape or an offset."""
    _require(type(tree) is Record and tree.maker == _SIZE and tree.state is None and len(tree.args) == 1, "a bad size")
    numbers = tree.args[0]
    _require(type(numbers) is tuple and len(numbers) <= indexes.MOST_DIMENSIONS, "a bad size")
    _require(all(type(number) is int and number >= 0 for number in numbers), "a size that is no number")
    _require(math.prod(max(number, 1) for number in numbers) <= indexes.MOST_ELEMENTS, "a size beyond all memory")
    return torch.Size(numbers)


def _stored(tree: Any, sizes: Mapping[str, int]) -> dict[Key, Place]:
    places: dict[Key, Place] = {}
    for key, value in _table(tree, "storage_data"):
        index, info = _fields(key, _INDEX), _fields(value, _INFO)
        _require(info.keys() == {"relative_path", "offset", "length"}, "the place of a chunk is no place")
        name, file = _text(index.get("fqn"), "the name of a chunk"), _text(info["relative_path"], "the file of a chunk")
        start, length = _count(info["offset"], name), _count(info["length"], name)
        _require(file in sizes, f"{name} is in {file[:200]!r}, which its manifest does not list")
        _require(length and start + length <= sizes[file], f"{name} ends behind the end of {file}")
        place = name, _size(index.get("offset"))
        _require(place not in places, f"a chunk of {name} has two places")
        places[place] = file, start, length
    return places


def _tensor(name: str, tree: Any, stored: Mapping[Key, Place]) -> tuple[torch.dtype, torch.Size, list[Chunk]]:
    """Type, shape, and (offsets, sizes) of each chunk, all of which have a place."""
    if type(tree) is Record and tree.maker == _BYTES:
        raise ValueError(f"{name} is a serialized object, not a tensor")
    fields = _fields(tree, _TENSOR)
    dtype, shape = _dtype(name, fields.get("properties")), _size(fields.get("size"))
    listed = fields.get("chunks")
    _require(type(listed) is list and 0 < len(listed) <= len(stored), f"{name} has no chunks")
    said = [_fields(each, _CHUNK) for each in listed or ()]
    chunks = [(_size(one.get("offsets")), _size(one.get("sizes"))) for one in said]
    for offsets, sizes in chunks:
        fits = len(offsets) == len(sizes) == len(shape)
        within = fits and all(a + b <= whole for a, b, whole in zip(offsets, sizes, shape, strict=True))
        _require(within, f"the chunks of {name} do not make it up")
        _require((name, offsets) in stored, f"a chunk of {name} has no place")
    return dtype, shape, chunks


def _cells(
    name: str, shape: torch.Size, chunks: list[Chunk], stored: Mapping[Key, Place]
) -> tuple[tuple[Ints, ...], list[Place]]:
    """The cuts of a tensor, and the place of each of its cells. Chunks of ranks without a share hold nothing."""
    whole = torch.Size([0] * len(shape)), shape
    filled = [chunk for chunk in chunks if chunk[1].numel()] if shape.numel() else [whole]
    _require(filled and (name, filled[0][0]) in stored, f"the chunks of {name} do not make it up")
    offsets, sizes = (np.array(some, np.int64).reshape(len(filled), len(shape)) for some in zip(*filled, strict=True))
    try:
        cuts, cells = grid(shape, offsets, sizes)
    except ValueError:
        raise ValueError(f"the chunks of {name} do not make it up") from None
    _require(len(np.unique(cells)) == len(filled), f"the chunks of {name} do not make it up")
    return cuts, [stored[name, filled[i][0]] for i in np.argsort(cells)]


def _dtype(name: str, tree: Any) -> torch.dtype:
    """The type, from properties of which nothing else is used."""
    good = type(tree) is Record and tree.maker == _PROPERTIES and tree.args == ()
    # A sixth, from PyTorch 2.15 on, has the strides of the tensor that was saved, which its file does not have.
    _require(good and type(tree.state) is tuple and len(tree.state) in (5, 6), f"{name} has no properties")
    dtype, layout, *_ = tree.state
    _require(type(dtype) is Name and dtype.full in DTYPES, f"{name} has no dtype")
    _require(type(layout) is Record and layout.args == ("torch.strided",), f"{name} is not strided")
    return cast(torch.dtype, DTYPES[dtype.full])
