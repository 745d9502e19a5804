"""Plots of predictions and studies, with matplotlib (the extra `plot`).

Figures are made directly, without pyplot: no window, no global state.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from titan.errors import ConfigError, by_errno
from titan.packages import install
from titan.planner.machine.cluster import Cluster
from titan.planner.report.render import NAMES, seconds
from titan.planner.report.study import MEASURES, Study
from titan.planner.step.predict import Prediction
from titan.planner.step.schedule import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
OF_MAGNITUDES = ("tokens_per_s", "time_to_loss_s")
"""Measures with a logarithmic axis."""
LEGIBLE = 120
"""Actions of a rank that can be told apart across the page."""
NUMBERED = 40
"""Actions of a rank that leave room for the numbers of their micro batches."""
COMPONENTS = {
    "parameters": "#4878a8",
    "gradients": "#e49444",
    "optimizer": "#85b6b2",
    "activations": "#d1615d",
    "buffers": "#a87c9f",
    "cached": "#d4a6c8",
    "overhead": "#bab0ab",
}
ACTIONS = {
    "F": ("forward", "#3b78b5"),
    "B": ("backward", "#3f9b5f"),
    "I": ("backward, inputs", "#e08a2e"),
    "W": ("backward, weights", "#8a63b0"),
}
BUBBLE = "#eeeeee"
RED = "#c0392b"


def draw_prediction(prediction: Prediction, cluster: Cluster, path: Path) -> None:
    """Write the figure of a prediction; see `prediction_figure`.

    Raises:
        ConfigError: matplotlib is missing, the suffix is none of SUFFIXES, or the file cannot be written.
    """
    _write(lambda: prediction_figure(prediction, cluster), path)


def draw_study(study: Study, path: Path) -> None:
    """Write the figure of a study; see `study_figure`.

    Raises:
        ConfigError: matplotlib is missing, the suffix is none of SUFFIXES, or the file cannot be written.
    """
    _write(lambda: study_figure(study), path)


def _write(draw: Callable[[], "Figure"], path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}", "--plot")
    figure = draw()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise by_errno(error, ConfigError(f"{path}: cannot be written: {error.strerror}", "--plot")) from None


def _figure(width: float, height: float) -> "Figure":
    """An empty page, in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(f"drawing needs the matplotlib package: {install('plot')}", "--plot") from None
    return Figure(figsize=(width, height), layout="constrained")


# --- a prediction -------------------------------------------------------------------------------------------------


def prediction_figure(prediction: Prediction, cluster: Cluster) -> "Figure":
    """Memory per rank by pipeline stage, step time by component, and the schedule if its actions were kept."""
    p, ranks = prediction, len(prediction.timeline.actions)
    gantt = min(6.0, 1.2 + 0.28 * ranks) if ranks else 0.0
    figure = _figure(12, 4.6 + gantt)
    figure.suptitle(
        f"{p.world_size:,} x {cluster.device.name}: step {seconds(p.step_time_s)}, "
        f"{p.model_tflops_per_device:.1f} TFLOP/s per device, MFU {p.mfu:.1%}"
    )
    places = figure.subfigures(2 if ranks else 1, 1, height_ratios=[4.3, gantt][: 2 if ranks else 1], squeeze=False)
    left, right = places[0, 0].subplots(1, 2, width_ratios=[3, 2])
    _memory(left, prediction, cluster.device.memory_gib)
    _time(right, prediction)
    if ranks:
        _schedule(places[1, 0], prediction)
    return figure


