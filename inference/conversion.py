"""Conversion of weights between formats, one tensor at a time, so that the model need not fit into memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Protocol

import torch
from torch import Tensor

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.restore import Saved, check_weights
from titan.checkpoint.state import Snapshot
from titan.config import Job
from titan.contracts import Model
from titan.data.tokens.files import leads_outside
from titan.data.tokens.identity import identify
from titan.errors import CheckpointError, ConfigError, by_errno
from titan.inference.load_model import is_trained
from titan.paths import refuse_lfs_pointer
from titan.weights.huggingface import HfWeights, check_config, shapes_of
from titan.weights.load import refuse_technique

MOST_BYTES = 50 << 20  # of a file that is carried over
_SUFFIXES = "safetensors safetensors.index.json bin bin.index.json pt pth gguf h5 msgpack onnx onnx_data"
WEIGHTS = [f"*.{suffix}" for suffix in _SUFFIXES.split()]
"""Names of files with weights, or the index of such files, in any format."""


class Weights(Protocol):
    """Weights on disk by our names, held against a model already."""

    shapes: dict[str, torch.Size]

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in."""

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the type it is stored in."""


class _SavedWeights:
    def __init__(self, path: Path, model: Model, technique: str) -> None:
        self.shapes = shapes_of(model)
        self._ranks = Ranks(0, 1)
        with folders.named():
            self._saved = Saved.open(path, self._ranks)
        self._saved = self._saved.with_weights_of(technique)
        wanted = {MODEL + name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        check_weights(self._saved, wanted, self._ranks)

    def dtype(self, name: str) -> torch.dtype:
        return self._saved.tensors[MODEL + name].dtype

    def read(self, name: str) -> Tensor:
        tensor = self._saved.empty(MODEL + name)
        self._saved.read({MODEL + name: tensor}, self._ranks)
        return tensor


def open_weights(path: Path, model: Model, technique: str = "") -> Weights:
    """The weights of a Hugging Face folder or a checkpoint, maybe a technique's; raises where they do not fit."""
    if not folders.is_hf(path):
        return _SavedWeights(path, model, technique)
    refuse_technique(path, technique)
    check_config(folders.read_hf_config(path), model, path)
    return HfWeights(path, model)


def write_checkpoint(
    to: Path, weights: Weights, job: Job, dtype: torch.dtype | None, progress: Callable[[], object], source: Path | None
) -> list[str]:
    """Write a folder with the checkpoint of step 0 of a job, without optimizer state; otherwise as `write_hf`."""
    tensors, value = _as_written(weights, dtype, progress, MODEL)
    known, copies = identify(job.tokenizer)
    trained = source is not None and is_trained(source)
    rest = {"config": dict(job.table), "step": 0, "tokenizer": known, "trained": trained}
    snapshot = Snapshot(tensors, _Made(value), {}, None, rest)
    with made_aside(to) as folder:
        checkpointer = Checkpointer(folder, keep=0, asynchronous=False, rank=0, world_size=1, copies=copies)
        checkpointer.write(0, snapshot, time.perf_counter())
    others, left = beside(source)
    return sorted({*others, *left} - {*copies, folders.HF_CONFIG})


def write_dcp(
    to: Path, weights: Weights, dtype: torch.dtype | None, progress: Callable[[], object], source: Path | None
) -> list[str]:
    """Write a folder in PyTorch's default format, of weights alone under the model's names; otherwise as `write_hf`."""
    from titan.inference import dcp

    tensors, value = _as_written(weights, dtype, progress)
    with made_aside(to) as folder:
        dcp.write(folder, tensors, value)
    others, left = beside(source)
    return sorted({*others, *left})


def _as_written(
    weights: Weights, dtype: torch.dtype | None, progress: Callable[[], object], prefix: str = ""
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """(each tensor on the meta device in the type to write, by its name behind a prefix; what reads one of them)."""
    tensors = {
        prefix + name: torch.empty(shape, dtype=dtype or weights.dtype(name), device="meta")
        for name, shape in weights.shapes.items()
    }

    def value(name: str) -> Tensor:
        tensor = weights.read(name.removeprefix(prefix)).to(tensors[name].dtype).contiguous()
        progress()
        return tensor

    return tensors, value


def beside(source: Path | None) -> tuple[dict[str, bytes], list[str]]:
    """Of a Hugging Face folder, the small files that are no weights, and the names of the others; else nothing."""
    if source is None or not folders.is_hf(source):
        return {}, []
    small, others = {}, set()
    for file in sorted(file for file in source.rglob("*") if file.is_file()):
        name = file.relative_to(source).as_posix()
        if name.startswith("."):
            others.add(name.partition("/")[0])
        elif any(map(file.match, WEIGHTS)):
            others |= set() if name.startswith("model") else {name}  # in another format
        elif file.stat().st_size > MOST_BYTES or leads_outside(source, file) or not os.access(file, os.R_OK):
            others.add(name)
        else:
            refuse_lfs_pointer(file, CheckpointError)
            small[name] = file.read_bytes()
    return small, sorted(others)


class _Made(dict[str, Tensor]):
    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        return self._make(name)


@contextmanager
def made_aside(to: Path) -> Iterator[Path]:
    """An empty folder that gets the name `to` when all went well, and is removed when not."""
    to = _new_folder(to)
    aside = folders.unfinished(to)
    try:
        aside.mkdir(parents=True)
    except FileExistsError:
        raise CheckpointError(f"{aside} exists already; if an earlier conversion left it behind, remove it") from None
    except OSError as error:
        raise by_errno(error, CheckpointError(f"{aside} cannot be created: {error.strerror}")) from error
    try:
        yield aside
        folders.commit(aside)
    except OSError as error:
        raise by_errno(error, CheckpointError(f"{to} cannot be written: {error.strerror}")) from error
    finally:
        if aside.exists():
            rmtree(aside)


def _new_folder(to: Path) -> Path:
    """The folder that `--output` means, as an absolute path without links, `.` and `..`; absent, or empty."""
    path = Path(os.path.realpath(to))
    try:
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"--output {to}: {path} is not a folder; name a new folder")
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"--output {to}: {path} is not empty; name a new folder")
        if path == Path.cwd():
            raise ConfigError(f"--output {to}: {path} is the working directory; name a new folder, such as {to}/new")
    except OSError as error:
        raise by_errno(error, CheckpointError(f"--output {to}: {path} cannot be read: {error.strerror}")) from error
    return path
