"""The order in which techniques' hooks are called within a step, and the one place that cuts a batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from titan.contracts import Axis, Batch, Phase, Technique
from titan.contracts.base.layout import Layout
from titan.errors import PluginError
from titan.training.phases import cut, reducing

DEALT = (Axis(name="some", data="dealt", weights="copies", topology_order=1, doc="ranks"),)


def _technique(**facts: Any) -> Technique:
    """One whose class has these facts and hooks."""
    made: Technique = type("Made", (Technique,), facts)(None)
    return made


def test_sums_over_replicas_come_before_those_within_one_and_before_all_who_look() -> None:
    looks, looks_too = _technique(phase="materialise"), _technique(phase="materialise")
    covers = _technique(phase="materialise", covers=("some",))
    slices, wraps = (_technique(phase=phase, axes=DEALT) for phase in ("partition", "shard"))
    assert reducing([looks, slices, covers, wraps, looks_too]) == [covers, wraps, slices, looks, looks_too]


def test_a_loss_is_unscaled_before_anyone_sees_a_gradient() -> None:
    looks, covers = _technique(phase="materialise"), _technique(phase="materialise", covers=("some",))
    scales = _technique(phase="shard", loss_scale=lambda self: torch.ones(()))
    assert reducing([looks, covers, scales]) == [scales, covers, looks]


AXES = (
    Axis(name="dp", data="dealt", weights="copies", topology_order=0, doc=""),
    Axis(name="half", data="sliced", weights="copies", topology_order=1, doc=""),
    Axis(name="third", data="sliced", weights="copies", topology_order=2, doc=""),
)


def _cutter(change: Callable[[Batch], Any], phase: Phase = "convert") -> Technique:
    """A technique that does this to a batch."""
    facts = {"name": "cutter", "phase": phase, "batch": lambda self, batch: change(batch)}
    made: Technique = type("Cutter", (Technique,), facts)(None)
    return made


def _cut(techniques: Sequence[Technique], **degrees: int) -> Batch:
    """A batch of two sequences of twelve positions, cut at these degrees."""
    tokens = torch.arange(24).view(2, 12)
    layout = Layout(AXES, {axis.name: degrees.get(axis.name, 1) for axis in AXES})
    context: Any = SimpleNamespace(techniques=techniques, mesh=SimpleNamespace(layout=layout))
    return cut(Batch(tokens, tokens + 1), context)


def _sliced(where: slice, *fields: str) -> Callable[[Batch], Batch]:
    """Cuts these fields of a batch; by default all three that are of its positions."""
    names = fields or ("tokens", "labels", "positions")
    return lambda batch: replace(batch, **{name: getattr(batch, name)[:, where] for name in names})


FIRST, EVEN = slice(None, 6), slice(None, None, 2)


@pytest.mark.parametrize("techniques", [[], [_cutter(lambda batch: batch)]], ids=["none", "one that leaves it"])
def test_a_batch_stays_whole_where_no_axis_slices_it(techniques: list[Technique]) -> None:
    batch = _cut(techniques, dp=4)
    assert batch.tokens.tolist() == torch.arange(24).view(2, 12).tolist()
    assert batch.positions.tolist() == [list(range(12))] * 2


def test_techniques_cut_what_those_of_earlier_phases_have_left() -> None:
    thirds = _cutter(_sliced(slice(2, 4)), "materialise")
    batch = _cut([thirds, _cutter(_sliced(EVEN))], half=2, third=3)  # a TOML may name the later one first
    assert batch.positions.tolist() == [[4, 6]] * 2
    assert batch.labels.tolist() == (batch.tokens + 1).tolist() == [[5, 7], [17, 19]]


@pytest.mark.parametrize(
    ("techniques", "degrees", "left"),
    [
        ([], {"half": 2}, "12 of 12 positions are left to each of 2 ranks"),
        ([_cutter(lambda batch: batch)], {"half": 2, "dp": 2}, "12 of 12 positions are left to each of 2 ranks"),
        ([_cutter(_sliced(FIRST))], {"half": 2, "third": 3}, "6 of 12 positions are left to each of 6 ranks"),
        ([_cutter(_sliced(FIRST))], {"dp": 2}, "6 of 12 positions are left to each of 1 ranks"),
    ],
    ids=["nobody cuts", "left whole", "cut for one axis of two", "cut for no axis"],
)
def test_ranks_have_a_slice_each(techniques: list[Technique], degrees: dict[str, int], left: str) -> None:
    with pytest.raises(PluginError) as refused:
        _cut(techniques, **degrees)
    ranks = degrees.get("half", 1) * degrees.get("third", 1)
    how = f"batch() of the technique that owns their axis must return 1 in {ranks}"
    assert str(refused.value) == f"{left} that slice sequences; {how}"


SHAPES = {
    "tokens": "[2, 6], [2, 12], [2, 12]",
    "labels": "[2, 12], [2, 6], [2, 12]",
    "positions": "[2, 12], [2, 12], [2, 6]",
}


@pytest.mark.parametrize("field", SHAPES)
def test_tokens_labels_and_positions_are_cut_alike(field: str) -> None:
    with pytest.raises(PluginError) as refused:
        _cut([_cutter(_sliced(FIRST, field))], half=2)
    said = f"batch() returned tokens, labels and positions of shapes {SHAPES[field]}; cut them alike"
    assert str(refused.value).startswith("technique 'cutter' in ") and str(refused.value).endswith(f": {said}")


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "returned None"), (torch.zeros(2, 12), "of type Tensor")], ids=["None", "a tensor"]
)
def test_a_batch_is_returned(answer: Tensor | None, said: str) -> None:
    with pytest.raises(PluginError, match=rf"technique 'cutter' in .*: batch\(\) .*{said}.* must return a Batch"):
        _cut([_cutter(lambda _: answer)])
