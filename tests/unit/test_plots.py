"""Pictures of predictions and studies (planner/report/pictures.py)."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from titan.config import load_job
from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.planner.report.plots import ACTIONS, COMPONENTS, LEGIBLE, draw_study, prediction_figure, study_figure
from titan.planner.report.plots import draw_prediction as draw
from titan.planner.report.study import Point, Study
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner, Prediction

FRONTIER = cluster.load("mi250x-frontier")
pytest.importorskip("matplotlib")
STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def _predicted(config: str = "configs/debug3d.toml", *words: str, keep: bool = True) -> Prediction:
    job = load_job(Path(config), words)
    return Planner(FRONTIER).predict(costs_of(job), job.layout, keep=keep)


def _study(*points: Point, shown: Sequence[str] = ("memory_gib",), bars: bool = False) -> Study:
    return Study("name", "Title", "the job", "x", tuple(shown), bars, 80.0, points)


def _point(x: float, value: float, series: str = "", fits: bool = True) -> Point:
    return Point(x, f"{x:g}", series, {"memory_gib": value, "tokens_per_s": 10 * value}, fits)


SMALL = _study(_point(1, 90, fits=False), _point(2, 50), Point(4, "4", "", {}, False, "four is too many"))


@pytest.mark.parametrize("suffix", STARTS)
def test_files(suffix: str, tmp_path: Path) -> None:
    before = set(sys.modules)
    for number, drawing in enumerate(
        (lambda path: draw(_predicted(), FRONTIER, path), lambda path: draw_study(SMALL, path))
    ):
        path = tmp_path / "new" / f"{number}{suffix}"
        drawing(path)
        assert path.read_bytes().startswith(STARTS[suffix]) and path.stat().st_size > 5000
    assert "matplotlib.pyplot" not in set(sys.modules) - before  # which would look for a window


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--plot: .*memory\.jpeg: the suffix must be one of \.png, \.svg, \.pdf"):
        draw_study(SMALL, tmp_path / "memory.jpeg")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ConfigError, match=r"a\.png: cannot be written: Is a directory"):
        draw_study(SMALL, tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs the matplotlib package: .* -m pip install -e .*\[plot\]"):
        draw_study(SMALL, tmp_path / "b.png")


def test_memory_is_stacked_up_to_the_total_and_time_adds_up_to_the_step() -> None:
    prediction = _predicted("configs/gpt175b.toml", keep=False)
    memory, time = prediction_figure(prediction, FRONTIER).get_axes()
    assert [bars.get_label() for bars in memory.containers] == list(COMPONENTS)
    for place, held in enumerate(prediction.memory):
        parts = [bars[place].get_height() for bars in memory.containers]
        assert parts == pytest.approx([held.gib()[name] for name in COMPONENTS])
        top = memory.containers[-1][place]
        assert top.get_y() + top.get_height() == pytest.approx(held.gib()["total"])
    assert [line.get_ydata()[0] for line in memory.get_lines()] == [64.0]
    assert time.get_title() == "step time of the rank that finishes last"
    spent, overlapped = time.containers
    assert sum(bar.get_width() for bar in spent) == pytest.approx(prediction.step_time_s)
    assert sum(bar.get_width() for bar in overlapped) == pytest.approx(sum(prediction.overlapped_s.values()))
    names = [label.get_text() for label in time.get_yticklabels()]
    assert "pipeline bubble" in names and "tensor-parallel communication" in names and len(names) == len(spent)


def _drawn(axes: Any) -> list[tuple[float, float]]:
    """(start, end) of all actions of a panel."""
    spans = [path.get_extents() for row in axes.collections for path in row.get_paths()]
    return [(span.x0, span.x1) for span in spans]


@pytest.mark.parametrize(("schedule", "kinds"), [("1F1B", "FB"), ("ZBVZeroBubble", "FIW")])
def test_a_short_schedule_is_drawn_whole(schedule: str, kinds: str) -> None:
    from matplotlib.colors import to_rgb

    prediction = _predicted("configs/debug3d.toml", f"--plugins.pipeline.schedule={schedule}")
    *_, gantt = prediction_figure(prediction, FRONTIER).get_axes()
    actions = prediction.timeline.actions
    assert len(gantt.collections) == len(actions) == 2
    for row, records in zip(gantt.collections, actions, strict=True):
        assert len(row.get_paths()) == len(records)
        colours = {tuple(colour[:3]) for colour in row.get_facecolors()}
        stages = {action.stage for action, _, _ in records}
        assert len(colours) == len(kinds) * len(stages)  # each stage of a rank has its own shade
        assert {to_rgb(ACTIONS[kind][1]) for kind in kinds} <= colours
    ends = sorted((start, end) for records in actions for _, start, end in records)
    assert sum(sorted(_drawn(gantt)), ()) == pytest.approx(sum(ends, ()))
    assert len(gantt.texts) == len(ends)  # numbered by micro batch
    assert gantt.get_xlim() == (0, prediction.timeline.makespan)
    *_, alone = prediction_figure(_predicted("configs/quickstart.toml"), FRONTIER).get_axes()
    assert len(alone.collections) == 1


def test_of_a_long_schedule_beginning_and_end_are_drawn() -> None:
    prediction = _predicted("tests/configs/gpt175b.toml")
    figure = prediction_figure(prediction, FRONTIER)
    *_, first, last = figure.get_axes()
    makespan = prediction.timeline.makespan
    assert first.get_xlim()[0] == 0.0 and last.get_xlim()[1] == makespan
    shown = makespan * LEGIBLE / 2 / 640
    assert first.get_xlim()[1] == pytest.approx(shown) and last.get_xlim()[0] == pytest.approx(makespan - shown)
    for panel in (first, last):
        assert len(panel.collections) == 16 and not panel.texts
        assert all(len(row.get_paths()) <= LEGIBLE for row in panel.collections)
    assert any("first and last" in place.get_suptitle() for place in figure.subfigs)


def test_lines_have_hollow_points_and_crosses() -> None:
    (axes,) = study_figure(SMALL).get_axes()
    line, fits, hollow, room, cross = axes.get_lines()
    assert [*line.get_xdata()] == [1, 2] and [*line.get_ydata()] == [90, 50]
    assert [*fits.get_xdata()] == [2] and [*hollow.get_xdata()] == [1]
    assert hollow.get_markerfacecolor() == "white" != fits.get_markerfacecolor()
    assert room.get_ydata()[0] == 80.0
    assert cross.get_marker() == "x" and [*cross.get_xdata()] == [4]
    assert [text.get_text() for text in axes.texts] == ["four is too many"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "peak memory, GiB")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["device, 80 GiB", "hollow: does not fit", "invalid"]


def test_each_series_is_a_line_of_its_own() -> None:
    points = _point(1, 10, "a"), _point(2, 20, "a"), _point(1, 5, "b"), _point(2, 6, "b")
    (axes,) = study_figure(_study(*points, Point(1, "1", "c", {}, False, "no"), shown=("tokens_per_s",))).get_axes()
    first, _, second, _, _, cross = axes.get_lines()
    assert [*first.get_ydata()] == [100, 200] and [*second.get_ydata()] == [50, 60]
    assert first.get_color() != second.get_color() and axes.get_yscale() == "log"
    assert cross.get_marker() == "x" and not axes.texts
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["a", "b", "c: invalid", "invalid"]


def test_bars_of_what_does_not_fit_are_hollow() -> None:
    study = _study(_point(0, 90, fits=False), _point(1, 50), shown=("memory_gib", "tokens_per_s"), bars=True)
    memory, speed = study_figure(study).get_axes()
    assert [bar.get_height() for bar in memory.patches] == [90, 50]
    assert [bar.get_height() for bar in speed.patches] == [900, 500]
    large, small = memory.patches
    assert large.get_facecolor()[3] == 0.0 and small.get_facecolor()[3] == 1.0
