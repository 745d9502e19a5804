"""Killed at any moment, a run goes on from its newest checkpoint and draws the curve of one that nobody touched."""

import re
import sys
from pathlib import Path

import pytest

from tests.chaos import LAUNCHER, RANKS, Entry, Hunt, Report, Start
from tests.jobs import run_job
from tests.kills import NEVER, Kill
from titan.checkpoint.disk import folder as folders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the parent death signal")

SAVING = ("--checkpoint.every", "1", "--checkpoint.async", "false", "--checkpoint.keep", "0")


@pytest.fixture(scope="module")
def hunting(tmp_path_factory: pytest.TempPathFactory) -> Hunt:
    return Hunt(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("seed", range(4))
def test_ten_kills(seed: int, hunting: Hunt) -> None:
    report = hunting.hunt(10, seed)
    assert not report.faults, "\n".join(report.faults)
    assert len(report.kills) == 10


MOMENTS = {
    "between the rename of the old and of the new": Kill("rename", 1, 0, place=r"/step-00000002\.tmp$"),
    "when the old was put back": Kill("step", 1, 0, place="before step 2"),
    "half of the old is removed": Kill("remove", 2, 0, place=r"/step-00000002\.removed-\w+\.tmp"),
    "half of a tensor file is written": Kill("cut", 1, 0, place=r"/step-00000003\.tmp/.*\.distcp$"),
    "before the metrics are cut back": Kill("rename", 1, 0, place=r"/metrics\.jsonl\.tmp$"),
    "half of state.json is written": Kill("cut", 1, 0, place=r"/step-00000003\.tmp/state\.json$"),
    "half of what that kill left is removed": Kill("remove", 2, 0, place=r"/step-00000003\.removed-\w+\.tmp"),
    "between the rename and its sync": Kill("fsync", 1, 0, place="/checkpoints$"),
    "the launcher, before a commit": Kill("rename", 1, 0, "launcher", place=r"/step-00000005\.tmp$"),
    "while the checkpoint is loaded": Kill("read", 1, 0, place=r"\.distcp$"),
}
"""In a run that begins anew over six checkpoints of its own, one after the other."""


def test_the_worst_moments(hunting: Hunt) -> None:
    kills = list(MOMENTS.values())
    starts = [Start("one rank", LAUNCHER if kill.victim == "launcher" else RANKS, kill, SAVING) for kill in kills]
    before = Start("one rank", RANKS, NEVER, (*SAVING, "--train.steps", "6"))
    anew = Start("one rank", RANKS, kills[0], (*SAVING, "--checkpoint.resume", "never"))
    hunting.report = Report()
    report = hunting.chase([before, anew, *starts[1:], Start("one rank", RANKS, NEVER, SAVING)], rewritten=6)
    assert not report.faults, "\n".join(report.faults)
    assert len(report.kills) == len(MOMENTS)


def _name(folder: str, words: list[str]) -> Path:
    return Path(folder) / words[words.index("--run.name") + 1]


def _goes_on_from_an_older(folder: str, words: list[str], config: str) -> None:
    survey = folders.survey
    folders.survey = lambda path: (survey(path)[0][:-1], survey(path)[1])
    run_job(folder, words, config)


def _keeps_nothing(folder: str, words: list[str], config: str) -> None:
    folders.retain = lambda path, keep, *_: [folders.remove(one) for one in folders.complete(path)]
    run_job(folder, words, config)


def _goes_on_faster(folder: str, words: list[str], config: str) -> None:
    faster = ("--optimizer.lr", "3.0001e-4") if _name(folder, words).exists() else ()
    run_job(folder, [*words, *faster], config)


def _leaves_something(folder: str, words: list[str], config: str) -> None:
    run_job(folder, words, config)
    (_name(folder, words) / "checkpoints" / "step-00000003.tmp").mkdir()


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        (_goes_on_from_an_older, "weights are from .*step-00000004, should be from .*step-00000005"),
        (_keeps_nothing, r"step 5 was said to be saved; there are \[\]"),
        (_goes_on_faster, "optimizer.* differs"),
        (_leaves_something, "step-00000003.tmp left at the end"),
    ],
)
def test_a_planted_fault_is_noticed(planted: Entry, fault: str, tmp_path: Path) -> None:
    starts = [Start("one rank", RANKS, kill, SAVING) for kill in (Kill("step", 1, 0, place="before step 6"), NEVER)]
    report = Hunt(tmp_path, planted).chase(starts)
    assert len(report.kills) == 1
    assert any(re.search(fault, found) for found in report.faults), report.faults
