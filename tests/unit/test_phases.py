"""The order in which techniques' hooks are called within a step."""

from torch import Tensor

from titan.contracts import Axis, Technique
from titan.training.phases import reducing

_AXIS = Axis(name="some", data="dealt", weights="copies", topology_order=1, doc="ranks")


class _Looks(Technique):
    phase = "materialise"


class _Slices(Technique):
    phase = "partition"
    axes = (_AXIS,)


class _Wraps(Technique):
    phase = "shard"
    axes = (_AXIS,)


class _Covers(Technique):
    phase = "materialise"
    covers = ("some",)


class _Scales(Technique):
    phase = "shard"

    def objective(self, objective: Tensor) -> Tensor:
        return 2 * objective


def test_sums_over_replicas_come_before_those_within_one_and_before_all_who_look() -> None:
    given = [_Looks(None), _Slices(None), _Covers(None), _Wraps(None), _Looks(None)]
    found = reducing(given)
    assert [type(technique) for technique in found] == [_Covers, _Wraps, _Slices, _Looks, _Looks]
    assert found[3:] == [given[0], given[4]]


def test_what_is_done_to_the_objective_is_undone_before_anyone_sees_a_gradient() -> None:
    found = reducing([_Looks(None), _Covers(None), _Scales(None)])
    assert [type(technique) for technique in found] == [_Scales, _Covers, _Looks]
