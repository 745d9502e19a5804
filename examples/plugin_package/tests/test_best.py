"""The tracker: the suite of the contract, and what it writes of a run that is resumed."""

import json
from pathlib import Path

import pytest

from titan.testing import Check, checks, train_job


@pytest.mark.parametrize("check", checks("best"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_the_lowest_loss_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    words = ("--metrics.best.enabled", "true", "--checkpoint.enabled", "true", "--optimizer.lr", "0.05")
    train_job(tmp_path, 1, *words, "--train.steps", "3")
    outcome = train_job(tmp_path, 1, *words, "--train.steps", "6")
    step = min(outcome.rows, key=lambda step: outcome.rows[step]["loss"])
    best = {"step": step, "value": outcome.rows[step]["loss"]}
    assert json.loads((outcome.folder / "best.json").read_text()) == best
