"""Which tokenizer a model's weights belong to: what a checkpoint keeps of it, and the comparison with another one.

A token id means something to the weights that were trained with its tokenizer alone. Another one, which need not be
larger, gives a loss that looks like that of an untrained model, and no error.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from titan.contracts import Tokenizer
from titan.contracts.plugin.options import Option, options_of
from titan.errors import ConfigError, DataError, MissingPackageError, PluginError
from titan.paths import expanded

MOST_BYTES = 50 << 20  # of larger files a checkpoint keeps the fingerprint alone

LETTERS = "".join(map(chr, [*range(0x20, 0x800), *range(0x4E00, 0x4E20), *range(0x1F600, 0x1F610)]))
"""Text with all first bytes of UTF-8's two-byte sequences, and some longer ones."""


class Identity(TypedDict):
    """What state.json says of a tokenizer. copies: option -> name of the copy of its file, empty for their folder;
    None: no copies are kept."""

    name: str
    fingerprint: str
    copies: dict[str, str] | None


def identify(tokenizer: Tokenizer) -> tuple[Identity, Mapping[str, bytes]]:
    """What a checkpoint says of a tokenizer, and the files that it keeps. DataError: a file of the tokenizer cannot be
    read.  PluginError: `Tokenizer.files` returned a name that is none of a file in one folder."""
    files = tokenizer.files()
    if wrong := [name for name in files if name.count("/") > 1 or {"", ".", ".."} & {*name.split("/")}]:
        what = f"files() returned the name {wrong[0]!r}; it must be that of a file, in one folder at most"
        raise PluginError(f"tokenizer {tokenizer.name!r}: {what}")
    values = {option.key: getattr(tokenizer.config, option.field) for option in path_options(tokenizer)}
    single = {key: value for key, value in values.items() if value and isinstance(value, str)}
    paths = {key: expanded(value, f"tokenizer.{key}") for key, value in single.items()}
    copies = {key: path.name if path.is_file() else "" for key, path in paths.items()}
    # A plugin with a folder may not say which of its files it reads, and one with two files may call both the same.
    whole = all(name in files for name in copies.values() if name) and bool(files or not copies)
    whole = whole and all(map(str.isprintable, files))  # a manifest lists no other names
    whole = whole and paths.keys() == {key for key, value in values.items() if value}  # none names several
    kept = whole and len({*copies.values()}) == len(copies) and sum(map(len, files.values())) <= MOST_BYTES
    known = Identity(name=tokenizer.name, fingerprint=tokenizer.fingerprint, copies=copies if kept else None)
    return known, files if kept else {}


def path_options(tokenizer: Tokenizer) -> list[Option]:
    """The options that may name a file or folder."""
    return [option for option in options_of(type(tokenizer.config)) if option.spec.path]


def shown(name: str, fingerprint: str) -> str:
    """A tokenizer in a message."""
    return f"{name!r} with fingerprint {fingerprint[:16]}"


def require_same(tokenizer: Tokenizer, trained: Tokenizer, recorded: str, place: str) -> None:
    """Hold the tokenizer of a job against the one that some weights were trained with.

    recorded: its fingerprint when they were saved; empty where its files tell.  place: where the weights are, for the
    message.  Options that name no file, such as which token ends a document, may differ. Tokenizers of two plugins are
    the same if they give a text with every token of the vocabulary the same ids.

    ConfigError: they are not the same, or one cannot be read; names both fingerprints.  MissingPackageError: one is
    read by a package that is not installed.
    """
    if tokenizer.name == trained.name and tokenizer.config == trained.config and not recorded:
        return
    try:
        now, same = trained.fingerprint, _same(tokenizer, trained)
    except MissingPackageError:
        raise
    except DataError as error:
        raise another(tokenizer, f"with which it cannot be compared: {error}", place) from None
    if recorded not in ("", now):
        changed = f"{shown(trained.name, recorded)}, whose plugin has changed since: {now[:16]} now"
        raise another(tokenizer, changed, place)
    if not same:
        raise another(tokenizer, shown(trained.name, now), place)


def _same(tokenizer: Tokenizer, trained: Tokenizer) -> bool:
    if type(tokenizer) is not type(trained):
        text = trained.decode(range(trained.vocab_size)) + LETTERS
        return tokenizer.encode(text) == trained.encode(text)
    files = {option.field: getattr(trained.config, option.field) for option in path_options(trained)}
    return tokenizer.fingerprint == type(trained)(replace(tokenizer.config, **files)).fingerprint


def another(tokenizer: Tokenizer, trained: str, place: str) -> ConfigError:
    """What to raise for a tokenizer that is not the one of some weights."""
    what = f"{shown(tokenizer.name, tokenizer.fingerprint)} is not the tokenizer of the weights in {place}"
    then = "use that one, or set checkpoint.change_tokenizer = true to use the weights with this one"
    return ConfigError(f"[tokenizer] {what}, {trained}; {then}")


def from_copies(table: Mapping[str, Any], identity: Identity, folder: Path) -> dict[str, Any]:
    """A `[tokenizer]` table that reads the copies in a folder; the table as it is where none are kept."""
    copies = identity["copies"] or {}
    return {**table, **{key: str(folder / name) if name else str(folder) for key, name in copies.items()}}
