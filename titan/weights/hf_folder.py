"""A folder of safetensors files, as Hugging Face lays it out: one file, or shards and an index of them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan.checkpoint.disk.folder import read_json
from titan.checkpoint.disk.plain import cannot_be_read, shown
from titan.checkpoint.disk.tensor_file import DTYPES
from titan.data.tokens.files import leads_outside
from titan.errors import CheckpointError, UnreadableError
from titan.paths import refuse_lfs_pointer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {word: DTYPES[word] for word in ("F64", "F32", "F16", "BF16")}
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
    except MemoryError as error:
        raise UnreadableError(f"{path} cannot be mapped: {shown(error)}") from error
    except SafetensorError as error:
        refuse_lfs_pointer(path, CheckpointError)
        raise CheckpointError(f"{path} cannot be read: {shown(error)}") from error


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
