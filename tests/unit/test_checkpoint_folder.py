"""The folder's part of checkpoints: what counts as complete, what is chosen, kept, swept and replaced."""

import json
from pathlib import Path

import pytest

from titan.checkpoint import folder as folders
from titan.errors import CheckpointError


def _make(path: Path, serial: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / folders.METADATA).write_bytes(b"m")
    (path / folders.STATE).write_text(json.dumps({"serial": serial}))
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_unfinished_and_foreign_folders_are_not_complete(tmp_path: Path) -> None:
    good = _make(tmp_path / "step-00000010")
    _make(tmp_path / "step-00000020.tmp")
    _make(tmp_path / "best")
    _make(tmp_path / "step-30")
    for lacking in (folders.METADATA, folders.STATE):
        (_make(tmp_path / f"step-0000004{len(lacking) % 10}") / lacking).unlink()
    assert folders.complete(tmp_path) == [good]
    assert folders.complete(tmp_path / "absent") == []


def test_order_is_that_of_commits_not_of_steps(tmp_path: Path) -> None:
    left_behind = _make(tmp_path / "step-00001000", serial=1)
    again = _make(tmp_path / "step-00000010", serial=2)
    assert folders.complete(tmp_path) == [left_behind, again]
    assert folders.next_serial(tmp_path) == 3


def test_damaged_state_is_left_aside_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(folders.log, "warning", told.append)
    good = _make(tmp_path / "step-00000010", serial=1)
    (_make(tmp_path / "step-00000020", serial=2) / folders.STATE).write_text('{"serial": ')
    assert folders.complete(tmp_path) == [good]
    assert len(told) == 1 and str(tmp_path / "step-00000020" / folders.STATE) in told[0]


@pytest.mark.parametrize(("keep", "left"), [(0, [10, 20, 30]), (1, [30]), (2, [20, 30]), (9, [10, 20, 30])])
def test_retention_keeps_the_newest_complete(tmp_path: Path, keep: int, left: list[int]) -> None:
    for serial, step in enumerate((10, 20, 30), start=1):
        _make(folders.step_folder(tmp_path, step), serial)
    (tmp_path / "step-00000040").mkdir()
    folders.retain(tmp_path, keep)
    assert _names(tmp_path) == [f"step-000000{step}" for step in [*left, 40]]


def test_kill_in_the_middle_of_a_removal_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _make(tmp_path / "step-00000010")

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        folders.remove(path)
    assert folders.complete(tmp_path) == []
    monkeypatch.undo()
    folders.tidy(tmp_path)
    assert _names(tmp_path) == []


def test_tidy_sweeps_own_leftovers_only(tmp_path: Path) -> None:
    for name in ("step-00000010.tmp", "step-00000020.removed.tmp", "mine.tmp", "step-1.tmp"):
        _make(tmp_path / name)
    _make(tmp_path / "step-00000030")
    folders.tidy(tmp_path)
    assert _names(tmp_path) == ["mine.tmp", "step-00000030", "step-1.tmp"]


def test_commit_replaces_a_former_checkpoint_of_the_step(tmp_path: Path) -> None:
    _make(tmp_path / "step-00000010", serial=1)
    new = folders.begin(tmp_path, 10)
    _make(new / "inner")
    folders.write_state(new, {"serial": 2})
    (new / folders.METADATA).touch()
    assert folders.commit(new) == tmp_path / "step-00000010"
    assert folders.read_state(tmp_path / "step-00000010") == {"serial": 2}
    assert _names(tmp_path) == ["step-00000010"]


def test_killed_between_the_renames_of_a_replacement_the_former_comes_back(tmp_path: Path) -> None:
    _make(tmp_path / "step-00000010.replaced.tmp", serial=1)
    _make(tmp_path / "step-00000010.tmp", serial=2)
    folders.tidy(tmp_path)
    assert _names(tmp_path) == ["step-00000010"]
    assert folders.read_state(tmp_path / "step-00000010") == {"serial": 1}


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
    (_make(tmp_path / "step-00000010") / folders.STATE).unlink()
    with pytest.raises(CheckpointError, match=r"lacks state\.json, and"):
        folders.choose(str(tmp_path / "step-00000010"))
    with pytest.raises(CheckpointError, match="never finished"):
        folders.choose(str(_make(tmp_path / "step-00000020.tmp")))
