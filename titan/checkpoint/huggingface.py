"""A model's weights in a Hugging Face folder: safetensors under the names of transformers, and a config.json.

The model maps its parameters to their tensors (`Model.hf_tensors`). Tensors are read one by one, and of each only the
slice that the rank needs. Imported at first use, as the safetensors library is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
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


def made_of(model: Model, shapes: Mapping[str, torch.Size]) -> list[HfTensor]:
    """The tensors that a Hugging Face folder of the model must have; the elements of a stack follow each other.

    Raises:
        PluginError: they do not hold each of the model's tensors once, or cut one into groups that are not equal.
    """
    tensors = [tensor for tensor in model.hf_tensors() if not tensor.copy]
    stacks = {name for tensor in tensors if tensor.element is not None for name in tensor.ours}
    wanted = sorted(piece for name, shape in shapes.items() for piece in _pieces(name, shape, name in stacks))
    held = sorted(name if one.element is None else f"{name}[{one.element}]" for one in tensors for name in one.ours)
    wrong = sorted({*held} ^ {*wanted}) or sorted({name for name in held if held.count(name) > 1})
    wrong += [tensor.name for tensor in tensors if tensor.element is not None and len(tensor.ours) > 1]
    if wrong:
        raise PluginError(f"model {model.name}: hf_tensors() must hold {listed(wrong)} exactly once")
    for tensor in model.hf_tensors():
        uneven = [f"{name} ({shapes[name][0]} rows)" for name in tensor.ours if shapes[name][0] % tensor.groups]
        if uneven:
            told = f"hf_tensors() cuts {listed(uneven)} into {tensor.groups} groups, which are not equal"
            raise PluginError(f"model {model.name}: {told}; groups must divide the rows")
    order = {name: place for place, name in reversed([*enumerate(name for one in tensors for name in one.ours)])}
    return sorted(tensors, key=lambda tensor: order[tensor.ours[0]])


def _pieces(name: str, shape: torch.Size, stacked: bool) -> list[str]:
    return [f"{name}[{number}]" for number in range(shape[0])] if stacked else [name]


def shape_in_hf(tensor: HfTensor, shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
    """The shape a tensor has in the files."""
    others = shapes[tensor.ours[0]][1:]
    whole = (sum(shapes[name][0] for name in tensor.ours), *others) if tensor.element is None else tuple(others)
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
        stored = find_tensors(path, absent=[tensor.name for tensor in copies])
        self._stored, extra = _matched(stored, [tensor.name for tensor in (*tensors, *copies)])
        extra = [name for name in extra if not _is_ignored(name, model.hf_ignored)]
        self._check(tensors, [tensor for tensor in copies if tensor.name in self._stored], extra)
        self._places = self._by_name(tensors)
        self._copies = self._by_name([tensor for tensor in copies if tensor.name in self._stored])

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

    def _by_name(self, tensors: Iterable[HfTensor]) -> dict[str, list[_Place]]:
        """Our name -> where its values stand: all of them in one tensor, or each element in a tensor of its own."""
        places: dict[str, list[_Place]] = {}
        for tensor in tensors:
            start, sizes = 0, [self.shapes[name][0] // tensor.groups for name in tensor.ours]
            for name, rows in zip(tensor.ours, sizes, strict=True):
                places.setdefault(name, []).append(_Place(tensor, start, rows, sum(sizes)))
                start += rows
        for several in places.values():
            several.sort(key=lambda place: place.tensor.element or 0)
        return places

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor of ours is stored in; of elements of several types, one that holds the values of all."""
        return reduce(torch.promote_types, (TYPES[self._stored[p.tensor.name].type] for p in self._places[name]))

    def read(self, name: str, bounds: Sequence[slice] | None = None) -> Tensor:
        """One of our tensors in the type it is stored in: whole, or the part within start and stop of each dimension.

        Raises:
            CheckpointError: it cannot be read, or a copy that stands beside it is not the same.
        """
        bounds = [slice(0, size) for size in self.shapes[name]] if bounds is None else bounds
        value = self._read(name, self._places[name], bounds)
        copies = self._copies.get(name)
        if copies and not torch.equal(value, self._read(name, copies, bounds).to(value.dtype)):
            names = f"{copies[0].tensor.name} and {self._places[name][0].tensor.name}"
            untie = "if both count, set tie_word_embeddings = false in config.json"
            raise CheckpointError(f"{self.path}: {names} differ, but the model ties them; {untie}")
        return value

    def _read(self, name: str, places: Sequence[_Place], bounds: Sequence[slice]) -> Tensor:
        first, *others = bounds
        if places[0].tensor.element is None:
            return self._rows(places[0], range(first.start, first.stop), others)
        sizes = [bound.stop - bound.start for bound in bounds]
        value = torch.empty(sizes, dtype=self.dtype(name))  # filled element by element: there is no second copy of it
        for row, place in zip(value, places[first], strict=True):
            row.copy_(self._piece(place.tensor, others))
        return value

    def _rows(self, place: _Place, rows: range, others: Sequence[slice]) -> Tensor:
        """One read from our first row to our last; where groups of others lie in between, their rows are dropped."""
        start = place.row(rows[0])
        value = self._piece(place.tensor, [slice(start, place.row(rows[-1]) + 1), *others])
        return value if len(value) == len(rows) else value[[place.row(row) - start for row in rows]]

    def _piece(self, tensor: HfTensor, bounds: Sequence[slice]) -> Tensor:
        value = self._stored[tensor.name].read(bounds[::-1] if tensor.transposed else bounds)
        return value.T if tensor.transposed else value


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
