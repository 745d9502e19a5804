"""Whatever happens to a run at any moment, the next start goes on from its newest checkpoint, on the same curve."""

import re
import sys
from pathlib import Path

import pytest

from tests.chaos import STEPS, End, Entry, Hunt, Report
from tests.chaos_starts import LAUNCHER, RANKS, Start
from tests.injection import NEVER, Fault
from tests.sweeps import swept_case
from titan.checkpoint.disk import folder as folders
from titan.testing.jobs import run_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the parent death signal")

SAVING = ("--checkpoint.every", "1", "--checkpoint.async", "false", "--checkpoint.keep_latest", "0")


@pytest.fixture(scope="module")
def hunting(tmp_path_factory: pytest.TempPathFactory) -> Hunt:
    return Hunt(tmp_path_factory.mktemp("chaos"))


@pytest.mark.sweep
def test_five_faults(hunting: Hunt) -> None:
    report = hunting.hunt(5, seed=0)
    assert not report.violations, "\n".join(report.violations)
    assert len(report.struck) == 5


MOMENTS = {
    "between the rename of the old and of the new": Fault("rename", 1, 0, place=r"/step-00000002\.tmp$"),
    "when the old was put back": Fault("step", 1, 0, place="before step 2"),
    "half of the old is removed": Fault("remove", 2, 0, place=r"/step-00000002\.removed-\w+\.tmp"),
    "half of a tensor file is written": Fault("cut", 1, 0, place=r"/step-00000003\.tmp/.*\.safetensors$"),
    "before the metrics are cut back": Fault("rename", 1, 0, place=r"/metrics\.jsonl\.tmp$"),
    "half of state.json is written": Fault("cut", 1, 0, place=r"/step-00000003\.tmp/state\.json$"),
    "half of what that kill left is removed": Fault("remove", 2, 0, place=r"/step-00000003\.removed-\w+\.tmp"),
    "between the rename and its sync": Fault("fsync", 1, 0, place="/checkpoints$"),
    "the launcher, before a commit": Fault("rename", 1, 0, "launcher", place=r"/step-00000005\.tmp$"),
    "while the checkpoint is loaded": Fault("read", 1, 0, place=r"\.safetensors$"),
}
"""In a run that begins anew over six checkpoints of its own, one after the other."""


@pytest.mark.sweep
def test_the_worst_moments(hunting: Hunt) -> None:
    kills = list(MOMENTS.values())
    starts = [Start("one rank", LAUNCHER if kill.victim == "launcher" else RANKS, kill, SAVING) for kill in kills]
    before = Start("one rank", RANKS, NEVER, (*SAVING, "--train.steps", "6"))
    anew = Start("one rank", RANKS, kills[0], (*SAVING, "--checkpoint.resume", "never"))
    hunting.report = Report()
    report = hunting.chase([before, anew, *starts[1:], Start("one rank", RANKS, NEVER, SAVING)], rewritten=6)
    assert not report.violations, "\n".join(report.violations)
    assert len(report.struck) == len(MOMENTS)


LIVES = {
    "a corpus that grows": Fault("corpus", 20, 0, kind="growth"),
    "half of a tensor file, then EIO": Fault("put", 1, 0, place=r"/step-00000003\.tmp/.*\.safetensors$", kind="EIO"),
    "a stale handle at the commit": Fault("rename", 1, 0, place=r"/step-00000004\.tmp$", kind="ESTALE"),
    "a leftover that stays": Fault("remove", 1, 0, place=r"/step-\d+\.removed", kind="busy"),
    "no room for metrics": Fault("put", 2, 0, place=r"/metrics\.jsonl$", kind="ENOSPC", span=2),
}
"""In one run, one after the other; the last two let it go on."""


def test_a_bad_day(hunting: Hunt) -> None:
    """Errors of the file system, and what cannot be removed."""
    keeping = ("--checkpoint.every", "1", "--checkpoint.async", "false")
    steps = {"busy": ("--train.steps", "8")}
    starts = [Start("one rank", LAUNCHER, fault, (*keeping, *steps.get(fault.kind, ()))) for fault in LIVES.values()]
    hunting.report = Report()
    report = hunting.chase([*starts, Start("one rank", LAUNCHER, NEVER, keeping)])
    assert not report.violations, "\n".join(report.violations)
    assert [one["kind"] for one in report.struck] == [fault.kind for fault in LIVES.values()]
    assert [one["code"] for one in report.struck] == [2, 1, 1, 0, 0]


@pytest.mark.sweep
def test_a_clock_and_a_second_start(hunting: Hunt) -> None:
    """Two ranks, whose wall clocks jump by ten years, while somebody types the command again."""
    clock = Fault("step", 9, 0, kind="clock", jump=3e8)
    second = Fault("rename", 1, 0, place=r"/step-00000003\.tmp$", kind="second")
    hunting.report = Report()
    starts = [
        Start("dp_shard 2", LAUNCHER, fault, (*SAVING, "--train.steps", str(steps)))
        for fault, steps in ((second, 6), (clock, STEPS), (NEVER, STEPS))
    ]
    report = hunting.chase(starts)
    assert not report.violations, "\n".join(report.violations)
    assert [one["kind"] for one in report.struck] == ["second", "clock"]


@pytest.mark.parametrize(
    ("kind", "struck", "code", "said"),
    [
        ("EIO", "put x", 2, "error: x: Input/output error"),
        ("EIO", "put x", 1, "Traceback (most recent call last)"),
        ("ENOSPC", "put /run/metrics.jsonl", 1, "error: metrics.jsonl: No space left on device"),
        ("ENOSPC", "put /run/metrics.jsonl", 0, "and not a word of it"),
        ("busy", "remove x", 1, "error: x cannot be removed"),
        ("second", "step x: exit code 0: done", 0, ""),
        ("growth", "corpus x", 0, ""),
        ("clock", "step x", 1, ""),
        ("kill", "step x", -1, "rank 1 did not end within 200 s"),
    ],
)
def test_a_wrong_end_is_noticed(kind: str, struck: str, code: int, said: str, tmp_path: Path) -> None:
    hunt = Hunt(tmp_path)
    hunt.check_end_of_start("here", Fault("x", 1, 0, kind=kind), End((struck,), code, said))
    assert len(hunt.report.violations) == 1


def _name(folder: str, words: list[str]) -> Path:
    return Path(folder) / words[words.index("--run.name") + 1]


def _goes_on_from_an_older(folder: str, words: list[str], config: str) -> None:
    survey = folders.survey
    folders.survey = lambda path, sizes=True: survey(path, sizes=sizes)[: -1 if sizes else None]
    run_job(folder, words, config)


def _keeps_nothing(folder: str, words: list[str], config: str) -> None:
    folders.retain = lambda path, keep, *_: folders.complete(path)
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
        swept_case((_keeps_nothing, r"step 5 was said to be saved; there are \[\]")),
        swept_case((_goes_on_faster, "optimizer.* differs")),
        swept_case((_leaves_something, "step-00000003.tmp left at the end")),
    ],
)
def test_a_planted_fault_is_noticed(planted: Entry, fault: str, tmp_path: Path) -> None:
    starts = [Start("one rank", RANKS, kill, SAVING) for kill in (Fault("step", 1, 0, place="before step 6"), NEVER)]
    report = Hunt(tmp_path, planted).chase(starts)
    assert len(report.struck) == 1
    assert any(re.search(fault, found) for found in report.violations), report.violations
