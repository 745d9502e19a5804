"""An error that nobody foresaw ends a run, but not without what its last finished step has left."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.jobs import SAVING
from titan.errors import DataError
from titan.testing.jobs import assert_same_curve, run_job, train_job
from titan.testing.ranks import RankError

VALIDATING = ("--validation.every", "5", "--validation.name", "text", "--validation.glob", "*.txt")


def broken_between(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Raises after step 5 is done and before step 6 begins."""
    from titan.training import trainer

    def fail(run: object) -> None:
        raise DataError("a shard is gone")

    trainer.validate = fail
    return run_job(folder, words, config)


def broken_within(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Raises in step 5, after the optimizer has stepped and before the step is counted."""
    from titan.training.gradients import NonfiniteGuard

    update, steps = NonfiniteGuard.update, iter(range(100))

    def fail(guard: NonfiniteGuard, optimizer: torch.optim.Optimizer) -> None:
        update(guard, optimizer)
        return None if next(steps) < 4 else {}["planted"]

    NonfiniteGuard.update = fail  # type: ignore[method-assign]
    return run_job(folder, words, config)


def words_of(folder: Path) -> list[str]:
    return [*VALIDATING, "--validation.path", str(folder / "text"), *SAVING, "--checkpoint.every", "100"]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("*"))


def test_an_error_between_steps_loses_no_step(tmp_path: Path) -> None:
    whole = train_job(tmp_path, 1, *words_of(tmp_path), name="whole")
    with pytest.raises(RankError, match="a shard is gone"):
        train_job(tmp_path, 1, *words_of(tmp_path), run=broken_between)
    assert saved(tmp_path) == ["step-00000005"]
    again = train_job(tmp_path, 1, *words_of(tmp_path))
    for outcome in (whole, again):
        outcome.rows[5].pop("validation_loss", None)
    assert_same_curve(whole, again)


def test_a_step_that_is_half_done_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="planted"):
        train_job(tmp_path, 1, *words_of(tmp_path), run=broken_within)
    assert saved(tmp_path) == []


def test_an_error_that_may_be_one_ranks_own_saves_nothing_and_hangs_nobody(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a shard is gone"):
        train_job(tmp_path, 2, "--mesh.dp_shard", "2", *words_of(tmp_path), run=broken_between, timeout=60)
    assert saved(tmp_path) == []
