"""The checkpoints of a run on disk: their names, which are complete, how one is committed, which are removed.

A checkpoint is complete or absent. It is written under a name that ends in `.tmp` and renamed when all of it is on
disk; it is removed by renaming it first. A kill at any moment therefore leaves complete folders and `.tmp` ones, which
`tidy` sweeps. Used by one rank at a time; needs no torch.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from titan.errors import CheckpointError
from titan.log import log

METADATA = ".metadata"
"""DCP's file: which tensors there are, and where in which file."""
STATE = "state.json"
"""Everything that is no tensor."""
FORMAT = 1
"""Number of the layout of a checkpoint's folder; a reader refuses one it does not know."""

_STEP = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"(step-\d{8})(\.replaced|\.removed)?\.tmp")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands once it is complete."""
    return folder / f"step-{step:08d}"


def unfinished(final: Path) -> Path:
    """Where a checkpoint stands while it is written."""
    return final.with_name(f"{final.name}.tmp")


def lacking(path: Path) -> list[str]:
    """Files without which a folder is no checkpoint and which are not in it."""
    return [name for name in (METADATA, STATE) if not (path / name).is_file()]


def is_complete(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return path.suffix != ".tmp" and not lacking(path)


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} is not a JSON object")
    return state


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, in the order they were committed.

    The order is that of the serial number each one carries, not of the steps: a run that started again under the same
    name stands at a lower step than what it left behind.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if _STEP.fullmatch(path.name) and is_complete(path):
            try:
                found.append((_serial(path), path.name, path))
            except CheckpointError as error:
                log.warning(f"left aside: {error}")
    return [path for *_, path in sorted(found)]


def _serial(path: Path) -> int:
    serial = read_state(path).get("serial", 0)
    return serial if isinstance(serial, int) else 0


def next_serial(folder: Path) -> int:
    """Number of the next checkpoint to be committed, from 1."""
    return max(map(_serial, complete(folder)), default=0) + 1


def choose(given: str) -> Path:
    """The checkpoint a user's path means: a checkpoint itself, or the newest of a run or of its checkpoints folder.

    Raises:
        CheckpointError: there is no complete one; says what is missing.
    """
    path = Path(given).expanduser()
    if is_complete(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.resume = {given!r}: there is no such folder")
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = complete(inside)
    if found:
        return found[-1]
    if path.suffix == ".tmp":
        raise CheckpointError(f"checkpoint.resume = {given!r}: this checkpoint was never finished")
    raise CheckpointError(
        f"checkpoint.resume = {given!r}: no complete checkpoint there (it lacks {' and '.join(lacking(path))}, "
        "and holds no step-NNNNNNNN folder that has them)"
    )


def begin(folder: Path, step: int) -> Path:
    """Sweep what killed runs left and make the empty folder the next checkpoint is written in."""
    path = unfinished(step_folder(folder, step))
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder)
    path.mkdir()
    return path


def tidy(folder: Path) -> None:
    """Remove what a killed save or removal left; put a checkpoint back that was about to be replaced."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None:
            continue
        final = path.with_name(match[1])
        if match[2] == ".replaced" and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write state.json and see it onto the disk."""
    with (path / STATE).open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def commit(path: Path) -> Path:
    """Give a finished `.tmp` folder its name, on the disk as well; returns it. A former one of that name goes."""
    final = path.with_suffix("")
    replaced = final.with_name(f"{final.name}.replaced.tmp")
    sync_folder(path)
    if final.exists():
        final.rename(replaced)
    path.rename(final)
    sync_folder(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def sync_folder(path: Path) -> None:
    """See a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retain(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`; 0 keeps all. The newest always stays."""
    for path in complete(folder)[:-keep] if keep > 0 else []:
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; it is gone at once, whenever the process dies."""
    doomed = path.with_name(f"{path.name}.removed.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)
