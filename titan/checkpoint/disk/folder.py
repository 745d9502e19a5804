"""The checkpoints of a run on disk: their names, which are complete, how one is committed, which are removed.

A checkpoint is complete or absent. It is written under a name that ends in `.tmp` and renamed when all of it is on
disk; it is removed by renaming it first. A kill at any moment therefore leaves complete folders and `.tmp` ones, which
`tidy` removes. A folder with the name of a checkpoint that lacks a file is therefore damaged. One that cannot be
removed (NFS keeps an open file as `.nfsXXXX`) is renamed, with one warning. Used by one rank at a time; needs no torch.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.lineage import Found, Lineage, branch, is_lineage
from titan.checkpoint.disk.manifest import INDEX, MANIFEST, STATE, TOKENIZER, FileEntry
from titan.checkpoint.disk.plain import cannot_be_read, read_table, shown, synced
from titan.errors import CheckpointError, SaveError, UnreadableError
from titan.log import log
from titan.paths import expanded, no_folder, refuse_lfs_pointer, sync

HF_CONFIG = "config.json"
"""The file that makes a folder one of Hugging Face's."""

DCP_METADATA = ".metadata"
"""The file that makes a folder one in PyTorch's default format, which `titan convert` alone reads."""

FORMAT = 3
"""Number of the layout of a checkpoint's folder; another one is refused."""

_STEP = re.compile(r"step-\d{8}", re.ASCII)
_UNFINISHED = re.compile(r"(step-\d{8})(\.replaced|\.removed-[0-9a-f]{8})?\.tmp", re.ASCII)
_DOOMED = re.compile(r".+\.removed-[0-9a-f]{8}\.tmp", re.ASCII)

_FIELDS: dict[str, tuple[type, ...]] = dict.fromkeys(("step", "serial", "world_size"), (int,))
_FIELDS |= {"lineage": (list,), "saved": (str,), "torch": (str,), "optimizer": (str, NoneType)}
_FIELDS |= dict.fromkeys(("values", "rest"), (dict,))
"""Types of the fields of a state.json."""

_MOST = 1 << 62
"""More than any count of steps, tokens or samples."""

_told: set[Path] = set()
"""What this process has said cannot be removed."""


