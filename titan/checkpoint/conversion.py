"""Conversion of weights between formats, one tensor at a time, so that the model need not fit into memory.

Both formats can be read and written. The new folder is written under a temporary name, and renamed when complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.folder import HF_CONFIG, is_hf, read_hf_config
from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.disk.tensor_files import Planned, write_json, write_tensors
from titan.checkpoint.huggingface import HfWeights, check_config, joined, made_of, shape_in_hf, shapes_of
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.restore import Saved, check_weights
from titan.checkpoint.state import Snapshot
from titan.checkpoint.weights import refuse_technique
from titan.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from titan.contracts import Model, Tokenizer

Progress = Callable[[], None]
"""Called when a tensor of ours has been read."""


class Weights(Protocol):
    """Weights on disk by our names, held against a model already."""

    shapes: dict[str, torch.Size]

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in."""

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the type it is stored in."""


class SavedWeights:
    """The weights of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model.
    """

    def __init__(self, path: Path, model: Model, technique: str = "") -> None:
        self.shapes = shapes_of(model)
        self._ranks = Ranks(0, 1)
        self._saved = Saved.open(path, self._ranks).with_weights_of(technique)
        wanted = {MODEL + name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        check_weights(self._saved, wanted, self._ranks)

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in."""
        return self._saved.tensors[MODEL + name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor of that canonical name, on the CPU, in the dtype it is stored in."""
        tensor = self._saved.empty(MODEL + name)
        self._saved.read({MODEL + name: tensor}, self._ranks)
        return tensor


def open_weights(path: Path, model: Model, technique: str = "") -> Weights:
    """The weights of a Hugging Face folder or a checkpoint; of the latter maybe those that a technique keeps.

    Raises:
        CheckpointError: they cannot be read, or do not fit the model.
        ConfigError: a config.json is of another model.
    """
    if not is_hf(path):
        return SavedWeights(path, model, technique)
    refuse_technique(path, technique)
    check_config(read_hf_config(path), model, path)
    return HfWeights(path, model)


def write_hf(
    to: Path, weights: Weights, model: Model, tokenizer: Tokenizer, dtype: torch.dtype | None, shard_bytes: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Write a folder that transformers loads: safetensors, config.json and what the tokenizer has.

    dtype: of all tensors; None keeps what they are stored in.

    Raises:
        CheckpointError: something cannot be read or written.
        ConfigError: transformers has no such model, or the tokenizer is another model's.
    """
    config = model.hf_config()
    if config is None:
        raise ConfigError(
            f"[model] {model.name}: transformers has no equivalent model, so --format hf is not available"
        )
    if tokenizer.vocab_size > model.spec().vocab_size:
        sizes = f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocab_size is {model.spec().vocab_size}"
        raise ConfigError(f"[tokenizer] name = {tokenizer.name!r}: {sizes}")
    tensors = {tensor.name: tensor for tensor in made_of(model, weights.shapes)}
    types = {name: dtype or weights.dtype(tensor.ours[0]) for name, tensor in tensors.items()}
    planned = {name: Planned(shape_in_hf(one, weights.shapes), types[name]) for name, one in tensors.items()}

    stack: dict[str, Tensor] = {}  # at most one, the last that was read: its elements are asked for in turn

    def read(ours: str) -> Tensor:
        progress()
        return weights.read(ours)

    def value(name: str) -> Tensor:
        tensor = tensors[name]
        if tensor.ours[0] not in stack:
            stack.clear()
        if tensor.element is None:
            return joined(tensor, [read(ours).to(types[name]) for ours in tensor.ours])
        if not stack:
            stack[tensor.ours[0]] = read(tensor.ours[0])
        return joined(tensor, [stack[tensor.ours[0]][tensor.element].to(types[name])])

    widest = max(types.values(), key=lambda one: one.itemsize)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.end, "torch_dtype": str(widest).removeprefix("torch.")}
    with _made_aside(to) as folder:
        write_tensors(folder, planned, value, shard_bytes)
        for name, content in (tokenizer.hf_files() or {}).items():
            write_json(folder / name, content)
        write_json(folder / HF_CONFIG, {**config, **ends})


def write_checkpoint(
    to: Path, weights: Weights, table: Mapping[str, Any], dtype: torch.dtype | None, progress: Progress
) -> None:
    """Write a folder that holds the checkpoint of step 0 of the job `table`, without state of an optimizer.

    dtype: of all tensors; None keeps what they are stored in.

    Raises:
        CheckpointError: something cannot be read or written.
    """
    tensors = {
        MODEL + name: torch.empty(shape, dtype=dtype or weights.dtype(name), device="meta")
        for name, shape in weights.shapes.items()
    }

    def value(name: str) -> Tensor:
        tensor = weights.read(name.removeprefix(MODEL)).to(tensors[name].dtype).contiguous()
        progress()
        return tensor

    snapshot = Snapshot(tensors, _Lazy(tensors, value), {}, None, {"config": dict(table), "step": 0})
    with _made_aside(to) as folder:
        Checkpointer(folder, keep=0, asynchronous=False, rank=0, world_size=1).write(0, snapshot, time.perf_counter())


class _Lazy(Mapping[str, Tensor]):
    """Values that are made each time they are asked for."""

    def __init__(self, names: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
        self._names, self._value = names, value

    def __getitem__(self, name: str) -> Tensor:
        return self._value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def _made_aside(to: Path) -> Iterator[Path]:
    """An empty folder that gets the name `to` when all went well, and is removed when not."""
    to = _new_folder(to)
    aside = folders.unfinished(to)
    try:
        aside.mkdir(parents=True)
    except FileExistsError:
        raise CheckpointError(f"{aside} exists already; if an earlier conversion left it behind, remove it") from None
    except OSError as error:
        raise CheckpointError(f"{aside} cannot be created: {error.strerror}") from error
    try:
        yield aside
        folders.commit(aside)
    except OSError as error:
        raise CheckpointError(f"{to} cannot be written: {error.strerror}") from error
    finally:
        if aside.exists():
            rmtree(aside)


def _new_folder(to: Path) -> Path:
    """The folder that `--output` means, as an absolute path without links, `.` and `..`; absent, or empty.

    Raises:
        ConfigError: it is no folder, holds something, or is the one this process works in, which would be replaced.
        CheckpointError: it cannot be read.
    """
    path = Path(os.path.realpath(to))
    try:
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"--output {to}: {path} is not a folder; name a new folder")
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"--output {to}: {path} is not empty; name a new folder")
        if path == Path.cwd():
            what = f"{path} is the working directory; name a new folder, such as {to}/new"
            raise ConfigError(f"--output {to}: {what}")
    except OSError as error:
        raise CheckpointError(f"--output {to}: {path} cannot be read: {error.strerror}") from error
    return path
