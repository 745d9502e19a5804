"""The folder's part of checkpoints: what counts as complete, what is chosen, kept, swept and replaced."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import names_in, raising
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.lineage import Lineage
from titan.checkpoint.disk.manifest import INDEX, MANIFEST, STATE
from titan.errors import CheckpointError


def _make(path: Path, serial: int = 0, lineage: Lineage = ()) -> Path:
    """A checkpoint without data; without a lineage, all are of one branch in the order of their numbers."""
    path.mkdir(parents=True, exist_ok=True)
    (path / INDEX).write_bytes(b"i")
    origin = {"serial": serial, "lineage": lineage or [("a", serial)]}
    state = {"format": folders.FORMAT, "step": 1, **origin, "world_size": 1, "saved": "", "torch": ""}
    (path / STATE).write_text(json.dumps(state | {"optimizer": None, "values": {}, "rest": {}}))
    manifest.write(path, {name: manifest.entry_of(path / name) for name in (INDEX, STATE)}, origin)
    return path


def test_unfinished_and_foreign_folders_are_not_complete(tmp_path: Path) -> None:
    good = _make(tmp_path / "step-00000010")
    for name in ("step-00000020.tmp", "best", "step-30"):
        _make(tmp_path / name)
    paths = [_make(tmp_path / f"step-0000004{number}") for number in range(3)]
    for path, name in zip(paths, (INDEX, STATE, MANIFEST), strict=True):
        (path / name).unlink()
    assert folders.complete(tmp_path) == [good]
    assert folders.complete(tmp_path / "absent") == []
    paths += [_make(tmp_path / f"step-0000005{number}") for number in range(3)]
    (paths[3] / STATE).write_text('{"format": ')
    (paths[4] / INDEX).write_bytes(b"ii")
    (paths[5] / "rank-00000.safetensors").touch()
    faults = [each.fault for each in folders.survey(tmp_path) if each.fault]
    lacking = (f"it lacks {name}" for name in (INDEX, STATE, MANIFEST))
    told = (*lacking, f"{STATE} has 11 bytes", f"{INDEX} has 2 bytes", "rank-00000.safetensors is not in its manifest")
    for path, fault, words in zip(paths, faults, told, strict=True):
        assert fault.startswith(f"{path} is damaged: {words}")


BACK = [("a", 8), ("b", 9)]


@pytest.mark.parametrize(
    ("lineages", "keep", "removed"),
    [
        ([[("a", 8)], [("a", 10)], [("a", 12)]], 2, "0"),
        # Back from 12 to 8: the branch that was left stays until the new one has as many of its own.
        ([[("a", 8)], [("a", 10)], [("a", 12)], BACK, [("a", 8), ("b", 11)]], 2, "012"),
        ([[("a", 8)], [("a", 10)], BACK, [("a", 8), ("b", 11)], [("a", 8), ("c", 9)]], 2, ""),
        ([[("a", 8)], [("a", 12)], BACK, [("a", 8), ("b", 11), ("c", 13)]], 1, "012"),
        # Another run's checkpoints, and a run that began anew in this folder.
        ([[("x", 4), ("a", 6)], [("x", 4), ("a", 8)], [("b", 2)]], 2, ""),
        ([[("x", 4), ("a", 6)], [("x", 4), ("a", 8)], [("b", 2)], [("b", 4)]], 2, "01"),
    ],
)
def test_retention_follows_the_branch(tmp_path: Path, lineages: list[Lineage], keep: int, removed: str) -> None:
    # Their order is that of commits, not of steps.
    paths = [_make(folders.step_folder(tmp_path, 50 - n), n + 1, each) for n, each in enumerate(lineages)]
    [*map(folders.sweep, folders.retain(tmp_path, keep))]
    assert names_in(tmp_path) == sorted(path.name for n, path in enumerate(paths) if str(n) not in removed)


def test_retention_neither_counts_nor_removes_the_damaged(tmp_path: Path) -> None:
    paths = [_make(folders.step_folder(tmp_path, step), step) for step in (10, 20, 30, 40)]
    assert [*folders.retain(tmp_path, 2, {paths[1], paths[2]})] == []
    [*map(folders.sweep, folders.retain(tmp_path, 1, {paths[1]}))]
    assert names_in(tmp_path) == [paths[1].name, paths[3].name]


def test_what_kills_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a removal, in a save, and between the two renames of a replacement: then the former one comes back."""
    for name in ("step-00000010.tmp", "step-00000030.tmp", "mine.tmp", "step-1.tmp"):
        _make(tmp_path / name, serial=2)
    _make(tmp_path / "step-00000030.replaced.tmp", serial=1)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(folders.shutil, "rmtree", raising(KeyboardInterrupt()))
        folders.remove(_make(tmp_path / "step-00000020"))
    assert folders.complete(tmp_path) == []
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == ["mine.tmp", "step-00000030", "step-1.tmp"]
    assert folders.read_state(tmp_path / "step-00000030")["serial"] == 1


