"""Tests of the tracker example: the suite of the contract, and what it writes of a run that is resumed."""

from pathlib import Path

import pytest

from titan.testing import Check, checks, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="tracker"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_writes_every_row_once(tmp_path: Path) -> None:
    words = (*PLUGINS, "--metrics.example.digits", "9", "--checkpoint.enabled", "true")
    train_job(tmp_path, 1, *words, "--train.steps", "2")
    outcome = train_job(tmp_path, 2, *words, "--mesh.dp_shard", "2", "--train.steps", "4")
    lines = [f"{step},{row['loss']:.9g}" for step, row in sorted(outcome.rows.items())]
    assert (outcome.folder / "example.csv").read_text().splitlines() == ["step,loss", *lines]
