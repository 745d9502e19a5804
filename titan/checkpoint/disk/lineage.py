"""Which checkpoints go on from which: a run that goes back to an older one begins a branch, and abandons another.

Each start of a run has a random id. The lineage of a checkpoint lists the starts that led to it, each with the last
step that counts: `[["5d1c", 8], ["e07a", 9]]` is step 9 of a start that went on from step 8 of another. A checkpoint
therefore knows all its ancestors, also those that were removed, are damaged, or lie in another run's folder.
"""

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

Lineage = Sequence[tuple[str, int]]

MOST_STARTS = 10_000
"""In a lineage; of more, the first are forgotten."""

_ID = 16  # characters


class Found(NamedTuple):
    """A folder that has the name of a checkpoint.

    serial: its place in the order of commits, from 1; 0 where no file says it.  lineage: empty where no file says it.
    fault: what is wrong with it, empty where nothing is.
    """

    serial: int
    path: Path
    lineage: Lineage
    fault: str = ""


def new_start() -> str:
    """An id for a start of a run."""
    return secrets.token_hex(_ID // 2)


def is_lineage(value: Any) -> TypeGuard[Lineage]:
    """Whether a value read from JSON is a lineage."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    if not 0 < len(value) <= MOST_STARTS:
        return False
    return all(isinstance(start, str) and len(start) <= _ID and type(step) is int for start, step in value)


def descends(newer: Lineage, older: Found) -> bool:
    """Whether a checkpoint is an ancestor of the one of a lineage, or that one itself."""
    return any(start == each and step <= last for start, step in older.lineage[-1:] for each, last in newer)


def branch(found: Sequence[Found]) -> list[Found]:
    """The newest of some checkpoints and its ancestors, sound and damaged, in the order of commits."""
    newest = max((each for each in found if each.lineage), default=None)
    return [] if newest is None else [each for each in found if descends(newest.lineage, each)]


def parent(checkpoint: Found, found: Iterable[Found]) -> Found | None:
    """The nearest ancestor that is among some checkpoints."""
    ancestors = (each for each in found if each.path != checkpoint.path and descends(checkpoint.lineage, each))
    return max(ancestors, default=None)
