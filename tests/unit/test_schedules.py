"""Schedules at their boundaries, exactly, and in between."""

import itertools
import math
from typing import Any

import pytest

from titan.contracts import LrSchedule
from titan.plugins.schedules import constant, cosine, linear, wsd

DECAYING = [(linear.Linear, linear.Config), (cosine.Cosine, cosine.Config), (wsd.Wsd, wsd.Config)]
ALL = [(constant.Constant, constant.Config), *DECAYING]


def _curve(schedule: LrSchedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(("plugin", "config"), ALL)
def test_warm_up_rises_from_one_share_to_the_peak(plugin: Any, config: Any) -> None:
    assert _curve(plugin(config(warmup_steps=4)), 100)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert _curve(plugin(config(warmup_steps=8)), 4) == [0.125, 0.25, 0.375, 0.5]
    assert _curve(plugin(config(warmup_steps=2)), 2) == [0.5, 1.0]
    assert plugin(config()).factor(1, 10) == plugin(config()).factor(1, 1) == 1.0, "without a warm-up"


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(("plugin", "config"), DECAYING)
def test_the_last_step_has_exactly_the_lowest_rate(plugin: Any, config: Any, ratio: float) -> None:
    curve = _curve(plugin(config(warmup_steps=3, min_lr_factor=ratio)), 50)
    assert curve[-1] == ratio and max(curve) == curve[2] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(curve[2:]))


def test_constant_stays() -> None:
    assert set(_curve(constant.Constant(constant.Config(warmup_steps=2)), 9)[1:]) == {1.0}


def test_linear_halfway() -> None:
    assert linear.Linear(linear.Config(warmup_steps=10, min_lr_factor=0.2)).factor(15, 20) == pytest.approx(0.6)


def test_cosine_quarterway_and_halfway() -> None:
    schedule = cosine.Cosine(cosine.Config(warmup_steps=10, min_lr_factor=0.2))
    assert schedule.factor(30, 50) == pytest.approx(0.6)
    assert schedule.factor(20, 50) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(("plugin", "config"), DECAYING[:2])
def test_decay_steps_count_from_the_peak_and_the_lowest_rate_is_kept(plugin: Any, config: Any) -> None:
    schedule = plugin(config(warmup_steps=10, decay_steps=20, min_lr_factor=0.1))
    curve = _curve(schedule, 50)
    assert curve[28] > 0.1 and set(curve[29:]) == {0.1}
    assert curve[:40] == _curve(schedule, 40)


@pytest.mark.parametrize(("decay_type", "quarter"), [("linear", 0.75), ("sqrt", 0.5)])
def test_wsd_holds_the_peak_until_its_decay(decay_type: Any, quarter: float) -> None:
    curve = _curve(wsd.Wsd(wsd.Config(warmup_steps=5, decay_steps=8, decay_type=decay_type)), 40)
    assert set(curve[4:32]) == {1.0} and curve[39] == 0.0
    assert curve[33] == pytest.approx(quarter)


def test_wsd_decays_over_a_tenth_by_default_and_never_into_the_warm_up() -> None:
    assert _curve(wsd.Wsd(wsd.Config()), 100).count(1.0) == 90
    assert _curve(wsd.Wsd(wsd.Config(warmup_steps=6, decay_steps=50)), 10)[5:] == [1.0, 0.75, 0.5, 0.25, 0.0]
