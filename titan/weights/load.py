"""Weights without optimizer state, from a titan checkpoint or a Hugging Face folder; for init_from and inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan.checkpoint import restore
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.manifest import STATE, TOKENIZER, is_checkpoint_file
from titan.checkpoint.ranks import Ranks
from titan.contracts import Model, ModelPart, Tokenizer
from titan.contracts.plugin import registry
from titan.contracts.plugin.conformance import made
from titan.contracts.plugin.options import Where, parse
from titan.data.tokens import identity
from titan.data.tokens.identity import Identity
from titan.errors import CheckpointError, ConfigError, MissingPackageError
from titan.paths import expanded
from titan.terminal import warn_once
from titan.weights import huggingface


def find_weights(given: str | Path, option: str = "--checkpoint") -> Path:
    """The folder that a user's path means: a Hugging Face folder, or as `folders.choose`. option: where it stands."""
    path = expanded(given, option)
    return path if folders.is_hf(path) else folders.choose(str(given), option)


def stored_rest(path: Path) -> dict[str, Any]:
    """What a titan checkpoint holds beside tensors, as `Run.rest` gave it; a CheckpointError if it cannot be read."""
    with folders.named():
        rest: dict[str, Any] = folders.read_state(path)["rest"]
        for key, kind in {"dropped": int, "valid_tokens": int, "tokenizer": dict}.items():
            if type(rest.get(key, kind())) is not kind:
                raise CheckpointError(f"{path / STATE} has {key} in rest that is not of type {kind.__name__}")
        if not all(type(section) is dict for section in rest.get("config", {"": None}).values()):
            raise CheckpointError(f"{path / STATE} does not hold the config of the run")
        return rest


def stored_tokenizer(path: Path) -> Identity:
    """What a titan checkpoint says of its tokenizer, no copy outside its folder."""
    table = stored_rest(path).get("tokenizer", {})
    plugin, fingerprint, copies = table.get("name"), table.get("fingerprint"), table.get("copies")
    names = copies.values() if isinstance(copies, dict) else [] if copies is None else [None]
    valid = all(isinstance(name, str) and (not name or is_checkpoint_file(f"{TOKENIZER}/{name}")) for name in names)
    if not (valid and isinstance(plugin, str) and isinstance(fingerprint, str)):
        raise CheckpointError(f"{path / STATE} gives no valid name, fingerprint and copies of a tokenizer")
    return Identity(name=plugin, fingerprint=fingerprint, copies=copies)


def tokenizer_table(path: Path) -> dict[str, Any] | None:
    """The `[tokenizer]` table that opens the tokenizer of some weights: the copies that a checkpoint keeps, or the
    files of a Hugging Face folder; None where a folder has none that a plugin reads."""
    if not folders.is_hf(path):
        table, copies = stored_rest(path)["config"].get("tokenizer"), path.absolute() / TOKENIZER
        return None if table is None else identity.from_copies(table, stored_tokenizer(path), copies)
    for plugin in registry.of_kind(Tokenizer.kind):
        assert issubclass(plugin, Tokenizer)
        values = plugin.from_hf(path.absolute())
        if values is not None:
            return {"name": plugin.name, **values}
    return None


def check_tokenizer(path: Path, tokenizer: Tokenizer, *, change: bool) -> None:
    """Raise a ConfigError where a job's tokenizer is not that of a folder's weights, or cannot be compared.

    change: `checkpoint.change_tokenizer`: it is then only told.
    """
    if sentence := other_tokenizer(path, tokenizer):
        if not change:
            raise ConfigError(sentence)
        warn_once(f"{sentence}, which it is")


def other_tokenizer(path: Path, tokenizer: Tokenizer) -> str:
    """In which way a job's tokenizer is not that of a folder's weights, as a sentence; else empty."""
    try:
        _compare(path, tokenizer)
    except MissingPackageError as error:
        warn_once(f"{path}: its tokenizer is not compared with {tokenizer.name!r}: {error}")
    except ConfigError as error:
        return str(error)
    return ""


def _compare(path: Path, tokenizer: Tokenizer) -> None:
    if folders.is_hf(path):
        if (published := made_tokenizer(path)) is None:
            warn_once(f"{path} holds no tokenizer that a plugin reads; {tokenizer.name!r} is not compared with it")
        else:
            identity.require_same(tokenizer, published, "", str(path))
        return
    stored = stored_tokenizer(path)
    name, fingerprint, copies = stored["name"], stored["fingerprint"], stored["copies"]
    if (name, fingerprint) == (tokenizer.name, tokenizer.fingerprint):
        return
    trained = None if copies is None else made_tokenizer(path)
    if trained is None:
        raise identity.another(tokenizer, identity.shown(name, fingerprint), str(path))
    identity.require_same(tokenizer, trained, "" if copies else fingerprint, str(path))
    if copies and trained.fingerprint != fingerprint:
        warn_once(f"{path}: the plugin of its tokenizer has changed since, and may give text other ids")


def made_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of some weights; None where no plugin at hand makes it."""
    values = tokenizer_table(path) or {}
    plugin = registry.find(Tokenizer.kind, str(values.pop("name", "")))
    config = None if plugin is None else parse(plugin.Config, values, Where(Tokenizer.section))[0]
    tokenizer = None if plugin is None or config is None else made(plugin, config)
    assert tokenizer is None or isinstance(tokenizer, Tokenizer)
    return tokenizer


def load_weights(path: Path, model: Model, parts: Sequence[ModelPart], ranks: Ranks, technique: str = "") -> None:
    """Fill the parts' tensors, in place, at any layout; all ranks together. technique: see `Technique.state_dict`."""
    if folders.is_hf(path):
        refuse_technique(path, technique)
        huggingface.load(path, model, parts, ranks)
    else:
        restore.load_weights(path, parts, ranks, technique)


def refuse_technique(path: Path, technique: str) -> None:
    """Raise a CheckpointError where a technique's weights are asked of another program's folder."""
    if technique:
        raise CheckpointError(f"{path} is no checkpoint of titan's, so it has no weights of {technique!r}")
