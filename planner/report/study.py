"""Result of a study: its points, as a table and as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan.planner.report.render import columns

BAR = 24
"""Characters of the longest bar."""


class Measure(NamedTuple):
    """A column of a study. label: heading in tables and plots, with the unit.  form: format of the value."""

    label: str
    form: str


MEASURES = {
    "time_to_loss_s": Measure("step time x steps ratio, s", ".4g"),
    "step_time_s": Measure("step time, s", ".4g"),
    "tokens_per_s": Measure("tokens/s", ",.0f"),
    "efficiency": Measure("efficiency", ".1%"),
    "model_tflops_per_device": Measure("TFLOP/s per device", ".1f"),
    "bubble_fraction": Measure("bubble", ".1%"),
    "activations_gib": Measure("activations, GiB", ".2f"),
    "memory_gib": Measure("peak memory, GiB", ".2f"),
}


@dataclass(frozen=True)
class Point:
    """One job of a study.

    x: value on the x axis.  label: its text.  series: the line that the point belongs to.  values: by key of MEASURES.
    refused: reason why the job is invalid; values are empty then.
    """

    x: float
    label: str
    series: str
    values: Mapping[str, float]
    fits: bool
    refused: str = ""


@dataclass(frozen=True)
class Study:
    """A job with one parameter varied.

    shown: keys of MEASURES to plot, the most important one first.  bars: plot bars, because x is only an index.
    device_gib: memory of a device, in GiB.
    """

    name: str
    title: str
    job: str
    x_label: str
    shown: tuple[str, ...]
    bars: bool
    device_gib: float
    points: tuple[Point, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the series, in order; a study with a single line has one empty name."""
        return tuple(dict.fromkeys(point.series for point in self.points))

    def as_json(self) -> dict[str, Any]:
        """The study for `--json`; an invalid point has its reason in `refused` and no values."""
        points = [
            {"x": p.x, "label": p.label, "series": p.series, "fits": p.fits, "refused": p.refused or None, **p.values}
            for p in self.points
        ]
        return {"study": self.name, "title": self.title, "job": self.job, "x": self.x_label, "points": points}

    def text(self) -> str:
        """A table of all measures; for several series one table for each measure that is shown."""
        table = self._table() if len(self.series) == 1 else self._tables_of_series()
        notes = [f"*  does not fit into {self.device_gib:g} GiB"] if any(self._star(p) for p in self.points) else []
        notes += [f"-  {' '.join(filter(None, (name, ', '.join(at))))}: {why}" for (name, why), at in self._refused()]
        return "\n".join([self.title, self.job, "", *table, *(["", *notes] if notes else [])])

    def _refused(self) -> Iterable[tuple[tuple[str, str], list[str]]]:
        """(series, reason) and the labels of the points that have it."""
        found: dict[tuple[str, str], list[str]] = {}
        for point in self.points:
            if point.refused:
                found.setdefault((point.series, point.refused), []).append(point.label)
        return found.items()

    @staticmethod
    def _star(point: Point) -> str:
        return "" if point.fits or point.refused else "*"

    def _table(self) -> list[str]:
        measures = [name for name in MEASURES if any(name in point.values for point in self.points)]
        rows = [[self.x_label, *(MEASURES[name].label for name in measures)]]
        rows += [[p.label + self._star(p), *(_written(p, name) for name in measures)] for p in self.points]
        first = self.shown[0]
        most = max((p.values[first] for p in self.points if first in p.values), default=0.0)
        bars = [round(BAR * p.values[first] / most) if p.values and most else 0 for p in self.points]
        lines = zip(columns(rows), [MEASURES[first].label, *("█" * bar for bar in bars)], strict=True)
        return [f"{line}  {bar}".rstrip() for line, bar in lines]

    def _tables_of_series(self) -> list[str]:
        lines: list[str] = []
        for name in self.shown:
            cells = {(p.label, p.series): _written(p, name) + (self._star(p) or " ") for p in self.points}
            labels = dict.fromkeys(p.label for p in self.points)
            rows = [[self.x_label, *(f"{series} " for series in self.series)]]
            rows += [[label, *(cells[label, series] for series in self.series)] for label in labels]
            table = [f"{MEASURES[name].label}:", *(line.rstrip() for line in columns(rows))]
            lines += [*([""] if lines else []), *table]
        return lines


def _written(point: Point, name: str) -> str:
    return format(point.values[name], MEASURES[name].form) if name in point.values else "-"
