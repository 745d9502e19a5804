"""Reads the tensors that torch.save wrote into data files, without torch.load.

torch.load, even restricted to weights, accepts any class that an imported package has declared safe, old formats, and
compressed zips that expand to any size. A checkpoint contains only one form of zip, whose pickle gives type, shape and
strides of a tensor. Only this form is read, and the bytes go directly into the tensor.
"""

import io
import math
import struct
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from titan.checkpoint.disk import unpickle
from titan.checkpoint.disk.index import DTYPES
from titan.checkpoint.disk.plain import cannot_be_read
from titan.checkpoint.disk.unpickle import PERSISTENT, Name, Record
from titan.errors import CheckpointError

_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
}  # fmt: skip
_UNTYPED = "torch.storage.UntypedStorage"
_TYPED_TENSOR, _UNTYPED_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_ORDERED = "collections.OrderedDict"
_KNOWN = frozenset({*_STORAGES, *DTYPES, _UNTYPED, _TYPED_TENSOR, _UNTYPED_TENSOR, _ORDERED})

_PICKLE, _BYTES, _ORDER = "data.pkl", "data/0", "byteorder"
_ENTRIES = {_PICKLE, _BYTES, _ORDER, "version", ".format_version", ".storage_alignment", ".data/serialization_id"}
_LARGEST_ENTRY = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any, /) -> int:
        free = memoryview(buffer)[: max(0, self.length - self.at)]
        try:
            self.file.seek(self.start + self.at)
            count = self.file.readinto(free)  # type: ignore[attr-defined]
        except OSError as error:  # zipfile would say of it that the file is no zip
            raise cannot_be_read(Path(self.file.name), error) from error
        self.at += count
        return int(count)


def read_tensor(file: BinaryIO, start: int, length: int, dtype: torch.dtype, size: Sequence[int], where: str) -> Tensor:
    """The tensor that a stretch of a data file holds, on the CPU; a CheckpointError where it holds something else.

    dtype, size: as the metadata has them.  where: which tensor in which file, for messages.
    """
    try:
        return _read_tensor(_Window(file, start, length), dtype, tuple(size), where)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile and torch raise many kinds on bytes that are not theirs
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


def _read_tensor(file: _Window, dtype: torch.dtype, size: tuple[int, ...], where: str) -> Tensor:
    with zipfile.ZipFile(file) as archive:
        entries = _entries(archive.infolist(), file.length, where)
    if _content(file, entries[_ORDER], where) != sys.byteorder.encode():
        raise CheckpointError(f"{where} has another byte order than this machine's, {sys.byteorder}")
    tree = unpickle.read(_content(file, entries[_PICKLE], where), _KNOWN, where)
    offset, stride = _layout(tree, dtype, size, entries[_BYTES].file_size, where)
    data = torch.empty(entries[_BYTES].file_size, dtype=torch.uint8)
    _fill(file, entries[_BYTES], data.numpy().data, where)
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    return data.view(dtype).as_strided(size, stride, offset)


def _entries(found: Sequence[zipfile.ZipInfo], length: int, where: str) -> dict[str, zipfile.ZipInfo]:
    entries = {info.filename.partition("/")[2]: info for info in found}
    foreign = entries.keys() - _ENTRIES
    if foreign or len(entries) != len(found) or not {_PICKLE, _BYTES, _ORDER} <= entries.keys():
        raise CheckpointError(f"{where} holds other files than a tensor's: {sorted(entries)[:10]}")
    for name, info in entries.items():
        large = info.file_size > (length if name == _BYTES else _LARGEST_ENTRY)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or large:
            raise CheckpointError(f"{where} has a {name} that is compressed, or too large")
    return entries


def _content(file: _Window, info: zipfile.ZipInfo, where: str) -> bytes:
    content = bytearray(info.file_size)
    _fill(file, info, memoryview(content), where)
    return bytes(content)


def _fill(file: _Window, info: zipfile.ZipInfo, into: memoryview, where: str) -> None:
    """Read an entry that is not compressed."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size) or b""
    magic, *_, name, extra = _LOCAL_HEADER.unpack(header)
    if magic != b"PK\x03\x04":
        raise CheckpointError(f"{where} has no {info.filename} where its index says")
    file.seek(info.header_offset + _LOCAL_HEADER.size + name + extra)
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise CheckpointError(f"{where} is truncated")
        done += count


def _layout(
    tree: Any, dtype: torch.dtype, size: tuple[int, ...], nbytes: int, where: str
) -> tuple[int, tuple[int, ...]]:
    """Storage offset and strides, both in elements, of the tensor that a pickle describes."""
    other = CheckpointError(f"{where} is not the tensor {list(size)} of {dtype} that the metadata describes")
    if type(tree) is not Record or tree.maker not in (_TYPED_TENSOR, _UNTYPED_TENSOR) or tree.state is not None:
        raise other
    storage, offset, shape, stride, _, hooks, *more = tree.args
    if not (type(storage) is Record and storage.maker == PERSISTENT and type(storage.args[0]) is tuple):
        raise other
    if type(hooks) is not Record or hooks.maker != _ORDERED or hooks.args:
        raise other
    kind, name, *_ = storage.args[0]
    if kind != "storage" or type(name) is not Name or shape != size or len(more) != (tree.maker == _UNTYPED_TENSOR):
        raise other
    found = more[0] if more else name
    types = {**DTYPES, _UNTYPED: None} if more else _STORAGES
    if type(found) is not Name or types.get(found.full) is not dtype or (more and name.full != _UNTYPED):
        raise other
    numbers = (offset, *stride) if type(stride) is tuple else ()
    if len(numbers) != len(size) + 1 or not all(type(number) is int and number >= 0 for number in numbers):
        raise other
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if nbytes % dtype.itemsize or (math.prod(size) and last >= nbytes // dtype.itemsize):
        raise other
    return offset, stride
