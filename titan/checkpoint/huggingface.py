"""A model's weights in a Hugging Face folder: safetensors under the names of transformers, and a config.json.

The model maps its parameters to their tensors (`Model.hf_tensors`). Tensors are read one by one, and of each only the
slice that the rank needs. Imported at first use, as the safetensors library is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.disk.folder import HF_CONFIG, read_hf_config
from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.disk.tensor_files import TYPES, Stored, find_tensors
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.restore import listed
from titan.checkpoint.state import firsts, model_tensors
from titan.contracts.base.parts import ModelPart
from titan.contracts.base.sharding import slice_of
from titan.contracts.base.spec import glob_matches
from titan.errors import CheckpointError, ConfigError, ConfigIssue, PluginError

if TYPE_CHECKING:
    from titan.contracts import HfTensor, Model


def check_config(config: Mapping[str, Any], model: Model, path: Path) -> None:
    """Hold a folder's config.json against a job's model. `max_seq_len` may be another: weights tell where it matters.

    Raises:
        ConfigError: they are not the same model; names each key that differs, with both values.
    """
    own = model.hf_config()
    if own is None:
        raise ConfigError(f"[model] {model.name}: transformers has no equivalent model")
    theirs, ours = model.from_hf(config), model.from_hf(own)
    if theirs is None or ours is None:
        told = f"[model] name = {model.name!r}: {path / HF_CONFIG} has model_type {config.get('model_type')!r}"
        raise ConfigError([ConfigIssue("", told)])
    faults = [
        ConfigIssue("", f"[model] {key} = {ours.get(key)!r}: {path / HF_CONFIG} says {theirs.get(key)!r}")
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key) and key != "max_seq_len"
    ]
    if faults:
        raise ConfigError(faults)


def shapes_of(model: Model) -> dict[str, torch.Size]:
    """Canonical name -> whole shape of every parameter and persistent buffer of a model."""
    with torch.device("meta"):
        tensors = firsts(model_tensors([ModelPart(model.build())]))
    return {name.removeprefix(MODEL): tensor.shape for name, tensor in tensors.items()}


def made_of(model: Model, names: Mapping[str, torch.Size]) -> list[HfTensor]:
    """The tensors that a Hugging Face folder of the model must have.

    Raises:
        PluginError: they do not hold each of the model's tensors once, or cut one into groups that are not equal.
    """
    tensors = [tensor for tensor in model.hf_tensors() if not tensor.copy]
    held = sorted(name for tensor in tensors for name in tensor.ours)
    if held != sorted(names):
        wrong = sorted({*held} ^ {*names}) or sorted({name for name in held if held.count(name) > 1})
        raise PluginError(f"model {model.name}: hf_tensors() must hold {listed(wrong)} exactly once")
    for tensor in model.hf_tensors():
        uneven = [f"{name} ({names[name][0]} rows)" for name in tensor.ours if names[name][0] % tensor.groups]
        if uneven:
            told = f"hf_tensors() cuts {listed(uneven)} into {tensor.groups} groups, which are not equal"
            raise PluginError(f"model {model.name}: {told}; groups must divide the rows")
    return tensors


def shape_in_hf(tensor: HfTensor, shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
    """The shape a tensor has in the files."""
    whole = (sum(shapes[name][0] for name in tensor.ours), *shapes[tensor.ours[0]][1:])
    return whole[::-1] if tensor.transposed else whole


def joined(tensor: HfTensor, ours: Sequence[Tensor]) -> Tensor:
    """The tensor of the files, from those of ours that it consists of, whole and in order."""
    if len(ours) == 1:
        whole = ours[0]
    else:
        whole = torch.cat([one.reshape(tensor.groups, -1, *one.shape[1:]) for one in ours], dim=1).flatten(0, 1)
    return whole.T if tensor.transposed else whole


@dataclass(frozen=True)
class _Place:
    """Where one of our tensors lies in a tensor of the files: `rows` of each `period` rows, from row `start` on."""

    tensor: HfTensor
    start: int
    rows: int
    period: int

    def row(self, ours: int) -> int:
        """The row there that is this row of ours."""
        group, row = divmod(ours, self.rows)
        return group * self.period + self.start + row


class HfWeights:
    """The weights of a folder by our names, for a model: all are there, and nothing else is.

    Raises:
        CheckpointError: a tensor is absent, left over, of another shape or of a type that is no plain number; or a file
            cannot be read.
    """

    def __init__(self, path: Path, model: Model) -> None:
        self.path, self.shapes = path, shapes_of(model)
        tensors = made_of(model, self.shapes)
        copies = [tensor for tensor in model.hf_tensors() if tensor.copy]
        self._stored, extra = _matched(find_tensors(path), [tensor.name for tensor in (*tensors, *copies)])
        extra = [name for name in extra if not _is_ignored(name, model.hf_ignored)]
        self._check(tensors, [tensor for tensor in copies if tensor.name in self._stored], extra)
        self._places = {name: place for tensor in tensors for name, place in self._cut(tensor)}
        self._copies = {
            name: place for tensor in copies if tensor.name in self._stored for name, place in self._cut(tensor)
        }

    def _check(self, wanted: Sequence[HfTensor], copies: Sequence[HfTensor], extra: Sequence[str]) -> None:
        unlike, packed = [], []
        for tensor in (*wanted, *copies):
            stored, shape = self._stored.get(tensor.name), shape_in_hf(tensor, self.shapes)
            if stored is not None and stored.shape != shape:
                unlike.append(f"{stored.name} ({list(stored.shape)} there, {list(shape)} here)")
            if stored is not None and stored.type not in TYPES:
                packed.append(f"{stored.name} ({stored.type})")
        faults = {
            "it lacks": [tensor.name for tensor in wanted if tensor.name not in self._stored],
            "the model lacks": extra,
            "shapes differ in": unlike,
            "no plain floating-point numbers in": packed,
        }
        told = [f"{what} {listed(names)}" for what, names in faults.items() if names]
        if told:
            raise CheckpointError(f"{self.path} does not fit the model: {'; '.join(told)}")

    def _cut(self, tensor: HfTensor) -> Iterator[tuple[str, _Place]]:
        """Our names in their tensor, and where each lies."""
        start, sizes = 0, [self.shapes[name][0] // tensor.groups for name in tensor.ours]
        for name, rows in zip(tensor.ours, sizes, strict=True):
            yield name, _Place(tensor, start, rows, sum(sizes))
            start += rows

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor of ours is stored in."""
        return TYPES[self._stored[self._places[name].tensor.name].type]

    def read(self, name: str, bounds: Sequence[slice] | None = None) -> Tensor:
        """One of our tensors in the type it is stored in: whole, or the part within start and stop of each dimension.

        Raises:
            CheckpointError: it cannot be read, or a copy that stands beside it is not the same.
        """
        bounds = [slice(0, size) for size in self.shapes[name]] if bounds is None else bounds
        place = self._places[name]
        value = self._read(place, bounds)
        if name in self._copies:
            copy = self._copies[name]
            if not torch.equal(value, self._read(copy, bounds).to(value.dtype)):
                told = f"{copy.tensor.name} and {place.tensor.name} differ, but the model ties them"
                raise CheckpointError(f"{self.path}: {told}")
        return value

    def _read(self, place: _Place, bounds: Sequence[slice]) -> Tensor:
        """One read from our first row to our last; where groups of others lie in between, their rows are dropped."""
        first, *others = bounds
        rows = range(first.start, first.stop)
        theirs = [slice(place.row(rows[0]), place.row(rows[-1]) + 1), *others]
        transposed = place.tensor.transposed
        value = self._stored[place.tensor.name].read(theirs[::-1] if transposed else theirs)
        value = value.T if transposed else value
        if len(value) == len(rows):
            return value
        return value[[place.row(row) - theirs[0].start for row in rows]]


