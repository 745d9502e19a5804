"""Layouts are arithmetic: coordinates, roles, and what does not fit."""

import pytest

from titan.contracts.base.layout import Axis, DataFact, WeightsFact, lay_out

AXES = [
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc=""),
    Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, default=-1, doc=""),
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc=""),
    Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc=""),
]


def test_order_is_outer_to_inner_and_the_rest_goes_to_one_axis() -> None:
    layout, faults = lay_out(AXES, {"tp": 2, "pp": 3}, 24)
    assert not faults and dict(layout.degrees) == {"pp": 3, "dp_replicate": 1, "dp_shard": 4, "tp": 2}
    assert layout.world_size == 24 and str(layout) == "pp 3 x dp_shard 4 x tp 2"


def test_coordinates_count_through_all_ranks() -> None:
    layout, _ = lay_out(AXES, {"tp": 2, "pp": 2, "dp_replicate": 2, "dp_shard": 3}, 24)
    seen = {tuple(layout.coordinate(rank).values()) for rank in range(24)}
    assert len(seen) == 24
    assert layout.coordinate(0) == dict.fromkeys(layout.degrees, 0)
    assert layout.coordinate(1)["tp"] == 1 and layout.coordinate(23)["pp"] == 1


def test_roles_number_the_ranks_that_differ_in_them() -> None:
    layout, _ = lay_out(AXES, {"tp": 2, "pp": 2, "dp_replicate": 2, "dp_shard": 3}, 24)
    assert layout.degree_of("dealt") == 6 and layout.degree_of("slices", "layers") == 4
    by_index = [layout.index_of(rank, "dealt") for rank in range(24)]
    assert sorted(set(by_index)) == list(range(6)) and all(by_index.count(i) == 4 for i in range(6))


@pytest.mark.parametrize(
    ("wanted", "ranks", "words"),
    [
        ({"tpp": 2}, None, "no plugin owns this axis (did you mean 'tp'?)"),
        ({"tp": 0}, None, "must be a positive degree"),
        ({"tp": -1}, None, "only one axis can take all remaining ranks"),
        ({"tp": 3, "dp_shard": 1}, 8, "tp 3 = 3 ranks, but there are 8; use 3 ranks"),
        ({"tp": 3}, 8, "but there are 8"),
    ],
)
def test_faults(wanted: dict[str, int], ranks: int | None, words: str) -> None:
    _, faults = lay_out(AXES, wanted, ranks)
    assert len(faults) == 1 and words in faults[0][1]


@pytest.mark.parametrize(
    ("data", "weights", "why"),
    [
        ("same", "copies", "its ranks would all do the same work"),
        ("same", "own", 'ranks with weights of their own must see other samples, "dealt"'),
        ("sliced", "slices", 'ranks that slice sequences must hold "copies"'),
        ("sliced", "layers", 'ranks that slice sequences must hold "copies"'),
    ],
)
def test_facts_that_contradict_each_other(data: DataFact, weights: WeightsFact, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        Axis(name="a", data=data, weights=weights, topology_order=0, doc="")
    assert str(refused.value) == f'mesh axis \'a\': data = "{data}" with weights = "{weights}": {why}'
