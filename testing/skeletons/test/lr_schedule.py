"""Tests of the schedule example: the suite of the contract, its values, and the rates of a run."""

from pathlib import Path

import pytest

from titan.testing import Check, checks, make_plugin, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="lr_schedule"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_factors() -> None:
    schedule = make_plugin("example", *PLUGINS, kind="lr_schedule", warmup_steps=4)
    factors = [schedule.factor(step, steps=100) for step in (1, 2, 4, 16, 64)]
    assert factors == [0.25, 0.5, 1.0, 0.5, 0.25]


def test_a_run_uses_them(tmp_path: Path) -> None:
    words = ("--lr_schedule.name", "example", "--lr_schedule.warmup_steps", "4", "--optimizer.lr", "1.0")
    rows = train_job(tmp_path, 1, *PLUGINS, *words, "--train.steps", "4").rows
    assert [row["lr"] for row in rows.values()] == [0.25, 0.5, 0.75, 1.0]
