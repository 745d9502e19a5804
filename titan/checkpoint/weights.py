"""Weights without optimizer state, from a titan checkpoint or a Hugging Face folder; for init_from and inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint import huggingface, restore
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.folder import is_hf
from titan.checkpoint.disk.manifest import STATE
from titan.checkpoint.ranks import Ranks
from titan.errors import CheckpointError

if TYPE_CHECKING:
    from titan.contracts import Model, ModelPart

_KINDS = {
    "config": dict,
    "step": int,
    "tokens": int,
    "dropped": int,
    "valid_tokens": int,
    "data": dict,
    "techniques": dict,
}
"""What a run counts on in the rest of a checkpoint, where it is there."""


def find_weights(given: str | Path, option: str = "--checkpoint") -> Path:
    """The folder that a user's path means: a Hugging Face folder, a checkpoint, or the newest of a run.

    option: where the user gave it, for messages.

    Raises:
        CheckpointError: there are no weights.
    """
    path = Path(given).expanduser()
    return path if is_hf(path) else folders.choose(str(given), option)


def stored_rest(path: Path) -> dict[str, Any]:
    """What a checkpoint of titan's holds beside tensors, as `Run.rest` gave it.

    Raises:
        CheckpointError: it cannot be read.
    """
    rest = folders.read_state(path).get("rest")
    if not isinstance(rest, dict):
        raise CheckpointError(f"{path / STATE} lacks the table `rest`")
    for key, kind in _KINDS.items():
        if type(rest.get(key, kind())) is not kind:
            raise CheckpointError(f"{path / STATE} has {key} in rest that is not of type {kind.__name__}")
    cursor = rest.get("data", {}).get("samples", 0)
    if type(cursor) is not int or cursor < 0:
        raise CheckpointError(f"{path / STATE} gives a data position that is not a number")
    return rest


def stored_config(path: Path) -> dict[str, Any]:
    """The resolved job that a checkpoint of titan's was saved by.

    Raises:
        CheckpointError: it cannot be read, or does not say.
    """
    config = stored_rest(path).get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / STATE} does not hold the config of the run")
    return config


def load_weights(path: Path, model: Model, parts: Sequence[ModelPart], ranks: Ranks, technique: str = "") -> None:
    """Fill the parts' tensors, in place, at any layout; all ranks together.

    technique: whose weights to take in place of the trained ones (see `Technique.state_dict`).

    Raises:
        CheckpointError: a tensor is absent, left over, or of another shape; something cannot be read.
        ConfigError: a config.json is of another model.
    """
    if is_hf(path):
        refuse_technique(path, technique)
        huggingface.load(path, model, parts, ranks)
    else:
        restore.load_weights(path, parts, ranks, technique)


def refuse_technique(path: Path, technique: str) -> None:
    """Raise a CheckpointError where a technique's weights are asked of a Hugging Face folder."""
    if technique:
        raise CheckpointError(f"{path} is a Hugging Face folder, which has no weights of {technique!r}")
