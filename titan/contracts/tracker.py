"""Where metrics go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts.base.registry import Plugin

Row = Mapping[str, float | int | None]
"""One line of metrics; `step` is always there. None: not known here (MFU of a device without a known peak)."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may want to know at the start."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    start_step: int
    steps: int
    params: int
    every: int


class Tracker(Plugin, ABC):
    """Where metrics go. Lives on rank 0 alone. Configured in `[metrics.NAME]`; `enabled = false` switches one off.

    What `start` raises refuses the run. What the others raise is told once, and the run goes on: they are called again
    with the next row or step, so what is left behind by a failure is theirs to mend.
    """

    kind = "tracker"
    section = "metrics"

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on from `info.start_step`."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Take a row."""

    def progress(self, step: int) -> None:
        """A step is done; called each step, so it must cost nothing."""

    def close(self) -> None:
        """The run ends, well or not."""