def _short(name: str) -> str:
    """A name as a base-model export has it."""
    return name.partition(".")[2]


def _matched(stored: Mapping[str, Stored], wanted: Sequence[str]) -> tuple[dict[str, Stored], list[str]]:
    """(their name -> where it stands, names left over)."""
    found = {name: stored[name] for name in wanted if name in stored}
    found |= {name: stored[_short(name)] for name in wanted if name not in found and _short(name) in stored}
    used = {one.name for one in found.values()}
    return found, [name for name in stored if name not in used]


def _is_ignored(name: str, globs: Sequence[str]) -> bool:
    return any(glob_matches(pattern, name) or glob_matches(_short(pattern), name) for pattern in globs)


def load(path: Path, model: Model, parts: Sequence[ModelPart], ranks: Ranks) -> None:
    """Fill the parts' tensors, in place and cast to their types, from a folder; each rank reads its shards.

    Raises:
        CheckpointError: the folder cannot be read, or its tensors do not fit.
        ConfigError: its config.json is of another model.
    """
    check_config(ranks.each(lambda: read_hf_config(path)), model, path)
    weights = ranks.each(lambda: HfWeights(path, model))
    ranks.each(lambda: _fill(weights, model_tensors(parts)))


def _fill(weights: HfWeights, holders: Mapping[str, Sequence[Tensor]]) -> None:
    names = {name: name.removeprefix(MODEL) for name in holders}
    absent = [name for name in names.values() if name not in weights.shapes]
    if absent:
        raise CheckpointError(f"{weights.path} cannot hold {listed(absent)}")
    for key, tensor in [(key, tensor) for key, tensors in holders.items() for tensor in tensors]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            local.copy_(weights.read(names[key], _bounds(tensor)))


def _bounds(tensor: Tensor) -> list[slice] | None:
    """Where this rank's shard lies in the whole tensor; None for all of it."""
    if not isinstance(tensor, DTensor):
        return None
    whole = torch.empty(tensor.shape, device="meta")
    shard, bounds = slice_of(whole, tensor), []
    offset = int(shard.storage_offset())
    for size, stride in zip(shard.shape, whole.stride(), strict=True):
        start, offset = divmod(offset, stride)
        bounds.append(slice(start, start + size))
    return bounds