def step_folder(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of a step stands."""
    return folder / f"step-{step:08d}"


def unfinished(final: Path) -> Path:
    """Where a checkpoint stands while it is written."""
    return final.with_name(f"{final.name}.tmp")


def lacking(path: Path) -> list[str]:
    """Files without which a folder is no checkpoint and which are not in it."""
    return [name for name in (INDEX, STATE, MANIFEST) if not (path / name).is_file()]


def is_complete(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return path.suffix != ".tmp" and not lacking(path)


def is_step(path: Path) -> bool:
    """Whether a path has the name of a checkpoint in a folder of them."""
    return _STEP.fullmatch(path.name) is not None


def is_unfinished(path: Path) -> bool:
    """Whether a path has the name of what a save or a removal is at, or has left."""
    return _UNFINISHED.fullmatch(path.name) is not None


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint; a CheckpointError unless each field is of the type that `save` gave it."""
    state = read_table(path / STATE)
    found = state.get("format")
    if type(found) is not int or found != FORMAT:
        anew = f"; `titan convert --from {path} --trust-pickle` reads its weights" if is_dcp(path) else ""
        told = f"{path} has format {shown(found)}, but this version of titan reads format {FORMAT}"
        raise CheckpointError(told + anew)
    wrong = [name for name, types in _FIELDS.items() if type(state.get(name)) not in types]
    if not wrong:
        rest, values = state["rest"], state["values"]
        wrong += [name for name in ("config", "data", "techniques") if type(rest.get(name, {})) is not dict]
        wrong += [name for name, value in values.items() if type(value) not in (NoneType, bool, int, float, str)]
    if not wrong:
        counts = {name: state[name] for name in ("step", "serial", "world_size")}
        counts |= {f"rest.{name}": rest.get(name, 0) for name in ("step", "tokens")}
        counts["samples"] = rest.get("data", {}).get("samples", 0)
        wrong += [name for name, count in counts.items() if type(count) is not int or not 0 <= count < _MOST]
        wrong += ["lineage"] * (not is_lineage(state["lineage"]))
    if wrong:
        raise CheckpointError(f"{path / STATE} has no valid {shown(wrong[0])}")
    return state


@contextmanager
def named() -> Iterator[None]:
    """What goes wrong with a checkpoint that the user has named ends with a remedy."""
    try:
        yield
    except CheckpointError as error:
        if not error.unreadable:
            error.args = (f"{error}; use another checkpoint, a copy of this one, or the version that wrote it",)
        raise


def _check_names(path: Path) -> None:
    if lacks := lacking(path):
        raise CheckpointError(f"{path} is damaged: it lacks {' and '.join(lacks)}")


def listed(path: Path) -> dict[str, FileEntry]:
    """What the manifest of a checkpoint lists; a CheckpointError where it lists what no checkpoint of `FORMAT` has."""
    try:
        return manifest.read(path)
    except CheckpointError:
        read_state(path)  # of another format, which is then what is to be told
        raise


def check_sizes(path: Path) -> dict[str, FileEntry]:
    """What the manifest of a checkpoint lists; a CheckpointError where not all is there in the size it had."""
    _check_names(path)
    entries = listed(path)
    refuse_damaged(path, manifest.wrong_sizes(path, entries).values())
    return entries


def refuse_damaged(path: Path, faults: Collection[str]) -> None:
    """Raise a CheckpointError where a checkpoint has faults."""
    if faults:
        raise CheckpointError(f"{path} is damaged: {'; '.join(faults)}")


def survey(folder: Path, *, sizes: bool = True) -> list[Found]:
    """All that has the name of a checkpoint in a folder, in the order of commits.

    The order is not that of steps: a run that went back to an older checkpoint stands at a lower step than what it
    abandoned. Damage is what can be seen without reading data; what is removed meanwhile counts for nothing.

    sizes: look at those of the files too, and hash the state.json; with many ranks there are many files.
    """
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not is_step(path):
            continue
        try:
            if sizes:
                entries = check_sizes(path)
                refuse_damaged(path, manifest.wrong_hashes(path, entries, [STATE]))  # it says what the newest is
            else:
                _check_names(path)
            state = read_state(path)
            found.append(Found(state["serial"], path, state["lineage"]))
        except UnreadableError:
            raise  # a save that did not know the newest would be taken for an older one
        except (CheckpointError, FileNotFoundError) as error:
            if path.exists():
                found.append(Found(*_origin(path), str(error)))
    return sorted(found)


def _origin(path: Path) -> tuple[int, Path, Lineage]:
    """Serial number and lineage of a damaged checkpoint: its manifest has a copy of what its state.json says."""
    for name in (MANIFEST, STATE):
        try:
            table = read_table(path / name)
        except CheckpointError as error:
            if error.unreadable:
                raise
            continue
        serial, lineage = table.get("serial"), table.get("lineage")
        if type(serial) is int and 0 <= serial < _MOST and is_lineage(lineage):
            return serial, path, lineage
    return 0, path, ()


def complete(folder: Path) -> list[Path]:
    """The newest complete checkpoint of a folder and its ancestors, the oldest first. Sizes are not looked at."""
    return sound(branch(survey(folder, sizes=False)))


def sound(found: Iterable[Found]) -> list[Path]:
    """Those in which no damage is seen."""
    return [each.path for each in found if not each.fault]


def next_serial(folder: Path) -> int:
    """Number of the next checkpoint to be committed, from 1; a CheckpointError where none is left."""
    last = max(survey(folder, sizes=False), default=None)
    if last is not None and last.serial + 1 >= _MOST:
        raise CheckpointError(f"{last.path} has the last serial number that there is, {last.serial}; remove it")
    return last.serial + 1 if last else 1


def refuse_in_doubt(found: Sequence[Found]) -> None:
    """Raise a CheckpointError where a damaged checkpoint may be the newest, and of a branch that no file tells.

    It is of a lower step than the newest of the others, and its folder was changed later.
    """
    for newest in branch(found)[-1:]:
        for each in found:
            lower = not each.lineage and each.path.name < newest.path.name
            if lower and os.path.getmtime(each.path) > os.path.getmtime(newest.path):
                told = f"nothing tells whether the run went on from {newest.path.name} or from there"
                mend = f"name a checkpoint by checkpoint.resume, or `titan checkpoint rm {each.path}`"
                raise CheckpointError(f"{each.fault}; {told}: {mend}")


def on_other_branches(found: Sequence[Found]) -> str:
    """What to say where a branch has no sound checkpoint, and others have some; else empty."""
    kept = branch(found)
    others = sound(each for each in found if each not in kept)
    return f"; {others[-1]} is of an abandoned branch: name it to use it" if others else ""


def choose(given: str, option: str = "checkpoint.resume") -> Path:
    """The checkpoint a user's path means: a checkpoint itself, or the newest of a run or of its checkpoints folder.

    option: where it was given.  Raises a CheckpointError where there is no complete one; says what is missing.
    """
    path = expanded(given, option)
    if is_complete(path):
        return path
    found = survey(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    chosen = [each for each in branch(found) if not each.fault][-1:]
    damaged = [each.fault for each in found if each.fault and not (chosen and each.lineage and each < chosen[0])]
    for reason in damaged:
        log.warning(f"damaged and ignored: {reason}{f'; using {chosen[0].path} instead' if chosen else ''}")
    if chosen:
        return chosen[0].path
    if not path.is_dir():
        told = no_folder(path)
    elif damaged:
        told = f"no undamaged checkpoint there: {'; '.join(damaged)}{on_other_branches(found)}"
    elif is_hf(path):
        told = "a Hugging Face folder has no state of a run; start from its weights with checkpoint.init_from"
    elif is_dcp(path):
        told = "it is in PyTorch's default checkpoint format; convert it with `titan convert --from`"
    elif path.suffix == ".tmp":
        told = "this checkpoint is unfinished: it is being written, or the run was killed while it saved"
    elif is_step(path):
        told = f"it is damaged: it lacks {' and '.join(lacking(path))}"
    else:
        lacks = f"it lacks {' and '.join(lacking(path))}, and holds no step-NNNNNNNN folder that has them"
        told = f"no complete checkpoint there ({lacks})"
    raise CheckpointError(f"{option} = {given!r}: {told}")


def begin(folder: Path, step: int) -> Path:
    """Sweep what killed runs left and make the empty folder the next checkpoint is written in."""
    path = unfinished(step_folder(folder, step))
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder)
    try:
        path.mkdir()
    except FileExistsError:
        what = "is a remnant of an earlier save and can be neither removed nor renamed"
        raise SaveError(f"{path} {what}; end the process that has a file in it open, or remove the folder") from None
    return path


def tidy(folder: Path) -> None:
    """Sweep what a killed save or removal left; put a checkpoint back that was about to be replaced."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None:
            continue
        final = path.with_name(match[1])
        if match[2] == ".replaced" and not final.exists():
            path.rename(final)
        else:
            sweep(path)


def sweep(path: Path) -> bool:
    """Remove what a save or a removal has left; returns whether it is gone. What stays is told, once.

    Renamed first: that often works where a removal does not, its name is free for the next save, and half removed under
    the name of what was replaced it could come back as a checkpoint.
    """
    doomed = path
    try:
        if not _DOOMED.fullmatch(path.name):
            doomed = _renamed(path)
        if doomed.is_symlink():  # to a checkpoint that is kept elsewhere
            doomed.unlink()
        else:
            shutil.rmtree(doomed)
    except OSError as error:
        if _DOOMED.fullmatch(doomed.name):
            shutil.rmtree(doomed, ignore_errors=True)  # whatever else is in it takes room too
        if os.path.lexists(doomed):
            _tell_left(doomed, error)
            return False
    return True


def _renamed(path: Path) -> Path:
    match = _UNFINISHED.fullmatch(path.name)
    name = path.name if match is None else match[1]
    return path.rename(path.with_name(f"{name}.removed-{secrets.token_hex(4)}.tmp"))


def _tell_left(path: Path, error: OSError) -> None:
    if path not in _told:
        _told.add(path)
        log.warning(f"{path} cannot be removed: {error.strerror}; the next save or start of the run tries again")


def write_copies(path: Path, copies: Mapping[str, bytes]) -> list[str]:
    """Write copies of the tokenizer's files and see them onto the disk; returns their names in the manifest."""
    for name, content in copies.items():
        (path / TOKENIZER / name).parent.mkdir(parents=True, exist_ok=True)
        with synced(path / TOKENIZER / name) as file:
            file.write(content)
    return [f"{TOKENIZER}/{name}" for name in copies]


def commit(path: Path) -> Path:
    """Give a finished `.tmp` folder its name, on the disk as well; returns it. A former one of that name goes."""
    final = path.with_suffix("")
    replaced = final.with_name(f"{final.name}.replaced.tmp")
    for folder, *_ in os.walk(path, topdown=False):
        sync(Path(folder))
    if os.path.lexists(final):
        final.rename(replaced)
    path.rename(final)
    sync(final.parent)
    if os.path.lexists(replaced):
        sweep(replaced)
    return final


def retain(folder: Path, keep: int, damaged: Collection[Path] = ()) -> Iterator[Path]:
    """Remove the checkpoints that are older than the newest `keep` of the branch, other branches' too; 0 keeps all.

    A branch that was abandoned thus stays until its successor has `keep` of its own. Each is renamed at once, and given
    back for `sweep` under its new name. One that cannot be renamed is told once.

    damaged: neither counted nor removed.
    """
    found = [each for each in survey(folder, sizes=False) if not each.fault and each.path not in damaged]
    kept = branch(found)[-keep:] if keep else []
    for each in found if keep and len(kept) == keep else []:
        if each.serial < kept[0].serial:
            try:
                yield _renamed(each.path)
            except OSError as error:
                _tell_left(each.path, error)


def remove(path: Path) -> bool:
    """Remove a checkpoint, which it then is no longer; returns as `sweep`. On an OSError it stays a checkpoint."""
    return sweep(_renamed(path))


def is_hf(path: Path) -> bool:
    """Whether a folder holds a model as Hugging Face writes it."""
    return (path / HF_CONFIG).is_file() and not (path / STATE).is_file()


def is_dcp(path: Path) -> bool:
    """Whether a folder holds a checkpoint as `torch.distributed.checkpoint` writes it by default."""
    return (path / DCP_METADATA).is_file() and not is_hf(path)


def read_hf_config(path: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder; raises a CheckpointError if it cannot be read, or is no object."""
    config = read_json(path / HF_CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / HF_CONFIG} is not a JSON object")
    return config


def read_json(path: Path) -> Any:
    """The value in a JSON file of a Hugging Face folder; raises a CheckpointError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except ValueError as error:
        refuse_lfs_pointer(path, CheckpointError)
        raise CheckpointError(f"{path} cannot be read: {error}") from error
