"""JSON files of untrusted checkpoints: one table of plain data, of bounded size and depth, without duplicate keys."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from titan.errors import EXIT_WRONG_INPUT, CheckpointError, UnreadableError, of_machine

DEEPEST = 64
"""Tables and lists inside one another that are read."""

LARGEST = 256 << 20
"""Bytes of a JSON file that are read."""


def size_of(path: Path) -> int:
    """Bytes of a file; a CheckpointError where it is absent, a link (which can lead anywhere), a pipe or a folder."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if not S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is a link, a folder or a pipe, but a checkpoint consists of plain files")
    return found.st_size


def cannot_be_read(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a file of a checkpoint cannot be read; an UnreadableError where it may be intact."""
    told = f"{path} cannot be read: {error.strerror}"
    if isinstance(error, PermissionError):
        return UnreadableError(f"{told}; the file may be intact, so let this user read it", EXIT_WRONG_INPUT)
    if of_machine(error):
        return UnreadableError(f"{told}; the file may be intact, so try again")
    return CheckpointError(told)


def shown(value: object) -> str:
    """A text of an untrusted file as part of a message: on one line, and no more than its beginning."""
    return repr(str(value)[:200])[1:-1]


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a CheckpointError where it is too large, too deep, or something else."""
    size = size_of(path)
    if size > LARGEST:
        raise CheckpointError(f"{path} has {size:,} bytes; at most {LARGEST:,} are read")
    try:
        table = parse(path.read_text("utf-8"))
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        inside = (item for value in level for item in (value.values() if isinstance(value, dict) else value))
        level = [item for item in inside if isinstance(item, (dict, list))]
    if level:
        raise CheckpointError(f"{path} is nested more than {DEEPEST} deep")
    return table


def parse(text: str) -> Any:
    """The value of a JSON text; a ValueError where it is none, has a key twice in a table, or is nested too deep."""
    try:
        return json.loads(text, object_pairs_hook=_table)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} appears twice")
    return table


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON object and see it onto the disk."""
    with synced(path) as file:
        file.write(json.dumps(table, indent=1).encode())


@contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write; on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
