"""Trackers: where metrics are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts.base.registry import Plugin

Row = Mapping[str, float | int | None]
"""One row of metrics: name -> number. `step` is always there. None: unknown, such as MFU without a known peak."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is given at the start.

    folder: of the run, which exists.  name: of the run.  config: the resolved TOML, as nested tables.
    start_step: steps already done, 0 for a new run.  steps: of the whole run.
    params: parameters of the whole model.  every: steps between logged rows.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    start_step: int
    steps: int
    params: int
    every: int


class Tracker(Plugin, ABC):
    """Where metrics are sent. Configured in `[metrics.NAME]`; `enabled = false` switches a tracker off.

    All hooks are called on rank 0 alone, in the training process and on the host: no collectives. An exception in
    `start` ends the run. An exception in another hook is reported once, and the run continues: the hook is called again
    with the next row or step, so the tracker must recover by itself.
    """

    kind = "tracker"
    section = "metrics"

    def start(self, info: RunInfo) -> None:
        """The run begins, or resumes from step `info.start_step`. Called once, before the first step."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Take a row of metrics; called every `[metrics] every` steps, and for each validation with its own keys.

        row: name -> number; `step` is always there, None stands for unknown. Values are plain Python numbers, already
            read from the device. `Meter.row` (titan/training/metrics.py) states keys and units.
        """

    def progress(self, step: int) -> None:
        """A step is done; `step` counts from 1. Called after each step, so it must take no time."""

    def close(self) -> None:
        """The run ends, by its last step or by an error."""
