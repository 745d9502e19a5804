"""A model's weights in a Hugging Face folder: safetensors under the names of transformers, and a config.json.

The model maps its parameters to their tensors (`Model.hf_tensors`). Tensors are read one by one, and of each only the
slice that the rank needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.checkpoint.disk.folder import HF_CONFIG, read_hf_config
from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.restore import listed, listed_faults, other_shapes
from titan.checkpoint.state import firsts, model_tensors
from titan.checkpoint.storage import box_of
from titan.contracts import HfTensor, Model, ModelPart, shard_of
from titan.contracts.base.spec import glob_matches
from titan.errors import CheckpointError, ConfigError, ConfigIssue, PluginError
from titan.weights.hf_folder import TYPES, find_tensors


def check_config(config: Mapping[str, Any], model: Model, path: Path) -> None:
    """Raise a ConfigError where a folder's config.json is of another model; names each other key, with both values.

    `max_seq_len` may be another: weights tell where it matters.
    """
    own = model.hf_config()
    if own is None:
        raise ConfigError(f"[model] {model.name}: transformers has no equivalent model")
    theirs, ours = model.from_hf(config), model.from_hf(own)
    if theirs is None or ours is None:
        kind = config.get("model_type")
        raise ConfigError(f"[model] name = {model.name!r}: {path / HF_CONFIG} has model_type {kind!r}")
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

    Raises PluginError: they do not hold each of the model's tensors once, or cut one into groups that are not equal.
    """
    tensors = [tensor for tensor in model.hf_tensors() if not tensor.copy]
    stacks = {name for tensor in tensors if tensor.element is not None for name in tensor.ours}
    wanted = Counter(name for name in shapes if name not in stacks)
    wanted.update(f"{name}[{number}]" for name in shapes if name in stacks for number in range(shapes[name][0]))
    held = Counter(name if one.element is None else f"{name}[{one.element}]" for one in tensors for name in one.ours)
    wrong = [*((wanted - held) | (held - wanted))]
    wrong += [tensor.name for tensor in tensors if tensor.element is not None and len(tensor.ours) > 1]
    if wrong:
        raise PluginError(f"model {model.name}: hf_tensors() must hold {listed(wrong)} exactly once")
    for tensor in model.hf_tensors():
        if uneven := [f"{name} ({shapes[name][0]} rows)" for name in tensor.ours if shapes[name][0] % tensor.groups]:
            told = f"model {model.name}: hf_tensors() cuts {listed(uneven)} into {tensor.groups} groups"
            raise PluginError(f"{told}, which are not equal; groups must divide the rows")
    order = {name: place for place, name in reversed([*enumerate(name for one in tensors for name in one.ours)])}
    return sorted(tensors, key=lambda tensor: order[tensor.ours[0]])


def shape_in_hf(tensor: HfTensor, shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
    """The shape a tensor has in the files."""
    rows = (sum(shapes[name][0] for name in tensor.ours),) if tensor.element is None else ()
    whole = (*rows, *shapes[tensor.ours[0]][1:])
    return whole[::-1] if tensor.transposed else whole


class _Place(NamedTuple):
    """Where one of our tensors lies in a tensor of the files: `rows` of each `period` rows, from row `start` on."""

    tensor: HfTensor
    start: int
    rows: int
    period: int

    def row(self, ours: int) -> int:
        group, row = divmod(ours, self.rows)
        return group * self.period + self.start + row


class HfWeights:
    """The weights of a folder by our names, for a model; a CheckpointError where these are not all that it holds."""

    def __init__(self, path: Path, model: Model) -> None:
        self.path, self.shapes = path, shapes_of(model)
        tensors = made_of(model, self.shapes)
        copies = [tensor for tensor in model.hf_tensors() if tensor.copy]
        stored = find_tensors(path, absent=[tensor.name for tensor in copies])
        found = {tensor: stored.get(tensor.name) or stored.get(_short(tensor.name)) for tensor in (*tensors, *copies)}
        self._stored = {tensor: entry for tensor, entry in found.items() if entry}
        ignored = (*model.hf_ignored, *map(_short, model.hf_ignored))
        there = {entry.name: entry.shape for entry in self._stored.values()}
        here = {entry.name: shape_in_hf(tensor, self.shapes) for tensor, entry in self._stored.items()}
        packed = [f"{entry.name} ({entry.type})" for entry in self._stored.values() if entry.type not in TYPES]
        absent = [tensor.name for tensor in tensors if tensor not in self._stored]
        unused = stored.keys() - there.keys()
        unknown = [name for name in unused if not any(glob_matches(glob, name) for glob in ignored)]
        faults = {"it lacks": absent, "the model lacks": unknown, "shapes differ in": other_shapes(there, here)}
        if told := listed_faults(faults | {"no plain floating-point numbers in": packed}):
            raise CheckpointError(f"{path} does not fit the model: {told}")
        self._places = self._by_name(tensors)
        self._copies = self._by_name(tensor for tensor in copies if tensor in self._stored)

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
        return reduce(torch.promote_types, (TYPES[self._stored[p.tensor].type] for p in self._places[name]))

    def read(self, name: str, bounds: Sequence[slice] = ()) -> Tensor:
        """One of our tensors in the type it is stored in: whole, or the part within start and stop of each dimension.

        Raises CheckpointError: it cannot be read, or a copy that stands beside it is not the same.
        """
        bounds = bounds or [slice(0, size) for size in self.shapes[name]]
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
            # One read from our first row to our last; where groups of others lie in between, their rows are dropped.
            place, rows = places[0], range(first.start, first.stop)
            start = place.row(rows[0])
            value = self._piece(place.tensor, [slice(start, place.row(rows[-1]) + 1), *others])
            return value if len(value) == len(rows) else value[[place.row(row) - start for row in rows]]
        sizes = [bound.stop - bound.start for bound in bounds]
        value = torch.empty(sizes, dtype=self.dtype(name))  # filled element by element: there is no second copy of it
        for row, place in zip(value, places[first], strict=True):
            row.copy_(self._piece(place.tensor, others))
        return value

    def _piece(self, tensor: HfTensor, bounds: Sequence[slice]) -> Tensor:
        value = self._stored[tensor].read(bounds[::-1] if tensor.transposed else bounds)
        return value.T if tensor.transposed else value


def _short(name: str) -> str:
    return name.partition(".")[2]  # as a base-model export has it


def load(path: Path, model: Model, parts: Sequence[ModelPart], ranks: Ranks) -> None:
    """Fill the parts' tensors, in place and cast to their types, from a folder; each rank reads its shards.

    Raises CheckpointError: the folder cannot be read, or its tensors do not fit.
    Raises ConfigError: its config.json is of another model.
    """
    check_config(ranks.each(lambda: read_hf_config(path)), model, path)
    weights = ranks.each(lambda: HfWeights(path, model))
    ranks.each(lambda: _fill(weights, model_tensors(parts)))


def _fill(weights: HfWeights, holders: Mapping[str, Sequence[Tensor]]) -> None:
    if absent := [name.removeprefix(MODEL) for name in holders if name.removeprefix(MODEL) not in weights.shapes]:
        raise CheckpointError(f"{weights.path} cannot hold {listed(absent)}")
    for name, tensor in ((name, tensor) for name, tensors in holders.items() for tensor in tensors):
        local = shard_of(tensor)
        if local.numel():
            bounds = [slice(start, start + size) for start, size in zip(*box_of(tensor), strict=True)]
            local.copy_(weights.read(name.removeprefix(MODEL), bounds))