def test_choose_takes_a_checkpoint_a_run_or_a_checkpoints_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    older, newest = (_make(folders.step_folder(folder, 10 * serial), serial) for serial in (1, 2))
    elsewhere = _make(tmp_path / "converted")
    for given, chosen in ((tmp_path, newest), (folder, newest), (older, older), (elsewhere, elsewhere)):
        assert folders.choose(str(given)) == chosen
    (older / STATE).unlink()
    unfinished = _make(tmp_path / "step-00000030.tmp")
    told = ("no such folder", r"it is damaged: it lacks state\.json", "unfinished: it is being written, or the run was")
    for given, words in zip((folder / "absent", older, unfinished), told, strict=True):
        with pytest.raises(CheckpointError, match=words):
            folders.choose(str(given))


def test_what_cannot_be_removed_is_a_warning_once_and_goes_later(
    tmp_path: Path, held_open: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.log, "warning", (told := []).append)
    newest = [_make(folders.step_folder(tmp_path, 10 * serial), serial) for serial in (1, 2, 3)][-1]
    _make(tmp_path / "step-00000005.removed-0123abcd.tmp")
    _make(tmp_path / "step-00000006.tmp")
    for step in (6, 40):
        [*map(folders.sweep, folders.retain(tmp_path, 1))]
        assert names_in(folders.begin(tmp_path, step)) == []
    assert [each.path for each in folders.survey(tmp_path)] == [newest]
    left = [path for path in tmp_path.iterdir() if folders.is_unfinished(path)]
    assert len(told) == 5 and len(left) == 6, "two leftovers, two retired, the save of step 6"
    assert all("cannot be removed: Directory not empty; the next save" in words for words in told)
    held_open()
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == [newest.name]


@pytest.mark.usefixtures("held_open")
def test_what_was_replaced_never_comes_back(tmp_path: Path) -> None:
    for serial in (1, 2, 3):
        path = folders.commit(_make(folders.begin(tmp_path, 10), serial))
        assert path.name == "step-00000010" and folders.read_state(path)["serial"] == serial
    folders.remove(path)
    folders.tidy(tmp_path)
    assert folders.survey(tmp_path) == []


@pytest.mark.usefixtures("held_open")
def test_a_leftover_that_stays_refuses_the_save_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _make(tmp_path / "step-00000010.tmp")
    monkeypatch.setattr(Path, "rename", raising(OSError(errno.EBUSY, "Device or resource busy")))
    assert folders.begin(tmp_path, 20).is_dir()
    with pytest.raises(CheckpointError, match=rf"^{path} .* neither removed nor renamed; end the process"):
        folders.begin(tmp_path, 10)


def test_what_is_removed_meanwhile_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, newest = (_make(folders.step_folder(tmp_path, serial), serial) for serial in (1, 2, 3))
    read = folders.read_state

    def removing(path: Path) -> dict[str, Any]:
        if path == newest:
            folders.remove(path)
        return read(path)

    monkeypatch.setattr(folders, "read_state", removing)
    assert [(each.serial, each.fault) for each in folders.survey(tmp_path)] == [(1, ""), (2, "")]
