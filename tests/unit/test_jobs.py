"""The comparator itself: it passes what is equal and notices each planted fault."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from titan.testing import jobs
from titan.testing.jobs import Outcome, assert_same_curve, deviations, differences, read_rows, train_job


@pytest.fixture
def outcome() -> Outcome:
    rows = {s: {"loss": 5.0 - s / 10, "grad_norm": 1.0 + s, "tokens": 128 * s, "lr": 1e-3} for s in range(1, 11)}
    return Outcome(rows, {"embed.weight": torch.linspace(-1, 1, 40).view(10, 4), "norm.weight": torch.ones(4)})


@pytest.fixture
def other(outcome: Outcome) -> Outcome:
    return copy.deepcopy(outcome)


def test_equal_outcomes_pass(outcome: Outcome, other: Outcome) -> None:
    assert_same_curve(outcome, other)


@pytest.mark.parametrize(
    ("key", "factor"), [("loss", 1 + 2e-5), ("grad_norm", 1 + 2e-4), ("grad_norm", 2.0), ("tokens", 2), ("lr", 1.001)]
)
def test_one_wrong_value_of_one_step(outcome: Outcome, other: Outcome, key: str, factor: float) -> None:
    other.rows[7][key] *= factor
    (found,) = differences(outcome, other)
    assert f"step 7: {key}" in found


def test_not_a_number(outcome: Outcome, other: Outcome) -> None:
    other.rows[3]["loss"] = float("nan")
    other.weights["norm.weight"][0] = float("nan")
    assert len(differences(outcome, other)) == 2


def test_a_missing_step_and_a_missing_parameter(outcome: Outcome, other: Outcome) -> None:
    del other.rows[10], other.weights["norm.weight"]
    assert len(differences(outcome, other)) == 2


@pytest.mark.parametrize("change", [1e-4, -1e-3])
def test_one_wrong_weight(outcome: Outcome, other: Outcome, change: float) -> None:
    other.weights["embed.weight"][5, 2] += change
    assert differences(outcome, other)[0].startswith("embed.weight")


def test_weights_that_are_permuted(outcome: Outcome, other: Outcome) -> None:
    other.weights["embed.weight"] = other.weights["embed.weight"].roll(1, 0)
    assert differences(outcome, other)


def test_validation_is_compared_where_there_is_one(outcome: Outcome, other: Outcome) -> None:
    outcome.rows[4]["validation_loss"] = 5.0
    assert differences(outcome, other) == ["step 4: validation_loss 5.0 against nan"]
    other.rows[4]["validation_loss"] = 5.0 * (1 + 5e-6)
    assert not differences(outcome, other)
    other.rows[4]["validation_loss"] = 5.0 * (1 + 2e-5)
    assert differences(outcome, other)[0].startswith("step 4: validation_loss")


def test_how_far_apart(outcome: Outcome, other: Outcome) -> None:
    other.rows[3]["loss"] *= 1 + 3e-6
    other.rows[5]["grad_norm"] *= 1 - 2e-5
    other.weights["norm.weight"][2] += 0.5 * 1.01e-4
    assert not differences(outcome, other)
    expected = {"loss": 3e-6, "grad_norm": 2e-5, "weights": 0.5}
    assert deviations(outcome, other) == pytest.approx(expected, rel=1e-2)
    assert set(deviations(outcome, copy.deepcopy(outcome)).values()) == {0.0}
    outcome.rows[3]["loss"] = 0.0
    assert deviations(outcome, other)["loss"] == math.inf


def test_rows_of_a_step_are_one(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 5.0},
        {"step": 1, "validation_loss": 6.0},
        {"step": 2, "loss": 4.0},
        {"step": 0, "other": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(tmp_path) == {1: {"step": 1, "loss": 5.0, "validation_loss": 6.0}, 2: {"step": 2, "loss": 4.0}}


def test_ranks_that_hold_other_values_of_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(1)}]
    monkeypatch.setattr(jobs, "run_ranks", lambda *_, **__: held)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert train_job(tmp_path, 2).weights.keys() == {"a", "b"}
    held[1]["a"] = held[1]["a"] + 1e-7
    with pytest.raises(AssertionError, match=r"a differs between its holders by 1\.19e-07"):
        train_job(tmp_path, 2)


def test_nothing_is_not_something(outcome: Outcome) -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        assert_same_curve(Outcome({}, {}), Outcome({}, {}))
