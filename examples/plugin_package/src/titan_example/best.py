"""The lowest loss so far and its step, as best.json in the run's folder; a resumed run goes on from the file."""

import json
import math
from dataclasses import dataclass

from titan.contracts import Row, RunInfo, Tracker, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.best]`."""

    key: str = option("loss", 'key of the rows to watch, such as "validation_loss"')


@register
class Best(Tracker):
    """Writes the lowest value of a key of the rows, and its step."""

    name = "best"
    Config = Config

    def start(self, info: RunInfo) -> None:
        """Called on rank 0 alone, as all hooks of a tracker."""
        self._file = info.folder / "best.json"
        resumed = info.start_step and self._file.exists()
        self._best = json.loads(self._file.read_text())["value"] if resumed else math.inf

    def log(self, row: Row) -> None:
        """Rows of training and of validation have different keys."""
        value = row.get(self.config.key)
        if value is not None and value < self._best:
            self._best = value
            self._file.write_text(json.dumps({"step": row["step"], "value": value}))
