"""Weights of any folder as Hugging Face lays a model out: safetensors, config.json, and what the tokenizer has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan.checkpoint.disk.folder import HF_CONFIG
from titan.checkpoint.disk.plain import synced
from titan.checkpoint.disk.tensor_file import Chunk, write
from titan.contracts import HfTensor, Model, Tokenizer
from titan.errors import ConfigError, DataError
from titan.inference.conversion import Weights, beside, made_aside
from titan.inference.load_model import is_trained
from titan.log import log
from titan.weights.hf_folder import INDEX, SINGLE
from titan.weights.huggingface import made_of, shape_in_hf
from titan.weights.load import made_tokenizer

Table = Mapping[str, Any]
Content = bytes | Table  # of a file: bytes, or a JSON value

GENERATION = "generation_config.json"


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
        what = "transformers has no equivalent model, so --format hf is not available"
        raise ConfigError(f"[model] {model.name}: {what}")
    needed, rows = tokenizer.min_vocab_size, model.spec().vocab_size
    sizes = f"the tokenizer has {needed} ids, but the model's vocab_size is {rows}"
    if tokenizer.end < rows < needed:
        log.warning(f"[tokenizer] {tokenizer.name!r}: {sizes}; texts with the others have no row")
    elif needed > rows:
        raise ConfigError(f"[tokenizer] name = {tokenizer.name!r}: {sizes}")
    tensors = {tensor.name: tensor for tensor in made_of(model, weights.shapes)}
    types = {name: dtype or weights.dtype(tensor.ours[0]) for name, tensor in tensors.items()}
    planned = {name: Chunk(types[name], shape_in_hf(one, weights.shapes)) for name, one in tensors.items()}

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
    with made_aside(to) as folder:
        write_tensors(folder, planned, value, shard_bytes)
        for name, content in files.items():
            write_file(folder / name, content)
    return left


def joined(tensor: HfTensor, ours: Sequence[Tensor]) -> Tensor:
    """The tensor of the files, from those of ours that it consists of, whole and in order."""
    whole = ours[0]
    if len(ours) > 1:
        whole = torch.cat([one.reshape(tensor.groups, -1, *one.shape[1:]) for one in ours], dim=1).flatten(0, 1)
    return whole.T if tensor.transposed else whole


def write_tensors(folder: Path, tensors: Mapping[str, Chunk], value: Callable[[str], Tensor], shard_bytes: int) -> None:
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
        write(folder / file, {name: tensors[name] for name in shard}, value)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        write_file(folder / INDEX, index)


def write_file(path: Path, content: bytes | Mapping[str, Any]) -> None:
    """Write bytes, or a JSON value, to a file in a folder that may be new, and see them onto the disk."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with synced(path) as file:
        file.write(content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode())


def _companions(
    source: Path | None, model: Model, config: Mapping[str, Any], tokenizer: Tokenizer, dtypes: Sequence[torch.dtype]
) -> tuple[dict[str, Content], list[str]]:
    """(files of a new folder beside its weights, names of those of the source that are left out). config: ours."""
    carried, left = beside(source)
    passed_on = dict(tokenizer.hf_files() or {})
    former = made_tokenizer(source) if source is not None else None
    formers = former.files() if former is not None else {}
    same = former is None or formers == tokenizer.files()
    other = carried.keys() & formers.keys() - passed_on.keys() - {HF_CONFIG}
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
    published = carried.get(HF_CONFIG, passed_on.get(HF_CONFIG))
    own = {**config, "torch_dtype": words[0]}  # the widest
    files[HF_CONFIG] = _config_json(published, own, model, words, ends, same)
    if trained and GENERATION in files:
        files[GENERATION] = _ending(files[GENERATION], ends)
    return files, sorted({*left, *other})


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
