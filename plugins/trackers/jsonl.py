"""Metrics as JSON lines in `metrics.jsonl` of the run's folder.

A row is one write to a file opened for appending, so the file is valid whenever the process is killed. If a full disk
takes only part of a row, that part is removed again, at the latest before the next row. On resume from step s, rows
beyond s, which will be measured again, and a torn last line are removed first, so that each row appears once. A new run
in the same folder removes all rows. NaN and infinity, which JSON does not have, are written as null.

Cost: ten microseconds and about 300 bytes per row.
Limits: rows are not synced to disk; a crash of the machine (not of the process) may lose the last ones.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import Row, RunInfo, Tracker, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[metrics.jsonl]`: none besides `enabled`."""


@register
class Jsonl(Tracker):
    """One JSON object per row, appended to `metrics.jsonl`."""

    name = "jsonl"
    Config = Config
    default = True

    _file: int | None = None
    _whole = 0
    """Bytes of the file that are whole rows."""
    _torn = False
    """Whether there may be part of a row behind them."""

    def start(self, info: RunInfo) -> None:
        """Drop what lies beyond the start, and open the file for appending."""
        info.folder.mkdir(parents=True, exist_ok=True)
        path = info.folder / "metrics.jsonl"
        if path.exists():
            _drop_beyond(path, info.start_step)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
        self._whole, self._torn = os.fstat(self._file).st_size, False

    def log(self, row: Row) -> None:
        """Append a row.

        Raises:
            OSError: it is not in the file, or the disk took only part of it, which is cut off.
        """
        assert self._file is not None, "log() before start()"
        self._cut_back(self._file)
        known = {key: value if value is None or math.isfinite(value) else None for key, value in row.items()}
        line = json.dumps(known, allow_nan=False).encode() + b"\n"
        self._torn = True
        if os.write(self._file, line) != len(line):
            self._cut_back(self._file)
            raise OSError("metrics.jsonl: only part of a row could be written; is the disk full?")
        self._whole, self._torn = self._whole + len(line), False

    def _cut_back(self, file: int) -> None:
        """Leave whole rows alone."""
        if self._torn:
            os.ftruncate(file, self._whole)
            self._torn = False

    def close(self) -> None:
        """Close the file; it ends with a whole row."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                self._cut_back(file)
            finally:
                os.close(file)


def _drop_beyond(path: Path, last: int) -> None:
    """Rewrite the file, atomically, with the whole rows up to step `last`."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.unlink(missing_ok=True)  # of a start that was killed here
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= last]
    if kept != lines:
        fresh.write_bytes(b"".join(kept))
        fresh.replace(path)


def _step_of(line: bytes) -> float:
    """Step of a row; infinite for a line that is torn."""
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf
