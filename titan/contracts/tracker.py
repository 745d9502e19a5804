"""Metrics: what plugins measure, trackers, where rows are sent, and the phases of a step in a profiler's trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from titan.contracts.base.layout import AxisFact, DataFact, WeightsFact
from titan.contracts.plugin.registry import Plugin

Row = Mapping[str, float | int | None]
"""One row of metrics: name -> number. `step` is always there. None: unknown, such as MFU without a known peak."""

Join = Literal["mean", "max", "sum"]
"""How the values of all ranks become the number of a row.

mean: a value is a tensor [2]: a sum, and the count of what it sums up, such as tokens. All sums are divided by all
    counts, so it is never a mean of means. Ranks that see the same tokens may all give the same tensor.
max: a value is a scalar; the largest counts. A value that is NaN makes the number NaN.
sum: a value is a scalar. Values are added over the axes that state one of the facts in `over`. The ranks along other
    axes must have equal values, and the first of them counts.
"""


@dataclass(frozen=True)
class Measure:
    """A number that a plugin adds to rows of training. The name is its key in `measures` of the plugin's class.

    doc: one line, with the unit; `titan plugins NAME` prints it.
    detail: one of many of a kind, such as a number of each layer, which lines on a terminal leave out.
    over: facts of axes, for "sum" alone: ("dealt", "sliced") for what differs between tokens, "layers" too where each
        pipeline stage has a share, or only one stage has the value.
    """

    doc: str
    join: Join
    over: tuple[AxisFact, ...] = ()
    detail: bool = False

    def __post_init__(self) -> None:
        facts = {*get_args(DataFact), *get_args(WeightsFact)}
        if not self.doc.strip() or "\n" in self.doc:
            raise ValueError(f"Measure: doc = {self.doc!r}: must be one line")
        if self.join not in get_args(Join):
            raise ValueError(f"Measure: join = {self.join!r}: must be one of {', '.join(map(repr, get_args(Join)))}")
        if bool(self.over) != (self.join == "sum") or not facts.issuperset(self.over):
            rule = 'a tuple of facts of axes, such as ("dealt", "sliced"), for join = "sum", and empty otherwise'
            raise ValueError(f"Measure: over = {self.over!r} with join = {self.join!r}: must be {rule}")


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is given at the start.

    folder: of the run, which exists.  config: the resolved TOML, as nested tables.
    start_step: steps already done, 0 for a new run.  steps: of the whole run.
    params: parameters of the whole model.  every: steps between logged rows.
    measures: names that plugins may add to rows of training, but for details (`Measure.detail`).
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    start_step: int
    steps: int
    params: int
    every: int
    measures: tuple[str, ...] = ()


class Tracker(Plugin, ABC):
    """Where metrics are sent. Configured in `[metrics.NAME]`; `enabled = false` switches a tracker off.

    All hooks are called on rank 0 alone, in the training process and on the host: no collectives. An exception in
    `start` ends the run. One in another hook is reported once, and the hook is called again with the next row or step.
    """

    kind = "tracker"
    section = "metrics"

    def start(self, info: RunInfo) -> None:
        """The run begins, or resumes from step `info.start_step`. Called once, before the first step."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Take a row of plain numbers; called every `[metrics] every` steps, and for each validation with its own keys.

        `Meter.row` (titan/training/metrics.py) states keys and units; plugins add measures.
        """

    def progress(self, step: int) -> None:
        """A step is done; `step` counts from 1. Called after each step, so it must take no time."""

    def close(self) -> None:
        """The run ends, by its last step or by an error."""


def annotated(phase: Literal["data", "forward and backward", "gradients", "optimizer"]) -> AbstractContextManager[Any]:
    """The body is this phase of a step in the trace of torch.profiler, under the name `titan: PHASE`.

    data: the wait for the loader.  gradients: what techniques reduce after the passes of all micro batches.
    """
    return torch.profiler.record_function(f"titan: {phase}")  # 8 us on the host, with a profiler or without
