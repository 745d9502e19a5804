"""The folder's part of checkpoints: what counts as complete, what is chosen, kept, swept and replaced."""

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import names_in, raising
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.manifest import INDEX, MANIFEST, STATE
from titan.errors import CheckpointError


def _make(path: Path, serial: int = 0, lineage: Sequence[tuple[str, int]] = ()) -> Path:
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
    _make(tmp_path / "step-00000020.tmp")
    _make(tmp_path / "best")
    _make(tmp_path / "step-30")
    broken = [tmp_path / f"step-0000004{number}" for number in range(3)]
    for path, name in zip(broken, (INDEX, STATE, MANIFEST), strict=True):
        (_make(path) / name).unlink()
    assert [each.path for each in folders.survey(tmp_path) if each.fault] == broken
    assert folders.complete(tmp_path) == [good]
    assert folders.complete(tmp_path / "absent") == []


def test_damage_that_is_cheap_to_see_is_told_apart(tmp_path: Path) -> None:
    good = _make(tmp_path / "step-00000010", serial=1)
    paths = [_make(tmp_path / f"step-0000002{number}", serial=2) for number in range(3)]
    (paths[0] / STATE).write_text('{"format": ')
    (paths[1] / INDEX).write_bytes(b"ii")
    (paths[2] / "rank-00000.safetensors").touch()
    damaged = {each.path: each.fault for each in folders.survey(tmp_path)}
    assert not damaged.pop(good)
    for path, told in zip(paths, (f"{STATE} has 11 bytes", f"{INDEX} has 2 bytes", "not in its manifest"), strict=True):
        assert damaged[path].startswith(f"{path} is damaged: ") and told in damaged[path]


BACK = [("a", 8), ("b", 9)]


@pytest.mark.parametrize(
    ("lineages", "keep", "removed"),
    [
        ([[("a", 8)], [("a", 10)], [("a", 12)]], 0, ""),
        ([[("a", 8)], [("a", 10)], [("a", 12)]], 2, "0"),
        # Back from 12 to 8: the branch that was left stays until the new one has as many of its own.
        ([[("a", 8)], [("a", 10)], [("a", 12)], BACK], 2, ""),
        ([[("a", 8)], [("a", 10)], [("a", 12)], BACK, [("a", 8), ("b", 11)]], 2, "012"),
        ([[("a", 8)], [("a", 10)], BACK, [("a", 8), ("b", 11)], [("a", 8), ("c", 9)]], 2, ""),
        ([[("a", 8)], [("a", 12)], BACK, [("a", 8), ("b", 11), ("c", 13)]], 1, "012"),
        # Another run's checkpoints, and a run that began anew in this folder.
        ([[("x", 4), ("a", 6)], [("x", 4), ("a", 8)], [("b", 2)]], 2, ""),
        ([[("x", 4), ("a", 6)], [("x", 4), ("a", 8)], [("b", 2)], [("b", 4)]], 2, "01"),
    ],
)
def test_retention_follows_the_branch(
    tmp_path: Path, lineages: list[list[tuple[str, int]]], keep: int, removed: str
) -> None:
    # Their order is that of commits, not of steps.
    paths = [_make(folders.step_folder(tmp_path, 50 - n), n + 1, each) for n, each in enumerate(lineages)]
    [*map(folders.sweep, folders.retain(tmp_path, keep))]
    assert names_in(tmp_path) == sorted(path.name for n, path in enumerate(paths) if str(n) not in removed)


def test_retention_neither_counts_nor_removes_the_damaged(tmp_path: Path) -> None:
    paths = [_make(folders.step_folder(tmp_path, step), step) for step in (10, 20, 30, 40)]
    assert [*folders.retain(tmp_path, 2, {paths[1], paths[2]})] == []
    [*map(folders.sweep, folders.retain(tmp_path, 1, {paths[1]}))]
    assert names_in(tmp_path) == [paths[1].name, paths[3].name]


