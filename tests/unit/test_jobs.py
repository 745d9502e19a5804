"""The comparator itself: it passes what is equal and notices each planted fault."""

import copy

import pytest
import torch

from tests.jobs import Outcome, assert_same_curve, differences


@pytest.fixture
def outcome() -> Outcome:
    rows = {s: {"loss": 5.0 - s / 10, "grad_norm": 1.0 + s, "tokens": 128 * s, "lr": 1e-3} for s in range(1, 11)}
    return Outcome(rows, {"embed.weight": torch.linspace(-1, 1, 40).view(10, 4), "norm.weight": torch.ones(4)})


def test_equal_outcomes_pass(outcome: Outcome) -> None:
    assert_same_curve(outcome, copy.deepcopy(outcome))


@pytest.mark.parametrize(
    ("key", "factor"), [("loss", 1 + 2e-5), ("grad_norm", 1 + 2e-4), ("grad_norm", 2.0), ("tokens", 2), ("lr", 1.001)]
)
def test_one_wrong_value_of_one_step(outcome: Outcome, key: str, factor: float) -> None:
    other = copy.deepcopy(outcome)
    other.rows[7][key] *= factor
    assert len(differences(outcome, other)) == 1 and f"step 7: {key}" in differences(outcome, other)[0]


def test_not_a_number(outcome: Outcome) -> None:
    other = copy.deepcopy(outcome)
    other.rows[3]["loss"] = float("nan")
    other.weights["norm.weight"][0] = float("nan")
    assert len(differences(outcome, other)) == 2


def test_a_missing_step_and_a_missing_parameter(outcome: Outcome) -> None:
    other = copy.deepcopy(outcome)
    del other.rows[10], other.weights["norm.weight"]
    assert len(differences(outcome, other)) == 2


@pytest.mark.parametrize("change", [1e-4, -1e-3])
def test_one_wrong_weight(outcome: Outcome, change: float) -> None:
    other = copy.deepcopy(outcome)
    other.weights["embed.weight"][5, 2] += change
    assert differences(outcome, other)[0].startswith("embed.weight")


def test_weights_that_are_permuted(outcome: Outcome) -> None:
    other = copy.deepcopy(outcome)
    other.weights["embed.weight"] = other.weights["embed.weight"].roll(1, 0)
    assert differences(outcome, other)


def test_nothing_is_not_something(outcome: Outcome) -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        assert_same_curve(Outcome({}, {}), Outcome({}, {}))
