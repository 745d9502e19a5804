"""Trials of a search and their results file: one JSON line per trial, appended, valid whenever the process is killed.

The first line describes the search: job without layout, number of ranks, fixed keys, measurement. A file of another
search is refused.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from titan.config.tables import differences
from titan.errors import ConfigError, ConfigIssue, by_errno

Objective = Literal["tflops", "tokens", "tokens-per-joule"]
UNITS: Mapping[Objective, str] = {"tflops": "TFLOP/s", "tokens": "tokens/s", "tokens-per-joule": "tokens/J"}
"""Units of the objectives: model TFLOP/s per device, tokens/s of all ranks, tokens per joule of all devices."""

Kind = Literal["memory", "timeout", "non-finite", "launch", "refused"]
"""How a trial fails: out of memory; time limit; NaN or inf; any other way; invalid input (exit code 2)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the measured steps. peak_memory_gib: of the fullest rank.  watts: mean, of all devices together."""

    step_time_s: float
    tokens_per_s: float
    model_tflops_per_device: float
    peak_memory_gib: float
    watts: float | None = None

    def value(self, objective: Objective) -> float:
        """The value of the objective, in its unit (UNITS); larger is better."""
        if objective == "tflops":
            return self.model_tflops_per_device
        if objective == "tokens":
            return self.tokens_per_s
        assert self.watts is not None, "the power was not measured"
        return self.tokens_per_s / self.watts


@dataclass(frozen=True)
class Failed:
    """A failed trial. why: the reason, in one line."""

    kind: Kind
    why: str


@dataclass(frozen=True)
class Trial:
    """A trial of a layout. layout: dotted keys of a TOML.  predicted_s: step time by the planner, if known."""

    name: str
    layout: Mapping[str, Any]
    outcome: Measured | Failed
    predicted_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The trial as the JSON object of its line in the results file."""
        found = "failed" if isinstance(self.outcome, Failed) else "measured"
        known = {"name": self.name, "layout": dict(self.layout), found: asdict(self.outcome)}
        return known | {"predicted_step_time_s": self.predicted_s}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Trial":
        """The trial of a line of the results file.

        Raises:
            KeyError, TypeError: the line is not a trial.
        """
        outcome = Failed(**row["failed"]) if "failed" in row else Measured(**row["measured"])
        return cls(row["name"], dict(row["layout"]), outcome, row["predicted_step_time_s"])


def ranked(trials: Sequence[Trial], objective: Objective) -> list[tuple[float, Trial]]:
    """(value, trial) of the measured trials, best first."""
    values = [(t.outcome.value(objective), t) for t in trials if isinstance(t.outcome, Measured)]
    return sorted(values, key=lambda pair: -pair[0])


class Results:
    """The results file of a search; opening an existing one resumes the search.

    search: description of the search, JSON-serializable.

    Raises:
        ConfigError: the file is of another search, is corrupt, or cannot be read or written.
    """

    def __init__(self, path: Path, search: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole, _, torn = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
            if torn:  # the process was killed while it wrote
                os.truncate(path, len(whole) + 1 if whole else 0)
            if whole:
                self._read(whole.split(b"\n"), search)
            else:
                self._append({"search": search})
        except OSError as error:
            fault = ConfigIssue(str(path), f"cannot be read or written: {error.strerror}")
            raise by_errno(error, ConfigError([fault])) from None

    def append(self, trial: Trial) -> None:
        """Add a trial, here and in the file.

        Raises:
            OSError: the file cannot be written.
        """
        self._append(trial.as_json())
        self.trials.append(trial)

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            os.fsync(file.fileno())

    def _read(self, lines: Sequence[bytes], search: Mapping[str, Any]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if number == 1:
                    self._same(dict(row["search"]), json.loads(json.dumps(search)))
                else:
                    self.trials.append(Trial.from_json(row))
            except (ValueError, KeyError, TypeError):
                what = f"line {number} is not a trial; delete the line, or give another --results file"
                raise ConfigError(what, str(self.path)) from None

    def _same(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [
            f"{key} was {json.dumps(before)}, is {json.dumps(value)}" for key, before, value in differences(then, now)
        ]
        if changed:
            more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"holds results of another search: {'; '.join(changed[:3])}{more}; give another --results file"
            raise ConfigError(what, str(self.path))
