"""Stop, go on, on the same layout or another: the curve is the one of a run that never stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import assert_same
from tests.jobs import FOUR_LAYERS, GPT, SAVING, mesh, run_with_state
from tests.sweeps import swept_case
from titan.config import load_job
from titan.testing.jobs import JOB, Outcome, assert_same_curve, saved_tensors, train_job

SAME = ("loss", "grad_norm", "lr", "tokens")
HALF = ("--train.steps", "3")


def ranks_of(words: list[str]) -> int:
    return torch.Size(int(words[i + 1]) for i, word in enumerate(words) if word.startswith("--mesh.")).numel()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_job(tmp_path_factory.mktemp("whole"), 1, *FOUR_LAYERS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        swept_case((mesh(), mesh(dp_shard=2, tp=2))),
        (mesh(dp_shard=4), mesh(pp=2)),
        swept_case((mesh(dp_shard=2, tp=2, pp=2), mesh())),
        swept_case((mesh(cp=2, tp=2), mesh(dp_shard=2, pp=2))),
        swept_case((mesh(dp_replicate=2), mesh(cp=4))),
        swept_case((mesh(dp_replicate=2, dp_shard=2), mesh(dp_shard=2, pp=2))),
    ],
    ids=lambda words: " ".join(words).replace("--mesh.", "") or "one rank",
)
def test_on_another_layout(before: list[str], after: list[str], uninterrupted: Outcome, tmp_path: Path) -> None:
    train_job(tmp_path, ranks_of(before), *before, *FOUR_LAYERS, *SAVING, *HALF)
    assert_same_curve(uninterrupted, train_job(tmp_path, ranks_of(after), *after, *FOUR_LAYERS, *SAVING))


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ([], []),
        swept_case((mesh(dp_shard=2), ["--checkpoint.async", "false"])),
        swept_case(([], ["--data.workers", "1"])),
        swept_case((mesh(tp=2), [])),
    ],
    ids=" ".join,
)
def test_on_the_same_layout_bit_for_bit(words: list[str], more: list[str], tmp_path: Path) -> None:
    job = (tmp_path, ranks_of(words), *words, *more, *SAVING)
    whole = train_job(*job, name="whole")
    for steps in ("4",) if more else ("2", "4"):
        train_job(*job, "--train.steps", steps, name="pieces")
    pieces = train_job(*job, name="pieces")
    assert_same_rows(whole, pieces)
    ours, theirs = (saved_tensors(run.folder / "checkpoints" / "step-00000006") for run in (whole, pieces))
    assert any(name.startswith("optimizer.") for name in ours)
    assert_same(ours, theirs)


def assert_same_rows(some: Outcome, whole: Outcome) -> None:
    for step, row in some.rows.items():
        assert [row[key] for key in SAME] == [whole.rows[step][key] for key in SAME]


def test_the_rates_of_a_resumed_run_are_its_schedules(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *SAVING, *HALF)
    rows = train_job(tmp_path, 1, *SAVING).rows
    job = load_job(JOB, ["--data.path", "text"])
    factors = [job.lr_schedule.factor(step, job.train.steps) for step in range(1, 7)]
    assert len({*factors}) == 6
    rates = [job.optimizer.config.lr * factor for factor in factors]
    assert [rows[step]["lr"] for step in range(1, 7)] == pytest.approx(rates)


def test_twice_across_layouts_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    # 13,678 tokens are 427 samples of 32; 6 steps of 150 are two epochs and more, stopped within each of them.
    words = ("--data.seq_len", "32", "--train.global_batch_size", "150", *SAVING)
    whole = train_job(tmp_path, 1, *words, name="whole")
    train_job(tmp_path, 4, *words, *mesh(dp_shard=2, tp=2), "--train.steps", "2", name="pieces")
    train_job(tmp_path, 2, *words, *mesh(pp=2), "--train.steps", "4", name="pieces")
    assert_same_curve(whole, train_job(tmp_path, 5, *words, *mesh(dp_shard=5), name="pieces"))


def test_a_larger_batch_takes_the_samples_that_follow(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *SAVING, "--train.global_batch_size", "8", "--train.steps", "4")
    larger = ("--train.global_batch_size", "16", "--train.steps", "6")
    resumed = train_job(tmp_path, 2, *SAVING, *larger, *mesh(dp_shard=2))
    assert resumed.rows[4]["tokens"] == 4 * 8 * 16
    assert resumed.rows[6]["tokens"] == 4 * 8 * 16 + 2 * 16 * 16
    assert _cursor(tmp_path / "run") == 4 * 8 + 2 * 16


def test_changed_data_begins_anew(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *SAVING, *HALF)
    changed = ("--data.seq_len", "32", "--checkpoint.reset_data", "true", *SAVING, *mesh(dp_shard=2))
    for steps in (5, 7):
        train_job(tmp_path, 2, *changed, "--train.steps", str(steps))
        assert _cursor(tmp_path / "run") == (steps - 3) * 8


def _cursor(run: Path) -> Any:
    newest = max((run / "checkpoints").glob("step-*"))
    return json.loads((newest / "state.json").read_text())["rest"]["data"]["samples"]


# --- a tied head: two stages hold one tensor, and under V-shaped schedules one rank holds both ------------------------

TIED = (*FOUR_LAYERS, *SAVING, "--model.tied", "true", "--train.steps", "6", "--checkpoint.every", "3")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_job(tmp_path_factory.mktemp("tied"), 1, *TIED, config=GPT, run=run_with_state)


@pytest.mark.parametrize(
    ("schedule", "wider", "other"),
    [
        swept_case(("1F1B", {}, mesh(dp_shard=2))),
        swept_case(("InterleavedZeroBubble", {}, mesh(pp=2))),
        ("ZBVZeroBubble", {"dp_shard": 2}, mesh(pp=2)),
        swept_case(("DualPipeV", {"tp": 2}, mesh(dp_shard=2, tp=2))),
    ],
)
def test_a_tied_head(schedule: str, wider: dict[str, int], other: list[str], tied: Outcome, tmp_path: Path) -> None:
    """Resumed on the same layout it is the same bits, in both copies; to and from another one, the same curve."""

    def train(name: str, words: list[str], half: Outcome | None = None) -> Outcome:
        more = ("--checkpoint.resume", str(half.folder / "checkpoints" / "step-00000003")) if half else ()
        return train_job(tmp_path, ranks_of(words), *words, *TIED, *more, config=GPT, name=name, run=run_with_state)

    words = [*mesh(pp=2), "--plugins.pipeline.schedule", schedule]
    whole = train("whole", words)
    assert_same_curve(tied, whole)
    resumed = train("same", words, whole)
    assert resumed.rows.keys() == {4, 5, 6}
    assert_same_rows(resumed, whole)
    assert "embed.weight.exp_avg" in whole.weights
    assert_same(whole.weights, resumed.weights)
    rest = Outcome({step: tied.rows[step] for step in (4, 5, 6)}, tied.weights)
    assert_same_curve(rest, train("on", other, whole))
    assert_same_curve(rest, train("from", [*words, *mesh(**wider)], tied))