def test_kill_in_the_middle_of_a_removal_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _make(tmp_path / "step-00000010")
    monkeypatch.setattr(folders.shutil, "rmtree", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        folders.remove(path)
    assert folders.complete(tmp_path) == []
    monkeypatch.undo()
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == []


def test_tidy_sweeps_own_leftovers_only(tmp_path: Path) -> None:
    for name in ("step-00000010.tmp", "step-00000020.removed-0123abcd.tmp", "mine.tmp", "step-1.tmp"):
        _make(tmp_path / name)
    _make(tmp_path / "step-00000030")
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == ["mine.tmp", "step-00000030", "step-1.tmp"]


def test_commit_replaces_a_former_checkpoint_of_the_step(tmp_path: Path) -> None:
    _make(tmp_path / "step-00000010", serial=1)
    new = folders.begin(tmp_path, 10)
    _make(new / "inner")
    _make(new, serial=2)
    assert folders.commit(new) == tmp_path / "step-00000010"
    assert folders.read_state(tmp_path / "step-00000010")["serial"] == 2
    assert names_in(tmp_path) == ["step-00000010"]


def test_killed_between_the_renames_of_a_replacement_the_former_comes_back(tmp_path: Path) -> None:
    _make(tmp_path / "step-00000010.replaced.tmp", serial=1)
    _make(tmp_path / "step-00000010.tmp", serial=2)
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == ["step-00000010"]
    assert folders.read_state(tmp_path / "step-00000010")["serial"] == 1


def test_choose_takes_a_checkpoint_a_run_or_a_checkpoints_folder(tmp_path: Path) -> None:
    _make(tmp_path / "checkpoints" / "step-00000010", serial=1)
    newest = _make(tmp_path / "checkpoints" / "step-00000020", serial=2)
    elsewhere = _make(tmp_path / "converted")
    assert folders.choose(str(tmp_path)) == newest
    assert folders.choose(str(tmp_path / "checkpoints")) == newest
    assert folders.choose(str(newest)) == newest
    assert folders.choose(str(elsewhere)) == elsewhere


def test_choose_refuses_what_is_absent_or_incomplete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        folders.choose(str(tmp_path / "absent"))
    (_make(tmp_path / "step-00000010") / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"it is damaged: it lacks state\.json"):
        folders.choose(str(tmp_path / "step-00000010"))
    with pytest.raises(CheckpointError, match="unfinished: it is being written, or the run was killed"):
        folders.choose(str(_make(tmp_path / "step-00000020.tmp")))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings so far."""
    words: list[str] = []
    monkeypatch.setattr(folders.log, "warning", words.append)
    return words


@pytest.fixture
def held_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No folder can be removed, as on NFS while somebody has a file of it open; returns what lets go of them."""

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        (path / ".nfs0000").touch()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    return monkeypatch.undo


@pytest.mark.usefixtures("held_open")
def test_a_leftover_that_cannot_be_removed_is_a_warning_once(tmp_path: Path, told: list[str]) -> None:
    newest = [_make(folders.step_folder(tmp_path, step), serial) for serial, step in enumerate((10, 20, 30), 1)][-1]
    _make(tmp_path / "step-00000005.removed-0123abcd.tmp")
    _make(tmp_path / "step-00000006.tmp")
    for step in (40, 50):
        [*map(folders.sweep, folders.retain(tmp_path, 1))]
        assert folders.begin(tmp_path, step).is_dir()
    assert [each.path for each in folders.survey(tmp_path)] == [newest]
    left = [path for path in tmp_path.iterdir() if folders.is_unfinished(path)]
    assert len(told) == 5 and len(left) == 6, "two leftovers, two retired, the .tmp of step 40 begun twice"
    assert all("cannot be removed: Directory not empty; the next save" in words for words in told)


def test_a_later_sweep_removes_what_could_not_be_removed(tmp_path: Path, held_open: Callable[[], None]) -> None:
    _make(tmp_path / "step-00000006.tmp")
    folders.tidy(tmp_path)
    assert len(names_in(tmp_path)) == 1
    held_open()
    folders.tidy(tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("held_open")
def test_a_save_is_written_beside_the_leftover_of_its_own_step(tmp_path: Path) -> None:
    _make(tmp_path / "step-00000010.tmp")
    assert list(folders.begin(tmp_path, 10).iterdir()) == []


@pytest.mark.usefixtures("held_open")
def test_what_was_replaced_and_cannot_be_removed_never_comes_back(tmp_path: Path) -> None:
    for serial in (1, 2, 3):
        _make(folders.begin(tmp_path, 10), serial)
        folders.commit(tmp_path / "step-00000010.tmp")
    assert folders.read_state(tmp_path / "step-00000010")["serial"] == 3
    folders.remove(tmp_path / "step-00000010")
    folders.tidy(tmp_path)
    assert folders.survey(tmp_path) == []


def test_a_leftover_that_cannot_be_moved_either_refuses_the_save_of_its_step(
    tmp_path: Path, held_open: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _make(tmp_path / "step-00000010.tmp")
    monkeypatch.setattr(Path, "rename", raising(OSError(errno.EBUSY, "Device or resource busy")))
    assert folders.begin(tmp_path, 20).is_dir()
    with pytest.raises(CheckpointError) as error:
        folders.begin(tmp_path, 10)
    assert str(error.value) == (
        f"{path} is a remnant of an earlier save and can be neither removed nor renamed; end the process that has a "
        "file in it open, or remove the folder"
    )


def test_a_checkpoint_that_is_removed_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for serial in (1, 2, 3):
        _make(folders.step_folder(tmp_path, serial), serial)
    read, reads = folders.read_state, iter(range(100))

    def removing(path: Path) -> dict[str, Any]:
        if next(reads) == at:
            folders.remove(path)
        return read(path)

    monkeypatch.setattr(folders, "read_state", removing)
    at = 5  # the last of a second look at all three, where there is one
    folders.next_serial(tmp_path)
    at, reads = 2, iter(range(100))
    assert folders.next_serial(tmp_path) == 3
    assert not any(each.fault for each in folders.survey(tmp_path))
