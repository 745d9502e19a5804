"""Conversion of weights between formats, one tensor at a time, so that the model need not fit into memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.disk.tensor_files import WEIGHTS, Planned, write_file, write_tensors
from titan.checkpoint.huggingface import HfWeights, check_config, joined, made_of, shape_in_hf, shapes_of
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.restore import Saved, check_weights
from titan.checkpoint.state import Snapshot
from titan.checkpoint.weights import is_trained, made_tokenizer, refuse_technique
from titan.config import Job
from titan.contracts import Model, Tokenizer
from titan.data.tokens.files import leads_outside
from titan.data.tokens.identity import identify
from titan.errors import CheckpointError, ConfigError, DataError, by_errno
from titan.log import log
from titan.paths import refuse_lfs_pointer

Table = Mapping[str, Any]
Content = bytes | Table  # of a file: bytes, or a JSON value

MOST_BYTES = 50 << 20  # of a file that is carried over
GENERATION = "generation_config.json"


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
        self._saved = Saved.open(path, self._ranks).with_weights_of(technique)
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


def write_hf(
    to: Path,
    weights: Weights,
    model: Model,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
    shard_bytes: int,
    progress: Callable[[], object],
    source: Path | None = None,
) -> list[str]:
    """Write a folder that transformers loads: safetensors, config.json and what the tokenizer has.

    dtype: of all tensors; None keeps what they are stored in.  progress: called when a tensor of ours has been read.
    source: the folder of the weights. Of one of Hugging Face's all other small files are carried over; returns the
    names of those that are not.
    Raises CheckpointError: something cannot be read or written.
    Raises ConfigError: transformers has no such model, or the tokenizer is another model's.
    """
    config = model.hf_config()
    if config is None:
        raise ConfigError(
            f"[model] {model.name}: transformers has no equivalent model, so --format hf is not available"
        )
    needed, rows = tokenizer.min_vocab_size, model.spec().vocab_size
    sizes = f"the tokenizer has {needed} ids, but the model's vocab_size is {rows}"
    if tokenizer.end < rows < needed:
        log.warning(f"[tokenizer] {tokenizer.name!r}: {sizes}; texts with the others have no row")
    elif needed > rows:
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
        first = tensor.ours[0]
        if first not in stack:
            stack.clear()
        if tensor.element is None:
            return joined(tensor, [read(ours).to(types[name]) for ours in tensor.ours])
        if not stack:
            stack[first] = read(first)
        return joined(tensor, [stack[first][tensor.element].to(types[name])])

    stops = tokenizer.delimiters.stops
    ids = {"bos_token_id": None, "eos_token_id": stops[0] if len(stops) == 1 else list(stops)}
    files, left = _companions(source, model, {**config, **ids}, tokenizer, list(types.values()))
    with _made_aside(to) as folder:
        write_tensors(folder, planned, value, shard_bytes)
        for name, content in files.items():
            write_file(folder / name, content)
    return left


def write_checkpoint(
    to: Path, weights: Weights, job: Job, dtype: torch.dtype | None, progress: Callable[[], object], source: Path
) -> list[str]:
    """Write a folder with the checkpoint of step 0 of a job, without optimizer state; otherwise as `write_hf`."""
    types = {name: dtype or weights.dtype(name) for name in weights.shapes}
    tensors = {
        MODEL + name: torch.empty(shape, dtype=types[name], device="meta") for name, shape in weights.shapes.items()
    }

    def value(name: str) -> Tensor:
        tensor = weights.read(name.removeprefix(MODEL)).to(tensors[name].dtype).contiguous()
        progress()
        return tensor

    known, copies = identify(job.tokenizer)
    rest = {"config": dict(job.table), "step": 0, "tokenizer": known, "trained": is_trained(source)}
    snapshot = Snapshot(tensors, _Made(value), {}, None, rest)
    with _made_aside(to) as folder:
        checkpointer = Checkpointer(folder, keep=0, asynchronous=False, rank=0, world_size=1, copies=copies)
        checkpointer.write(0, snapshot, time.perf_counter())
    others, left = _beside(source)
    return sorted({*others, *left} - {*copies, folders.HF_CONFIG})


def _companions(
    source: Path | None, model: Model, config: Mapping[str, Any], tokenizer: Tokenizer, dtypes: Sequence[torch.dtype]
) -> tuple[dict[str, Content], list[str]]:
    """(files of a new folder beside its weights, names of those of the source that are left out). config: ours."""
    carried, left = _beside(source)
    passed_on = dict(tokenizer.hf_files() or {})
    former = made_tokenizer(source) if source is not None else None
    formers = former.files() if former is not None else {}
    same = former is None or formers == tokenizer.files()
    other = carried.keys() & formers.keys() - passed_on.keys() - {folders.HF_CONFIG}
    files: dict[str, Content] = {name: content for name, content in carried.items() if name not in other}
    files |= passed_on
    trained = source is not None and is_trained(source)
    if trained and tokenizer.delimiters.before:
        ids = ", ".join(map(str, tokenizer.delimiters.before))
        log.warning(f"the weights were trained without the ids ({ids}) that transformers and lm-eval put before a text")
    other_end = trained or not same
    if not other_end and former is not None and former.config != tokenizer.config:
        try:
            other_end = former.end != tokenizer.end
        except DataError:  # the former one does not say how documents end
            other_end = True
    ends = [tokenizer.end] if other_end else []
    words = [str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=lambda dtype: -dtype.itemsize)]
    published = carried.get(folders.HF_CONFIG, passed_on.get(folders.HF_CONFIG))
    own = {**config, "torch_dtype": words[0]}  # the widest
    files[folders.HF_CONFIG] = _config_json(published, own, model, words, ends, same)
    if trained and GENERATION in files:
        files[GENERATION] = _ending(files[GENERATION], ends)
    return files, sorted({*left, *other})


def _beside(source: Path | None) -> tuple[dict[str, bytes], list[str]]:
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


def _config_json(
    published: Content | None, ours: Table, model: Model, dtypes: Sequence[str], ends: Sequence[int], keep_ids: bool
) -> Content:
    """The published config.json if it is of this model, else ours. keep_ids: the tokenizer is the published one."""
    theirs = {} if published is None else _table(published)
    with_ids = theirs if keep_ids else ours
    ids = {key: with_ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in with_ids}
    about = _table(_ending({**(theirs if _is_of(theirs, model) else ours), **ids}, ends))
    dtype = "dtype" if "dtype" in about else "torch_dtype"
    if dtype in about and about[dtype] not in dtypes:
        about[dtype] = ours["torch_dtype"]
    return about if published is None or about != theirs else published


def _ending(content: Content, ends: Sequence[int]) -> Content:
    """A config.json or generation_config.json at whose end ids generation stops, with these among them."""
    table = _table(content)
    ids = table.get("eos_token_id")
    known = ids if isinstance(ids, list) else [] if ids is None else [ids]
    every = [*(end for end in ends if end not in known), *known]
    return content if every == known else {**table, "eos_token_id": every if len(every) > 1 else every[0]}


def _is_of(config: Table, model: Model) -> bool:
    """Whether a config.json says what ours says of a model."""
    own = model.hf_config()
    try:
        theirs = model.from_hf(config)
    except ConfigError:  # of another model, whose folder the tokenizer is from
        return False
    return own is not None and theirs is not None and theirs == model.from_hf(own)


def _table(content: Content) -> dict[str, Any]:
    return dict(json.loads(content) if isinstance(content, bytes) else content)


class _Made(dict[str, Tensor]):
    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        return self._make(name)


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
