"""The study `fabric`: from which bandwidth on it is worth sending less.

Jobs are given as TOMLs: the one of `--config`, and others (`--against`) that reach the same loss by sending less, such
as workers that exchange weights seldom. Of each, over the bandwidth of the outermost link:

    time to the same loss = step time x steps ratio

Step times are predicted. The steps ratio, steps to the same loss over those of the first job, cannot be: it is measured
and given, or taken for 1, and the report says which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan.config import load_job
from titan.contracts.base.cost import Costs
from titan.contracts.base.layout import Layout
from titan.contracts.plugin.options import did_you_mean
from titan.errors import ConfigError, ConfigIssue
from titan.planner.machine.cluster import Cluster
from titan.planner.report.studies import values_of
from titan.planner.report.study import Point, Study
from titan.planner.search.unset_options import settle
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

GBIT_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400)
"""Bandwidths of the study, besides the cluster's own."""
HALVINGS = 20
"""Of the interval in which two ways take equally long: to less than 0.001 %."""
TIME = "time_to_loss_s"


@dataclass(frozen=True)
class Way:
    """A job of the study. name: of its file.  ratio: of its steps to those of the first job; None: not given."""

    name: str
    costs: Costs
    layout: Layout
    ratio: float | None

    @property
    def steps(self) -> float:
        """The steps ratio that the study takes."""
        return 1.0 if self.ratio is None else self.ratio


