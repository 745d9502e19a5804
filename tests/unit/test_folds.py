"""Axes that divide the ranks of others anew: arithmetic, refusals, search, and which modules hold slices along them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.jobs import CONFIGS, LLAMA, mesh
from titan.cli import main
from titan.config import load_job
from titan.contracts.base.layout import Axis, Layout, lay_out
from titan.errors import ConfigError
from titan.planner.machine.network import Group
from titan.planner.report.studies import Base
from titan.planner.search.space import load_base
from titan.planner.step.layout import group_of, ranks_of

STACKED, GUESTS = CONFIGS / "stacked.toml", ("--plugins.path", str(Path(__file__).parents[1] / "guests"))
AXES = [
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc=""),
    Axis(name="ep", weights="slices", folds=("dp_shard", "cp", "absent"), topology_order=25, doc=""),
    Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc=""),
    Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, default=-1, doc=""),
    Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc=""),
]
OTHER = Axis(name="other", weights="slices", folds=("cp",), topology_order=26, doc="")


def _layout(world_size: int | None = None, **wanted: int) -> Layout:
    layout, faults = lay_out(AXES, wanted, world_size)
    assert not faults
    return layout


def test_it_multiplies_the_world_by_nothing_and_counts_no_rank_twice() -> None:
    layout = _layout(16, dp_replicate=2, cp=2, tp=2, ep=4)
    assert dict(layout.degrees) == {"dp_replicate": 2, "dp_shard": 2, "ep": 4, "cp": 2, "tp": 2}
    assert layout.world_size == 16 and str(layout) == "dp_replicate 2 x dp_shard 2 x cp 2 x tp 2, ep 4"
    assert layout.axes_of("slices") == ("tp",) and layout.degree_of("slices", "dealt", "sliced") == 16
    assert layout.folded("ep") == ("dp_shard", "cp") and layout.remainder("ep") == 1
    assert layout.folded("tp") == () and _layout(8, ep=2).remainder("ep") == 4
    assert str(_layout(8)) == "dp_shard 8"


def test_its_ranks_are_neighbors_among_those_it_folds() -> None:
    layout = _layout(32, dp_replicate=2, cp=2, tp=2, ep=2)
    for rank in range(32):
        at = layout.coordinate(rank)
        assert at["ep"] == (at["dp_shard"] * 2 + at["cp"]) % 2
    wide = _layout(16, cp=2, ep=4)
    assert [wide.coordinate(rank)["ep"] for rank in range(16)] == [0, 1, 2, 3] * 4
    assert [wide.index_of(rank, "dealt", "slices") for rank in range(16)] == [rank // 2 for rank in range(16)]


@pytest.mark.parametrize(
    ("wanted", "world_size", "degrees"),
    [
        ({"ep": -1, "cp": 2}, 8, {"dp_shard": 4, "cp": 2, "ep": 8}),
        ({"ep": -1, "dp_replicate": 2}, 8, {"dp_shard": 4, "dp_replicate": 2, "ep": 4}),
        ({"ep": 4}, None, {"dp_shard": 4, "ep": 4}),
        ({"ep": 6, "cp": 4}, None, {"dp_shard": 3, "cp": 4, "ep": 6}),
        ({"ep": -1, "tp": 2}, 2, {"tp": 2, "ep": 1}),
    ],
)
def test_all_that_it_folds_and_as_few_as_it_needs(
    wanted: dict[str, int], world_size: int | None, degrees: dict[str, int]
) -> None:
    assert dict(_layout(world_size, **wanted).degrees) == {axis.name: 1 for axis in AXES} | degrees


@pytest.mark.parametrize(
    ("wanted", "ranks", "axis", "words"),
    [
        (
            {"ep": 3, "cp": 2},
            8,
            "ep",
            "= 3: must divide the ranks of the axes that it folds, dp_shard 4 x cp 2 = 8; nearest: 2 or 4",
        ),
        ({"ep": 16}, 8, "ep", "dp_shard 8; nearest: 8"),
        ({"ep": 2, "tp": 2}, 2, "ep", "dp_shard 1 x cp 1 = 1; nearest: 1"),
        ({"ep": 0}, 8, "ep", "= 0: must be a positive degree"),
        ({"ep": 3, "tp": 3}, 8, "", "tp 3 = 3 ranks, but there are 8; use 3 ranks"),
        ({"ep": 2, "other": 2, "cp": 2}, 8, "other", "= 2: mesh.ep divides the ranks of cp already; set one of them"),
    ],
)
def test_what_does_not_come_out_even_is_refused(wanted: dict[str, int], ranks: int, axis: str, words: str) -> None:
    _, [fault] = lay_out([*AXES, OTHER], wanted, ranks)
    assert fault[0] == axis and words in fault[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": "dealt", "weights": "slices"}, r'data = "dealt" with folds .*: the axes that it folds say'),
        ({"weights": "copies"}, r'weights = "copies" with folds .* must hold "slices"'),
        ({"weights": "slices", "folds": ()}, r"data: must be one of 'same', 'dealt', 'sliced', unless the axis folds"),
        ({"weights": "slices", "folds": "dp_shard"}, r"folds = 'dp_shard': must be a list"),
    ],
)
def test_an_axis_says_what_ranks_see_or_folds_axes_that_do(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Axis(**{"name": "ep", "folds": ("dp_shard",), "topology_order": 1, "doc": "", **fields})


def test_the_planner_s_groups() -> None:
    layout = _layout(32, cp=4, tp=2, ep=8)
    assert ranks_of(("ep",), layout) == 8 and group_of(("ep",), layout) == Group(8, 2)
    assert ranks_of(("dp_shard", "cp"), layout) == 16 == ranks_of(("dp_shard", "cp", "ep"), layout)
    assert group_of(("dp_shard", "cp"), layout) == Group(16, 2) and group_of(("tp",), layout) == Group(2, 1)


def test_a_search_goes_through_divisors_that_the_technique_accepts() -> None:
    words = [*GUESTS, "--data.path", "nowhere"]
    found = [dict(layout.degrees) for layout in load_base(STACKED, words).space(8, 8).layouts()]
    assert {one["spread"] for one in found} == {1, 2, 4}  # 8 would leave ranks without an element
    assert all(one["dp_shard"] * one["cp"] % one["spread"] == 0 for one in found)
    assert len(found) == len({tuple(one.items()) for one in found}) > len([one for one in found if one["spread"] == 1])
    dense = load_base(LLAMA, words).space(8, 8).layouts()
    assert {layout.degrees["spread"] for layout in dense} == {1}


@pytest.mark.parametrize(("degree", "kept"), [("2", {2}), ("-1", {1, 2, 4, 8})])
def test_a_search_keeps_a_degree_that_is_given(degree: str, kept: set[int]) -> None:
    words = [*GUESTS, "--data.path", "nowhere", "--mesh.spread", degree, "--mesh.cp", "1", "--mesh.pp", "1"]
    layouts = [layout.degrees for layout in load_base(STACKED, words).space(8, 8).layouts()]
    assert {one["spread"] for one in layouts} == kept
    assert degree == "2" or all(one["spread"] == one["dp_shard"] for one in layouts)


def test_a_study_of_slices_is_one_of_tensor_parallelism() -> None:
    job: Any = SimpleNamespace(layout=_layout(8, ep=4, tp=2))
    assert Base(job, frozenset(), 8).axis("slices") == "tp"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"spread": 3}, r"\[mesh\] spread = 3: must divide the ranks .* dp_shard 4; nearest: 2 or 4"),
        ({"spread": 2, "model": "llama"}, r"mesh\.spread = 2: model llama has no stacks"),
    ],
)
def test_a_job_is_refused_with_the_numbers(degrees: dict[str, Any], words: str) -> None:
    config = LLAMA if degrees.pop("model", "") else STACKED
    with pytest.raises(ConfigError, match=words):
        load_job(config, [*GUESTS, "--data.path", "nowhere", *mesh(**degrees)], 4)


def test_titan_config_shows_the_degree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.path", str(tmp_path), *mesh(spread=-1, cp=2)]
    assert main(["config", "--config", str(STACKED), "--world-size", "4", *words]) == 0
    shown = capsys.readouterr().out
    assert "spread = 4" in shown and "dp_shard = 2" in shown
