"""The order in which techniques' hooks are called within a step."""

from typing import Any

from titan.contracts import Axis, Technique
from titan.training.phases import reducing

AXES = (Axis(name="some", data="dealt", weights="copies", topology_order=1, doc="ranks"),)


def _technique(**facts: Any) -> Technique:
    """One whose class has these facts and hooks."""
    made: Technique = type("Made", (Technique,), facts)(None)
    return made


def test_sums_over_replicas_come_before_those_within_one_and_before_all_who_look() -> None:
    looks, looks_too = _technique(phase="materialise"), _technique(phase="materialise")
    covers = _technique(phase="materialise", covers=("some",))
    slices, wraps = (_technique(phase=phase, axes=AXES) for phase in ("partition", "shard"))
    assert reducing([looks, slices, covers, wraps, looks_too]) == [covers, wraps, slices, looks, looks_too]


def test_what_is_done_to_the_objective_is_undone_before_anyone_sees_a_gradient() -> None:
    looks, covers = _technique(phase="materialise"), _technique(phase="materialise", covers=("some",))
    scales = _technique(phase="shard", objective=lambda self, objective: 2 * objective)
    assert reducing([looks, covers, scales]) == [scales, covers, looks]
