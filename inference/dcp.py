"""Weights in PyTorch's default checkpoint format (`torch.distributed.checkpoint`, DCP), by PyTorch's own code.

Its `.metadata` is a pickle that PyTorch executes to read it, so only a folder of somebody the user trusts may be read.
Its tensors are read with `weights_only`, one at a time. Imported at first use, as DCP is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titan.checkpoint.disk.folder import DCP_METADATA
from titan.checkpoint.disk.index import grid
from titan.checkpoint.disk.plain import size_of
from titan.checkpoint.restore import listed_faults, other_shapes
from titan.contracts import Model
from titan.errors import CheckpointError, SaveError, TitanError, by_errno
from titan.weights.hf_folder import TYPES
from titan.weights.huggingface import shapes_of

_PREFIX = "model."
"""What the names of weights may begin with: `dcp.save({"model": model.state_dict()}, ...)` puts it there."""


class DcpWeights:
    """The weights of a folder, by the model's names or those behind `model.`; they have to be all that the model has.

    Raises CheckpointError: the folder cannot be read, or its tensors do not fit the model.
    """

    def __init__(self, path: Path, model: Model) -> None:
        self.path, self.shapes = path, shapes_of(model)
        self._reader = _Reader(path)
        found = self._read_metadata()
        behind = f"{_PREFIX}{next(iter(self.shapes))}" in found
        self._keys = {name: f"{_PREFIX}{name}" if behind else name for name in self.shapes}
        self._types = {name: found[key].properties.dtype for name, key in self._keys.items() if key in found}
        sizes = {name: found[key].size for name, key in self._keys.items() if key in found}
        # Without a prefix, the optimizer's state is told from weights by its name, as `dcp.save` of both has it.
        unknown = [key for key in found.keys() - {*self._keys.values()} if _is_weight(key, behind)]
        absent = [name for name in self.shapes if name not in self._types]
        packed = [f"{name} ({dtype})" for name, dtype in self._types.items() if dtype not in TYPES.values()]
        # DCP reads what there is, and leaves the rest as it was.
        partly = [key for key in self._keys.values() if key in found and not _is_whole(found[key])]
        faults = {"it lacks": absent, "the model lacks": unknown, "shapes differ in": other_shapes(sizes, self.shapes)}
        faults |= {"no plain floating-point numbers in": packed, "chunks do not make up": partly}
        if told := listed_faults(faults):
            raise CheckpointError(f"{path} does not fit the model: {told}")

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in."""
        return self._types[name]

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the type it is stored in."""
        tensor = torch.empty(self.shapes[name], dtype=self._types[name])
        try:
            with _quiet():
                load({self._keys[name]: tensor}, storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # of any kind, and a group of such
            raise self._unreadable(error) from error
        return tensor

    def _read_metadata(self) -> dict[str, TensorStorageMetadata]:
        size_of(self.path / DCP_METADATA)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # a pickle can raise anything
            raise self._unreadable(error) from error
        return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def _unreadable(self, error: BaseException) -> Exception:
        error = _first(error)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = f"{self.path} cannot be read by torch.distributed.checkpoint of PyTorch {torch.__version__}: {reason}"
        return by_errno(error, CheckpointError(f"{what}; if a newer one wrote it, convert it there"))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        yield


def _is_weight(key: str, behind: bool) -> bool:
    return key.startswith(_PREFIX) if behind else not key.startswith("optim")


def _is_whole(entry: TensorStorageMetadata) -> bool:
    chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
    if not chunks:
        return not entry.size.numel()
    offsets, sizes = (np.array([[*getattr(chunk, part)] for chunk in chunks]) for part in ("offsets", "sizes"))
    try:
        grid(entry.size, *(part.reshape(len(chunks), len(entry.size)) for part in (offsets, sizes)))
    except ValueError:
        return False
    return True


def _first(error: BaseException) -> Exception:
    """What went wrong, of an error that DCP has wrapped, which then is no Exception. Raises what stops a process."""
    inner = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    if not isinstance(inner, Exception):
        raise inner
    return inner


class _Reader(FileSystemReader):
    """One that executes the pickle once, not for each tensor."""

    @functools.cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _OneByOne(DefaultSavePlanner):
    """Asks for a tensor when its turn to be written has come."""

    def __init__(self, value: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._value = value

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._value(index.fqn)


def write(folder: Path, tensors: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
    """Write a folder that `dcp.load(model.state_dict(), checkpoint_id=folder)` reads.

    tensors: for their shape and dtype, on the meta device.  value: gives one when its turn has come.
    """
    try:
        with _quiet():
            save(dict(tensors), storage_writer=FileSystemWriter(folder), planner=_OneByOne(value), no_dist=True)
    except CheckpointException as error:
        inner = _first(error)
        known = isinstance(inner, (OSError, TitanError))
        raise inner if known else SaveError(f"{folder} cannot be written: {inner}") from error
