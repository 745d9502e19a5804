"""Malicious checkpoints: DCP's files, .metadata and tensor data, with what is said when each is refused."""

import collections
import io
import os
import pickle
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from bench.mutations import reseal

NAME = "model.out.weight"
DATA = "__0_0.distcp"


def _plant() -> None:
    Path(os.environ["PLANTED"]).touch()


COMMAND = 'touch "$PLANTED"'
CODE = "__import__('pathlib').Path(__import__('os').environ['PLANTED']).touch()"


@dataclass(frozen=True)
class Calls:
    """Pickled as a call."""

    what: Any
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.what, self.args


EVIL = Calls(os.system, (COMMAND,))


def _raw(*ops: bytes) -> bytes:
    return b"\x80\x04" + b"".join(ops) + b"."


def _str(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _name(module: str, name: str) -> bytes:
    return _str(module) + _str(name) + b"\x93"


METADATA_CLASS = _name("torch.distributed.checkpoint.metadata", "Metadata")

PICKLES: dict[str, tuple[bytes, str]] = {
    "a call of os.system": (pickle.dumps(EVIL), r"names '(posix|os)\.system'"),
    "a call of eval": (pickle.dumps(Calls(eval, (CODE,))), r"names 'builtins\.eval'"),
    "a call of getattr": (_raw(_name("builtins", "getattr"), b"(K\x01K\x02tR"), r"names 'builtins\.getattr'"),
    "a call of this file's": (pickle.dumps(Calls(_plant, ())), r"names 'tests\.malicious_checkpoints\._plant'"),
    "the oldest protocol": (pickle.dumps(EVIL, 0), "opcode|names '"),
    "protocol 2": (pickle.dumps(EVIL, 2), "names '"),
    "a dotted name": (
        _raw(_name("torch.distributed.checkpoint.metadata", "os.system"), _str(COMMAND), b"\x85R"),
        r"names 'torch\.distributed\.checkpoint\.metadata\.os\.system'",
    ),
    "a name of a module's import": (_raw(_name("torch.serialization", "os")), r"names 'torch\.serialization\.os'"),
    "a name that is no text": (_raw(b"K\x01K\x02\x93"), "names '1.2'"),
    "an instance by name": (_raw(b"(", _str(COMMAND), b"ios\nsystem\n"), "opcode b'i'"),
    "an instance by class": (_raw(b"(", _name("os", "system"), _str(COMMAND), b"o"), "names '"),
    "new with keywords": (_raw(METADATA_CLASS, b")}\x92"), r"opcode b'\\x92'"),
    "a persistent id": (_raw(_str("storage"), b"Q"), "is something else"),
    "an extension code": (_raw(b"\x82\x01"), r"opcode b'\\x82'"),
    "bytes without end": (_raw(b"\x8e" + struct.pack("<Q", 1 << 60)), r"opcode b'\\x8e'"),
    "text without end": (_raw(b"X\xff\xff\xff\xff"), "is a truncated pickle"),
    "a number without end": (_raw(b"\x8b\xff\xff\xff\x7f"), r"opcode b'\\x8b'"),
    "a long number": (_raw(b"\x8a\x20" + b"\xff" * 32), "number of 32 bytes"),
    "a memo without end": (_raw(b"N", b"r\xff\xff\xff\x7f"), "is something else"),
    "a call of the result of a call": (_raw(_name("torch", "Size"), b")R)R"), "calls a Record"),
    "state on a class": (
        _raw(METADATA_CLASS, b"}", _str("__init__"), _name("torch", "Size"), b"sb"),
        "sets the state of a Name",
    ),
    "state on a type": (_raw(_name("torch", "float32"), b"}b"), "sets the state of a Name"),
    "state for slots": (_raw(METADATA_CLASS, b")\x81", b"}}", _str("__class__"), b"Ns\x86b"), "is no table"),
    "state twice": (_raw(METADATA_CLASS, b")\x81}b}b"), "sets the state of a Record"),
    "items on an object": (_raw(METADATA_CLASS, b")\x81", _str("a"), b"Ns"), "sets an item of a Record"),
    "appending to a tuple": (_raw(b")Na"), "appends to a tuple"),
    "arguments for a class": (_raw(METADATA_CLASS, b"N\x85\x81}b"), "is something else"),
    "a deep tuple": (_raw(b")", b"\x85" * 100_000), "is something else"),
    "a list within itself": (_raw(b"]\x94h\x00a"), "is something else"),
    "marks without end": (_raw(b"(" * 100_000), "is a pickle with unused data"),
    "an empty stack": (_raw(b"0"), "opcode b'0'"),
    "nothing": (b"", "not a valid pickle"),
    "more behind the end": (_raw(b"N") + pickle.dumps(EVIL), "is a pickle with unused data"),
}
"""Name -> (what .metadata is replaced by, what is said)."""


def _tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[NAME]


def _chunk(metadata: Metadata) -> Any:
    return _tensor(metadata).chunks[0]


def place(metadata: Metadata) -> _StorageInfo:
    found: _StorageInfo = metadata.storage_data[MetadataIndex(NAME, [0, 0])]
    return found


def set_at(at: Callable[[Metadata], Any], **values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in values.items():
            setattr(at(metadata), name, value)

    return change


def _resize(size: list[int], chunk: list[int] | None = None) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        _tensor(metadata).size = torch.Size(size)
        _chunk(metadata).sizes = torch.Size(chunk or size)

    return change


def _same_bytes(metadata: Metadata) -> None:
    other = metadata.storage_data[MetadataIndex("optimizer.out.weight.exp_avg", [0, 0])]
    place(metadata).offset, place(metadata).length = other.offset, other.length


def _renamed(name: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata.update({name: metadata.state_dict_metadata.pop(NAME)})


Calls.__hash__ = lambda self: 1  # type: ignore[method-assign, assignment]

METADATA: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "code as planner_data": (lambda m: setattr(m, "planner_data", EVIL), r"names '(posix|os)\.system'"),
    "code as storage_meta": (lambda m: setattr(m, "storage_meta", EVIL), r"names '(posix|os)\.system'"),
    "code as version": (lambda m: setattr(m, "version", EVIL), r"names '(posix|os)\.system'"),
    "code as a name": (_renamed(EVIL), r"names '(posix|os)\.system'"),
    "code as a file": (set_at(place, relative_path=EVIL), r"names '(posix|os)\.system'"),
    "code as a size": (set_at(_chunk, sizes=EVIL), r"names '(posix|os)\.system'"),
    "planner_data": (lambda m: setattr(m, "planner_data", {"a": 1}), "planner_data is not empty"),
    "bytes for a tensor": (
        lambda m: m.state_dict_metadata.update({NAME: BytesStorageMetadata()}),
        f"{NAME} is a serialized object",
    ),
    "a foreign name": (_renamed("elsewhere"), "a tensor's name is none"),
    "a file above": (set_at(place, relative_path=f"../{DATA}"), r"'\.\./__0_0\.distcp', which its manifest does not"),
    "a file at the root": (set_at(place, relative_path="/etc/passwd"), "'/etc/passwd', which its manifest does not"),
    "a file below": (set_at(place, relative_path="a/b"), "'a/b', which its manifest does not"),
    "state.json as data": (set_at(place, relative_path="state.json"), "'state.json', which its manifest does not"),
    "a file that is no text": (set_at(place, relative_path=3), "the file of a chunk is no text"),
    "a negative offset": (set_at(place, offset=-1), "is somewhere that is no number"),
    "a true offset": (set_at(place, offset=True), "is somewhere that is no number"),
    "an end behind the end": (set_at(place, length=1 << 40), "ends behind the end"),
    "a length of nothing": (set_at(place, length=0), "ends behind the end"),
    "a transform": (set_at(place, transform_descriptors=["zstd"]), "the place of a chunk is no place"),
    "bytes for two tensors": (_same_bytes, f"two chunks overlap in {DATA}"),
    "a tensor of terabytes": (_resize([1 << 20, 1 << 20]), "larger than its place"),
    "a tensor beyond memory": (_resize([1 << 40, 1 << 40]), "beyond all memory"),
    "an empty tensor beyond memory": (_resize([0, 1 << 61]), "beyond all memory"),
    "many dimensions": (_resize([1] * 100), "a bad size"),
    "a chunk too small": (_resize([3, 5], [3, 4]), "do not make it up"),
    "a chunk that sticks out": (_resize([3, 3], [3, 4]), "do not make it up"),
    "a chunk elsewhere": (set_at(_chunk, offsets=torch.Size([1, 0])), "do not make it up"),
    "a chunk of other dimensions": (_resize([3, 4], [12]), "do not make it up"),
    "no chunk": (lambda m: _tensor(m).chunks.clear(), "has no chunks"),
    "a chunk twice": (lambda m: _tensor(m).chunks.append(_chunk(m)), "do not make it up"),
    "an unknown dtype": (lambda m: setattr(_tensor(m).properties, "dtype", torch.qint8), r"names 'torch\.qint8'"),
    "a sparse layout": (lambda m: setattr(_tensor(m).properties, "layout", torch.sparse_coo), "is not strided"),
    "no places": (lambda m: m.storage_data.clear(), "has no chunks"),
}
"""Name -> (change of DCP's metadata, what is said)."""


def _saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _rezipped(change: Callable[[dict[str, bytes]], None], **options: Any) -> bytes:
    """What torch.save leaves, its entries changed."""
    with zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(3, 4)))) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    change(entries)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def _with(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda entries: entries.update({f"archive/{name}": content})


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return file.getvalue()


def _strided(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """A tensor that claims other elements than its storage has."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 12) if value is ... else None

    rebuild = torch._utils._rebuild_tensor_v2
    empty = collections.OrderedDict()  # type: ignore[var-annotated]
    Pickler(file, 2).dump(Calls(rebuild, (..., offset, size, stride, False, empty)))
    return _rezipped(_with("data.pkl", file.getvalue()))


def _claiming(size: int) -> bytes:
    """What torch.save leaves, with another size of the storage in the index at its end."""
    content = bytearray(_rezipped(lambda entries: None))
    entry = content.rindex(b"archive/data/0") - 46
    content[entry + 20 : entry + 28] = struct.pack("<2L", size, size)
    return bytes(content)


PAYLOADS: dict[str, tuple[bytes, str]] = {
    "code in the pickle": (_rezipped(_with("data.pkl", pickle.dumps(EVIL, 2))), r"names '(posix|os)\.system'"),
    "code that torch saved": (_saved(EVIL), "asks for|other files"),
    "the old format": (_saved(torch.zeros(3, 4), _use_new_zipfile_serialization=False), "cannot be read: BadZipFile"),
    "code in the old format": (_saved(EVIL, _use_new_zipfile_serialization=False), "cannot be read: BadZipFile"),
    "a bare pickle": (pickle.dumps(EVIL) + bytes(100), "cannot be read: BadZipFile"),
    "a tar": (_tar(), "cannot be read: BadZipFile"),
    "no zip": (bytes(500), "cannot be read: BadZipFile"),
    "code beside": (_rezipped(_with("code/__torch__.py", b"import os")), "other files than a tensor's"),
    "a name above": (_rezipped(_with("../../data", b"")), "other files than a tensor's"),
    "a compressed zip": (_rezipped(lambda entries: None, compression=zipfile.ZIP_DEFLATED), "compressed, or too large"),
    "the other byte order": (_rezipped(_with("byteorder", b"big")), "another byte order"),
    "a large pickle": (_rezipped(_with("data.pkl", bytes(1 << 17))), "compressed, or too large"),
    "a zip that claims gigabytes": (_claiming(3 << 30), "compressed, or too large"),
    "a storage cut short": (_rezipped(_with("data/0", bytes(20))), "is not the tensor"),
    "an odd storage": (_rezipped(_with("data/0", bytes(51))), "is not the tensor"),
    "another shape": (_saved(torch.zeros(4, 3)), "is not the tensor"),
    "another type": (_saved(torch.zeros(3, 4, dtype=torch.int32)), "is not the tensor"),
    "strides beyond": (_strided((3, 4), (1 << 40, 1)), "is not the tensor"),
    "an offset beyond": (_strided((3, 4), (4, 1), 1), "is not the tensor"),
    "negative strides": (_strided((3, 4), (-4, 1)), "is not the tensor"),
    "a parameter": (_saved(torch.nn.Parameter(torch.zeros(3, 4))), r"names 'torch\._utils\._rebuild_parameter'"),
    "a sparse tensor": (_saved(torch.zeros(3, 4).to_sparse()), "other files|asks for"),
    "a table": (_saved({"a": torch.zeros(3, 4)}), "is not the tensor"),
}
"""Name -> (what stands where the bytes of a tensor were, what is said)."""


def main(path: Path) -> None:
    """Plant a command in the metadata of a real checkpoint, and make its manifest anew."""
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.system, ("touch taken-over",))))
    reseal(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
