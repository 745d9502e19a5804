"""What a measurement is, what it yields, and the file that keeps results over interrupted starts.

`results.jsonl` is only ever appended to: one record when a measurement begins, one when it ends. A process that is
killed therefore loses the measurement it was in, and no other.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.setting import Setting


@dataclass(frozen=True)
class Row:
    """One line of a table. passed: the outcome of a check; None for a measurement, of which nothing is required."""

    label: str
    value: float | str | None
    unit: str = ""
    passed: bool | None = None


@dataclass(frozen=True)
class Measurement:
    """A named measurement of a part.

    seconds: expected on one H100, so that a part does not begin what it cannot end.  what: one line for the reader.
    measure: yields rows; rows that it has yielded count even if it then fails.
    """

    name: str
    part: int
    seconds: float
    what: str
    measure: Callable[[Setting], Iterator[Row]]


class Results:
    """The records of `folder`/results.jsonl that were taken on this machine's device with this PyTorch."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.about = folder / "results.jsonl", dict(about)
        self._last: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a") as file:  # a killed process has torn its last line
                file.write("\n")
        for record in _read(self.path):
            if all(record.get(key) == value for key, value in self.about.items()):
                self._last[record["name"]] = record

    def order(self, measurements: Iterable[Measurement]) -> list[Measurement]:
        """Those that are still to be taken: new ones first, failed ones next, those that ended a process last."""
        turns = {None: 0, "failed": 1, "began": 2}
        open_ = [one for one in measurements if self.status(one.name) != "done"]
        return sorted(open_, key=lambda one: turns[self.status(one.name)])

    def status(self, name: str) -> str | None:
        """ "began", "done", "failed", or None for a measurement without a record."""
        return str(self._last[name]["status"]) if name in self._last else None

    def began(self, one: Measurement) -> None:
        """Note that a measurement begins."""
        self._append({"name": one.name, "part": one.part, "status": "began"})

    def ended(self, one: Measurement, rows: Sequence[Row], seconds: float, failure: str = "") -> None:
        """Note what it yielded. It has failed also where one of its checks did not pass, and is taken again then."""
        passed = not failure and all(row.passed is not False for row in rows)
        self._append({
            "name": one.name, "part": one.part, "status": "done" if passed else "failed", "failure": failure,
            "seconds": round(seconds, 2), "rows": [asdict(row) for row in rows],
        })  # fmt: skip

    def _append(self, record: dict[str, Any]) -> None:
        record = {**self.about, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), **record}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._last[record["name"]] = record

    def table(self, one: Measurement) -> str:
        """A measurement as text."""
        record = self._last.get(one.name)
        if record is None:
            return f"{one.name}: not measured"
        if record["status"] == "began":
            return f"{one.name}: began and never ended"
        head = f"{one.name}  ({record['seconds']:.0f} s)  {one.what}"
        lines = [head, *(_line(Row(**row)) for row in record["rows"])]
        return "\n".join([*lines, f"  FAILED: {record['failure']}"] if record["failure"] else lines)

    def faults(self, measurements: Iterable[Measurement]) -> list[str]:
        """What is not as it should be: no result, a failure, or a row that did not pass."""
        found = []
        for one in measurements:
            record = self._last.get(one.name, {"status": "not measured"})
            if record["status"] in ("not measured", "began"):
                found.append(f"{one.name}: {record['status']}")
                continue
            found += [f"{one.name}: {record['failure']}"] if record["failure"] else []
            rows = (Row(**row) for row in record["rows"])
            found += [f"{one.name}: {row.label}: {_shown(row)}" for row in rows if row.passed is False]
        return found


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Whole records; a line torn by a killed process is passed over."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _line(row: Row) -> str:
    verdict = {None: "", True: "  ok", False: "  FAILED"}[row.passed]
    return f"  {row.label:<58} {_shown(row):>22}{verdict}"


def _shown(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:.4g}" if isinstance(row.value, float) else str(row.value)
    return f"{value} {row.unit}".rstrip()
