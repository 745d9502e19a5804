"""A folder of safetensors files, as Hugging Face lays it out: one file, or shards and an index of them.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header, little endian; the
header, which gives each tensor's type, shape and place; the data. Reading takes the library; writing is done here, a
tensor at a time, because the library's writer wants all tensors of a file in memory at once.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan.checkpoint.disk.folder import read_json
from titan.checkpoint.disk.plain import cannot_be_read, synced
from titan.data.tokens.files import leads_outside
from titan.errors import CheckpointError
from titan.paths import refuse_lfs_pointer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIXES = "safetensors safetensors.index.json bin bin.index.json pt pth gguf h5 msgpack onnx onnx_data"
WEIGHTS = [f"*.{suffix}" for suffix in _SUFFIXES.split()]
"""Names of files with weights, or the index of such files, in any format."""
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights that can be read, by their safetensors names; other dtypes are packed or quantized."""


class Stored(NamedTuple):
    """A tensor in a file. `type` is the format's word for it, a key of TYPES where it can be read."""

    name: str
    file: Path
    shape: tuple[int, ...]
    type: str

    def read(self, bounds: Sequence[slice]) -> Tensor:
        """A part of it, a slice with start and stop for each dimension; nothing else of the file is read."""
        with _opened(self.file) as file:
            value: Tensor = file.get_slice(self.name)[tuple(bounds)]
        return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        path.open("rb").close()  # safetensors calls what may not be read absent
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except SafetensorError as error:
        refuse_lfs_pointer(path, CheckpointError)
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def find_tensors(folder: Path, absent: Collection[str] = ()) -> dict[str, Stored]:
    """Every tensor of a folder by name. Where several shards hold a name, the one counts that the index says.

    As transformers does, it takes the single file where an index stands beside it, and what shards hold unnamed.
    absent: what the index may name though no shard holds it.
    Raises CheckpointError: there are none, a file is absent, damaged or outside the folder, or the index is wrong.
    """
    if (folder / SINGLE).is_file():
        return {tensor.name: tensor for tensor in _tensors_in(folder / SINGLE)}
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        reason = "is a pickle, which can contain code, and is not read; convert it to safetensors"
        told = f"; {pickles[0]} {reason}" if pickles else ""
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{told}")
    index = read_json(folder / INDEX)
    index = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of names to files")
    files = [(file, _inside(folder, file)) for file in sorted(set(index.values()))]
    shards = {file: {tensor.name: tensor for tensor in _tensors_in(path)} for file, path in files}
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    for name, file in index.items():
        if name in shards[file]:
            tensors[name] = shards[file][name]
        elif name in tensors or name not in absent:
            raise CheckpointError(f"{folder / INDEX} says that {name} is in {file}, which does not hold it")
    return tensors


def _inside(folder: Path, name: str) -> Path:
    """The path of a shard. An untrusted index must not lead outside."""
    if ".." in Path(name).parts or Path(name).is_absolute() or leads_outside(folder, folder / name):
        raise CheckpointError(f"{folder / INDEX} names {name!r}, which is outside its folder")
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder} lacks {name}, which {INDEX} names")
    return folder / name


def _tensors_in(path: Path) -> list[Stored]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return [Stored(name, path, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()]


class Planned(NamedTuple):
    """A tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(
    folder: Path, tensors: Mapping[str, Planned], value: Callable[[str], Tensor], shard_bytes: int
) -> None:
    """Write tensors into files of at most `shard_bytes` (or one tensor), with their index where there are several.

    value: gives a tensor when its turn has come; none is kept.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.bytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write_file(folder / file, {name: tensors[name] for name in shard}, value)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        write_file(folder / INDEX, index)


def _write_file(path: Path, tensors: Mapping[str, Planned], value: Callable[[str], Tensor]) -> None:
    words = {dtype: word for word, dtype in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": words[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with synced(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            given = value(name).contiguous()
            assert tuple(given.shape) == tensor.shape and given.dtype is tensor.dtype
            file.write(given.view(-1).view(torch.uint8).numpy().data)


def write_file(path: Path, content: bytes | Mapping[str, Any]) -> None:
    """Write bytes, or a JSON value, to a file in a folder that may be new, and see them onto the disk."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with synced(path) as file:
        file.write(content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode())