@dataclass(frozen=True)
class Fabric(Study):
    """A study of bandwidth.

    ratios: way -> steps ratio; None: not given.
    wins: way -> the smallest and the largest Gbit/s shown at which it is faster than the first way; None: at none.
    notes: a sentence for each way whose time no bandwidth changes.
    """

    ratios: Mapping[str, float | None]
    wins: Mapping[str, tuple[float, float] | None]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The study for `--json`, with steps ratios and the bandwidths between which each way wins."""
        more = {"steps_ratio": self.ratios, "wins_gbit_s": self.wins, "notes": list(self.notes)}
        return super().as_json() | more

    def text(self) -> str:
        """The tables, a line for each way but the first, and the notes."""
        first, *others = self.ratios
        lines = [*(self._said(name, first) for name in others), *self.notes]
        return "\n".join([super().text(), *(["", *lines] if lines else [])])

    def _said(self, name: str, first: str) -> str:
        ratio = self.ratios[name]
        steps = f"{1 if ratio is None else ratio:g} x the steps of {first}"
        steps += f" (not given: measure it and add --steps-ratio {name}=R)" if ratio is None else " (given)"
        return f"{name}: faster {self._where(name)}; {steps}"

    def _where(self, name: str) -> str:
        if (found := self.wins[name]) is None:
            return "at no bandwidth shown"
        lowest, highest = (end(point.x for point in self.points) for end in (min, max))
        ends = [f"above {found[0]:.3g}"] * (found[0] > lowest) + [f"below {found[1]:.3g}"] * (found[1] < highest)
        return f"{' and '.join(ends)} Gbit/s" if ends else "at every bandwidth shown"


def run(
    config: Path,
    against: Sequence[Path],
    ratios: Mapping[str, float],
    overrides: Sequence[str],
    cluster: Cluster,
    world_size: int | None,
) -> Fabric:
    """Predict the jobs of several TOMLs over the bandwidth of the cluster's outermost link.

    against: the other jobs.  ratios: name of such a file, without its suffix -> steps ratio.  overrides: `--key=value`
    words, for every job.  world_size: ranks of every job; None: those of its layout.

    Raises:
        ConfigError: a job is invalid, two have one name, or they differ in tokens per step; or a ratio belongs to none.
    """
    first, *others = ways = _ways([config, *against], ratios, overrides, cluster, world_size)
    ranks = cluster.links[-2].ranks if len(cluster.links) > 1 else 1
    own = cluster.links[-1].bandwidth_gb_s * 8 * ranks
    planners = {gbit_s: Planner(_with_bandwidth(cluster, gbit_s / 8 / ranks)) for gbit_s in sorted({*GBIT_S, own})}
    points = tuple(
        _point(way, gbit_s, planner, compared=bool(others)) for gbit_s, planner in planners.items() for way in ways
    )

    def gain(way: Way, gbit_s: float) -> float:
        planner = planners.get(gbit_s) or Planner(_with_bandwidth(cluster, gbit_s / 8 / ranks))
        return _seconds(first, planner) - _seconds(way, planner)

    wins = {way.name: _wins(partial(gain, way), [*planners]) for way in others}
    shown, what = (TIME, "Time to the same loss") if others else ("step_time_s", "Step time")
    title = f"{what} by bandwidth of the outermost link, {cluster.links[-1].name}"
    return Fabric(
        name="fabric",
        title=title,
        job=f"{config.stem}, {first.layout}, {cluster.name}",
        x_label=f"Gbit/s per {'rank' if ranks == 1 else f'{ranks} ranks'}",
        shown=(shown,),
        bars=False,
        device_gib=cluster.device.memory_gib,
        points=points,
        ratios={way.name: way.ratio for way in ways},
        wins=wins,
        notes=tuple(_inside(way, ranks, cluster) for way in ways if way.layout.world_size <= ranks),
    )


def _inside(way: Way, ranks: int, cluster: Cluster) -> str:
    """Why no bandwidth changes the time of a way that fits inside of what the outermost link joins.

    ranks: of each of these groups.
    """
    size, groups = way.layout.world_size, "single ranks" if ranks == 1 else f"groups of {ranks} ranks"
    return (
        f"{way.name}: no bandwidth changes its time, because a job of {size} {'rank' if size == 1 else 'ranks'} sends "
        f"nothing over the outermost link, {cluster.links[-1].name}, which joins {groups}"
    )


def _ways(
    configs: Sequence[Path],
    ratios: Mapping[str, float],
    overrides: Sequence[str],
    cluster: Cluster,
    world_size: int | None,
) -> list[Way]:
    names, tokens = [config.stem for config in configs], dict[str, int]()
    faults = [
        ConfigIssue("--steps-ratio", f"{name}: no file of --against has this name{did_you_mean(name, names[1:])}")
        for name in ratios
        if name not in names[1:]
    ]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        faults.append(ConfigIssue("--against", f"two files are named {twice}; rename one of them"))
    ways = []
    for config in () if faults else configs:
        job, _ = settle(load_job(config, overrides, world_size), cluster.memory)
        ways.append(Way(config.stem, costs_of(job), job.layout, ratios.get(config.stem)))
        tokens[config.stem] = job.tokens_per_step
    for name, count in tokens.items():
        if count != tokens[names[0]]:
            what = f"{name} has {count:,} tokens per step, and {names[0]} {tokens[names[0]]:,}"
            faults.append(ConfigIssue("--against", f"{what}; set its train.global_batch_size or data.seq_len to agree"))
    if faults:
        raise ConfigError(faults)
    return ways


def _with_bandwidth(cluster: Cluster, gb_s: float) -> Cluster:
    """The cluster with this bandwidth per rank of the outermost link, in GB/s."""
    *inner, outer = cluster.links
    return replace(cluster, links=(*inner, replace(outer, bandwidth_gb_s=gb_s)))


def _seconds(way: Way, planner: Planner) -> float:
    return planner.predict(way.costs, way.layout).step_time_s * way.steps


def _point(way: Way, gbit_s: float, planner: Planner, *, compared: bool) -> Point:
    """compared: with other ways; alone, a way has no steps ratio, and the column would repeat its step time."""
    prediction = planner.predict(way.costs, way.layout)
    values = values_of(prediction) | ({TIME: prediction.step_time_s * way.steps} if compared else {})
    return Point(gbit_s, f"{gbit_s:g}", way.name, values, prediction.fits)


def _wins(gain: Callable[[float], float], grid: Sequence[float]) -> tuple[float, float] | None:
    """The smallest and the largest bandwidth with a gain; None: none of the grid has one.

    gain: bandwidth -> seconds gained.  grid: bandwidths in order, of which neighbors have one change of sign at most.
    """
    winning = [number for number, at in enumerate(grid) if gain(at) > 0]
    if not winning:
        return None
    first, last = winning[0], winning[-1]
    low = _edge(gain, grid[first], grid[first - 1]) if first else grid[0]
    return low, _edge(gain, grid[last], grid[last + 1]) if last + 1 < len(grid) else grid[-1]


def _edge(gain: Callable[[float], float], inside: float, outside: float) -> float:
    """The last bandwidth with a gain, from one that has a gain to one that has none."""
    for _ in range(HALVINGS):
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if gain(middle) > 0 else (inside, middle)
    return inside
