"""JSON files of untrusted checkpoints: one table of plain data, of bounded size and depth, without duplicate keys."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from titan.errors import CheckpointError, UnreadableError, of_machine

DEEPEST = 64
"""Tables and lists inside one another that are read."""

LARGEST = 256 << 20
"""Bytes of a JSON file that are read."""


def size_of(path: Path) -> int:
    """Bytes of a file, which must be a file and no link: a link can lead anywhere, a pipe never ends.

    Raises:
        CheckpointError: it is absent, or something else; UnreadableError where the machine fails.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if not S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is a link, a folder or a pipe, but a checkpoint consists of plain files")
    return found.st_size


def read_bytes(path: Path, most: int) -> bytes:
    """A file's content.

    Raises:
        CheckpointError: it cannot be read (UnreadableError: for now), or is larger than `most` bytes.
    """
    size = size_of(path)
    if size > most:
        raise CheckpointError(f"{path} has {size:,} bytes; at most {most:,} are read")
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_be_read(path, error) from error


def cannot_be_read(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a file of a checkpoint cannot be read."""
    said = f"{path} cannot be read: {error.strerror}"
    return (
        UnreadableError(f"{said}; the file may be intact, so try again") if of_machine(error) else CheckpointError(said)
    )


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it is absent, too large or too deep, or is something else.
    """
    content = read_bytes(path, LARGEST)
    try:
        table = json.loads(content.decode("utf-8"), object_pairs_hook=_table)
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _inside(value)]
    if level:
        raise CheckpointError(f"{path} is nested more than {DEEPEST} deep")
    return table


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} appears twice")
    return table


def _inside(value: Any) -> list[Any]:
    """What a table or list holds that can hold more."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON object and see it onto the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
