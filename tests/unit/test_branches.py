"""Histories of a run that went back: which checkpoint `auto` goes on from, what is kept, and what the list draws."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.mutations import build, checkpointer
from tests.checkpoints import flip, halve, steps_in
from titan import cli
from titan.checkpoint.disk.folder import choose, read_state, step_folder
from titan.checkpoint.disk.lineage import MOST_STARTS
from titan.checkpoint.disk.manifest import MANIFEST, STATE, data_file
from titan.errors import CheckpointError

DATA = data_file(0)


def _train(folder: Path, resume: str | Path, *steps: int, keep: int = 0) -> int:
    """Go on as `checkpoint.resume` says and save these steps; returns the step gone on from, 0 for new weights."""
    run, (parts, optimizer) = checkpointer(folder, keep), build()
    path = run.find(str(resume))
    before = 0 if path is None else run.load(path, parts, optimizer)["at"]
    for step in steps:
        run.save(step, parts, optimizer, {"at": step})
    run.close()
    return int(before)


@pytest.fixture
def back(tmp_path: Path) -> Path:
    """Steps 8, 10 and 12; then back to 8, and on to 9."""
    folder = tmp_path / "run"
    _train(folder, "auto", 8, 10, 12, keep=3)
    assert _train(folder, step_folder(folder, 8), 9, keep=3) == 8
    return folder


def test_a_branch_is_kept_until_its_successor_has_as_many(told: Callable[[], list[str]], back: Path) -> None:
    assert steps_in(back) == [8, 9, 10, 12] and choose(str(back)) == step_folder(back, 9)
    assert _train(back, "auto", 11, keep=3) == 9
    assert steps_in(back) == [8, 9, 10, 11, 12]
    assert _train(back, step_folder(back, 11), 13, keep=3) == 11
    assert steps_in(back) == [9, 11, 13]
    assert _train(back, step_folder(back, 9), keep=3) == 9
    [text] = told()
    assert (
        f"the first save abandons step-00000011, step-00000013 in {back}; kept" in text and "until 3 are saved" in text
    )
    (back / "step-00000014.tmp").mkdir()
    assert _train(back, "never", keep=3) == 0 and steps_in(back) == [9, 11, 13], "what is unfinished goes"
    assert "the first save abandons step-00000009, step-00000011, step-00000013 in" in told()[1]


@pytest.mark.parametrize(("name", "damage"), [(DATA, halve), (DATA, flip), (STATE, halve), (MANIFEST, Path.unlink)])
def test_with_the_newest_damaged_its_ancestor_goes_on(back: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(step_folder(back, 9) / name)
    assert _train(back, "required", 10) == 8
    assert _train(back, "auto") == 10


def test_no_abandoned_branch_is_gone_on_from_unasked(back: Path) -> None:
    _train(back, "auto", 11)
    for step in (8, 9, 11):
        flip(step_folder(back, step) / DATA)
    with pytest.raises(CheckpointError, match=f"step-00000008 is damaged.*; {step_folder(back, 12)} is of"):
        _train(back, "auto")
    halve(step_folder(back, 8) / STATE)  # a parent that says nothing
    halve(step_folder(back, 8) / MANIFEST)
    with pytest.raises(CheckpointError, match=f"no sound checkpoint is left .*; {step_folder(back, 12)} is of"):
        _train(back, "auto")
    assert _train(back, step_folder(back, 12), 14) == 12
    assert _train(back, "auto") == 14


def test_what_says_nothing_and_may_be_the_newest_stops_a_start(back: Path) -> None:
    for name in (STATE, MANIFEST):
        (step_folder(back, 9) / name).unlink()
    with pytest.raises(CheckpointError, match=r"lacks .*; nothing tells whether the run went on from step-00000012"):
        _train(back, "auto")
    assert _train(back, step_folder(back, 8)) == 8
    os.utime(step_folder(back, 9), (1, 1))  # damaged before the others were saved
    assert _train(back, "auto") == 12


def test_rm_leaves_what_is_sound(back: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (8, 9):
        flip(step_folder(back, step) / STATE)
    for which in (["--keep", "2"], ["--abandoned"]):
        assert cli.main(["checkpoint", "rm", str(back), *which, "--yes"]) == 2
        assert f"nothing was removed; {step_folder(back, 12)} is of an abandoned branch" in capsys.readouterr().err
    assert steps_in(back) == [8, 9, 10, 12]


def test_back_twice_and_to_another_run(back: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _train(back, step_folder(back, 8), 10, 12)  # in place of those that were abandoned
    assert _train(back, step_folder(back, 9), 11) == 9
    assert _train(back, "auto") == 11
    other = back.with_name("other")
    assert _train(other, step_folder(back, 12), 14, 16) == 12
    assert _train(other, step_folder(other, 14), 15) == 14
    drawn = []
    for folder in (back, other):
        assert cli.main(["checkpoint", "list", str(folder)]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        drawn.append([" ".join(row[: head.index("saved")].split()) for row in rows])
    assert drawn == [["* 8", "* 9", "|-* 10", "| * 12", "* 11"], ["* 14", "|-* 16", "* 15"]]
    assert cli.main(["checkpoint", "rm", str(back), "--abandoned", "--yes"]) == 0 and steps_in(back) == [8, 9, 11]
    assert cli.main(["checkpoint", "rm", str(other), "--keep", "2", "--yes"]) == 0 and steps_in(other) == [14, 15]


def test_a_lineage_without_bounds_is_none(back: Path) -> None:
    for lineage in ([["a", 1]] * (MOST_STARTS + 1), [["a" * 17, 1]], [], [["a", "1"]], [["a"]]):
        state = json.loads((step_folder(back, 9) / STATE).read_text())
        (step_folder(back, 9) / STATE).write_text(json.dumps(state | {"lineage": lineage}))
        with pytest.raises(CheckpointError, match="has no valid lineage"):
            read_state(step_folder(back, 9))
