"""Stop, go on, on the same layout or another: the curve is the one of a run that never stopped."""

from pathlib import Path

import pytest
import torch

from tests.jobs import Outcome, assert_same_curve, train_job

SAVING = ("--checkpoint.enabled", "true", "--checkpoint.every", "4")
HALF = ("--train.steps", "5")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_job(tmp_path_factory.mktemp("whole"), 1)


def mesh(**degrees: int) -> list[str]:
    return [word for axis, degree in degrees.items() for word in (f"--mesh.{axis}", str(degree))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (mesh(), mesh(dp_shard=2, tp=2)),
        (mesh(dp_shard=4), mesh(pp=2)),
        (mesh(dp_shard=2, tp=2, pp=2), mesh()),
        (mesh(pp=4), mesh(tp=2)),
        (mesh(dp_replicate=2, dp_shard=2), mesh(dp_shard=2, pp=2)),
    ],
    ids=lambda words: " ".join(words).replace("--mesh.", "") or "one rank",
)
def test_on_another_layout(before: list[str], after: list[str], uninterrupted: Outcome, tmp_path: Path) -> None:
    def ranks(words: list[str]) -> int:
        return torch.Size(int(word) for word in words[1::2]).numel()

    train_job(tmp_path, ranks(before), *before, *SAVING, *HALF)
    assert_same_curve(uninterrupted, train_job(tmp_path, ranks(after), *after, *SAVING))


@pytest.mark.parametrize("words", [[], mesh(dp_shard=2), mesh(dp_shard=2, pp=2)], ids=" ".join)
def test_on_the_same_layout_bit_for_bit(words: list[str], tmp_path: Path) -> None:
    ranks = torch.Size(int(word) for word in words[1::2]).numel()
    whole = train_job(tmp_path, ranks, *words, *SAVING, name="whole")
    train_job(tmp_path, ranks, *words, *SAVING, *HALF, name="halves")
    resumed = train_job(tmp_path, ranks, *words, *SAVING, name="halves")
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    for step in whole.rows:
        assert whole.rows[step]["loss"] == resumed.rows[step]["loss"]


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    first = train_job(tmp_path, 1, *SAVING)
    again = train_job(tmp_path, 1, *SAVING)
    assert again.rows == first.rows
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)


def test_never_begins_anew(tmp_path: Path) -> None:
    first = train_job(tmp_path, 1, *SAVING, *HALF)
    again = train_job(tmp_path, 1, *SAVING, *HALF, "--checkpoint.resume", "never")
    assert_same_curve(first, again)