def _memory(axes: "Axes", prediction: Prediction, device_gib: float) -> None:
    places = range(len(prediction.memory))
    held = [memory.gib() for memory in prediction.memory]
    below = [0.0] * len(held)
    for name, colour in COMPONENTS.items():
        heights = [gib[name] for gib in held]
        axes.bar(places, heights, bottom=below, color=colour, label=name, width=min(0.8, 0.12 * len(held) + 0.3))
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    axes.axhline(device_gib, color=RED, linestyle="--", label=f"device, {device_gib:g} GiB")
    axes.set(title="memory per rank", xlabel="pipeline stage", ylabel="GiB", xlim=(-0.7, len(held) - 0.3))
    axes.set_xticks([place for place in places if place % (1 + len(held) // 24) == 0])
    axes.set_ylim(0, 1.08 * max(device_gib, *below))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _time(axes: "Axes", prediction: Prediction) -> None:
    overlapped = prediction.overlapped_s
    spent = {name: prediction.time_s[name] for name in NAMES if prediction.time_s[name] or overlapped.get(name)}
    rows = range(len(spent))
    axes.barh(rows, list(spent.values()), color="#4878a8", label="non-overlapped")
    if any(overlapped.get(name) for name in spent):
        behind = [overlapped.get(name, 0.0) for name in spent]
        axes.barh(
            rows,
            behind,
            left=list(spent.values()),
            color="none",
            edgecolor="#4878a8",
            hatch="///",
            linewidth=0.5,
            label="overlapped with computation",
        )
        axes.legend(loc="lower right", fontsize="small")
    most = max(value + overlapped.get(name, 0.0) for name, value in spent.items())
    for row, (name, value) in enumerate(spent.items()):
        share = f" {seconds(value)}, {value / prediction.step_time_s:.1%}"
        axes.text(value + overlapped.get(name, 0.0), row, share, va="center", fontsize="small")
    axes.set(title="step time of the rank that finishes last", xlabel="s", xlim=(0, 1.45 * most))
    axes.set_yticks(rows, [NAMES[name] for name in spent])
    axes.invert_yaxis()


def _schedule(place: Any, prediction: Prediction) -> None:
    """One row per rank; of a long step its beginning and its end, where the bubbles are."""
    timeline = prediction.timeline
    count = max(len(records) for records in timeline.actions)
    spans, said = [(0.0, timeline.makespan)], ""
    if count > LEGIBLE:
        shown = timeline.makespan * LEGIBLE / 2 / count
        spans = [(0.0, shown), (timeline.makespan - shown, timeline.makespan)]
        said = f"; first and last {seconds(shown)} of {seconds(timeline.makespan)}"
    place.suptitle(f"pipeline schedule, bubbles in gray{said}", fontsize="large")
    panels = place.subplots(1, len(spans), sharey=True, squeeze=False)[0]
    for axes, span in zip(panels, spans, strict=True):
        _gantt(axes, timeline.actions, span)
    panels[0].set_ylabel("pipeline rank")
    _name_actions(panels[-1], timeline.actions)


def _gantt(axes: "Axes", actions: Sequence[Sequence[Record]], span: tuple[float, float]) -> None:
    start, end = span
    inside = [[r for r in records if r[2] > start and r[1] < end] for records in actions]
    numbered = max(map(len, actions)) <= NUMBERED
    for rank, records in enumerate(inside):
        stages = sorted({action.stage for action, _, _ in actions[rank]})
        colours = [_shade(ACTIONS[a.kind][1], stages.index(a.stage), len(stages)) for a, _, _ in records]
        bars = [(begin, finish - begin) for _, begin, finish in records]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.3)
        for action, begin, finish in records if numbered else ():
            axes.text(
                (begin + finish) / 2,
                rank,
                str(action.micro_batch),
                ha="center",
                va="center",
                color="white",
                fontsize=6,
                clip_on=True,
            )
    axes.set(xlim=span, ylim=(len(actions) - 0.5, -0.5), xlabel="s", facecolor=BUBBLE)
    axes.set_yticks([rank for rank in range(len(actions)) if rank % (1 + len(actions) // 20) == 0])


def _shade(colour: str, number: int, of: int) -> tuple[float, float, float]:
    """Color of one stage of a rank; later stages are lighter."""
    from matplotlib.colors import to_rgb

    white = 0.55 * number / of
    red, green, blue = to_rgb(colour)
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _name_actions(axes: "Axes", actions: Sequence[Sequence[Record]]) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for records in actions for action, _, _ in records}
    named = [Patch(color=colour, label=name) for kind, (name, colour) in ACTIONS.items() if kind in kinds]
    if len({action.stage for action, _, _ in actions[0]}) > 1:
        named.append(Patch(color="none", label="lighter: a rank's later stages"))
    axes.legend(handles=named, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


# --- a study ------------------------------------------------------------------------------------------------------


def study_figure(study: Study) -> "Figure":
    """A panel per measure that the study shows. Hollow points do not fit; crosses are invalid jobs, with the reason."""
    figure = _figure(7 * len(study.shown) if len(study.shown) > 1 else 9, 5)
    figure.suptitle(f"{study.title}\n{study.job}")
    for axes, name in zip(figure.subplots(1, len(study.shown), squeeze=False)[0], study.shown, strict=True):
        (_bars if study.bars else _lines)(axes, study, name)
        if name == "memory_gib":
            axes.axhline(study.device_gib, color=RED, linestyle="--", label=f"device, {study.device_gib:g} GiB")
        axes.set(xlabel=study.x_label, ylabel=MEASURES[name].label)
        if MEASURES[name].form.endswith("%"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if name in OF_MAGNITUDES:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        _refused(axes, study)
        _explain(axes, study, many=len(study.series) > 1)
    return figure


def _lines(axes: "Axes", study: Study, name: str) -> None:
    for number, series in enumerate(study.series):
        points = [point for point in study.points if point.series == series and point.values]
        xs, ys, colour = [point.x for point in points], [point.values[name] for point in points], f"C{number}"
        # Dashes let a line be seen that lies under another, as those of two schedules often do.
        axes.plot(
            xs, ys, color=colour, linestyle=("-", "--")[number % 2], label=series if points else f"{series}: invalid"
        )
        for fits, face in ((True, colour), (False, "white")):
            marked = [(point.x, point.values[name]) for point in points if point.fits == fits]
            if marked:
                axes.plot(*zip(*marked, strict=True), "o", color=colour, markerfacecolor=face)
    ticks = {point.x: point.label for point in study.points}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()), minor=False, rotation=45 if len(ticks) > 7 else 0)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _bars(axes: "Axes", study: Study, name: str) -> None:
    for point in study.points:
        if point.values:
            face = "C0" if point.fits else "none"
            axes.bar(point.x, point.values[name], facecolor=face, edgecolor="C0", hatch="" if point.fits else "//")
    axes.set_xticks([point.x for point in study.points], [point.label for point in study.points])


def _refused(axes: "Axes", study: Study) -> None:
    """Crosses on the x axis at invalid points, with the reason if there is only one line."""
    series, bottom = study.series, axes.get_xaxis_transform()
    for point in study.points:
        if not point.refused:
            continue
        colour = RED if len(series) == 1 else f"C{series.index(point.series)}"
        axes.plot(point.x, 0, "x", color=colour, clip_on=False, zorder=5, transform=bottom)
        if len(series) == 1:
            said = shorten(point.refused, 80, placeholder=" ...")
            axes.annotate(
                said,
                (point.x, 0),
                xycoords=bottom,
                xytext=(0, 8),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=6,
                color=RED,
            )


def _explain(axes: "Axes", study: Study, *, many: bool) -> None:
    """The legend, if there is anything to say."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    signs: Mapping[str, Any] = {"color": "none", "markeredgecolor": "grey", "marker": "o", "markerfacecolor": "none"}
    if any(point.values and not point.fits for point in study.points):
        handles, labels = [*handles, Line2D([], [], **signs)], [*labels, "hollow: does not fit"]
    if any(point.refused for point in study.points):
        cross = Line2D([], [], color="none", markeredgecolor="grey", marker="x")
        handles, labels = [*handles, cross], [*labels, "invalid"]
    if handles:
        outside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if many else {"loc": "best"}
        axes.legend(handles, labels, fontsize="small", framealpha=0.7, **outside)
