"""What a measurement is, what it yields, and the files that keep results over interrupted calls.

A file of results is only ever appended to, one line of JSON at a time, each synced to disk: one when a measurement
begins, one for each of its rows, one when it ends. Whatever ends a process, the rows that it had are kept.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.setting import Setting


@dataclass(frozen=True)
class Row:
    """One line of a table.

    passed: the outcome of a check; None for a measurement, of which nothing is required.  samples: what `value` is the
    median of, in the same unit.
    """

    label: str
    value: float | str | None
    unit: str = ""
    passed: bool | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """A named measurement of a call.

    seconds: expected on one H100; a measurement that would not end in time is not begun, and one that takes
    `OVERRUN` times as long is ended.  summary: one line for the reader.
    measure: yields rows; rows that it has yielded count even if it then fails.
    """

    name: str
    call: str
    seconds: float
    summary: str
    measure: Callable[[Setting], Iterator[Row]]


@dataclass
class Record:
    """The last attempt at a measurement on this device. status: "began", "done" or "failed"."""

    status: str
    head: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0


class Results:
    """Records of one device: those of `earlier` files, and of the file that this process appends to.

    about: keys that a record must have in common with this device: device, torch, rehearsal.  versions: what else the
    record of a beginning says.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], versions: Mapping[str, Any], earlier: Iterable[Path] = ()
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.about, self.versions, self._earlier = path, dict(about), dict(versions), list(earlier)

    def last(self) -> dict[str, Record]:
        """The last attempt at each measurement, by name."""
        lines = (line for path in [*self._earlier, self.path] for line in read(path))
        return attempts(line for line in lines if all(line.get(key) == value for key, value in self.about.items()))

    def order(self, measurements: Iterable[Measurement]) -> list[Measurement]:
        """Those that are still to be taken: new ones first, failed ones next, those that ended a process last."""
        turns, last = {"": 0, "failed": 1, "began": 2}, self.last()
        open_ = [(last[one.name].status if one.name in last else "", one) for one in measurements]
        return [one for status, one in sorted(open_, key=lambda each: turns.get(each[0], 3)) if status != "done"]

    def began(self, one: Measurement) -> None:
        """Note that a measurement begins."""
        self._append({"name": one.name, "event": "began", "call": one.call, **self.versions})

    def add(self, one: Measurement, row: Row) -> None:
        """Keep a row."""
        self._append({"name": one.name, "event": "row", **{k: v for k, v in asdict(row).items() if v not in ("", ())}})

    def ended(self, one: Measurement, seconds: float, failure: str = "") -> None:
        """Note the end. A measurement has failed also where one of its checks did not pass; it is taken again then."""
        passed = not failure and all(row.passed is not False for row in self.last()[one.name].rows)
        status = "done" if passed else "failed"
        end = {"event": "ended", "status": status, "failure": failure, "seconds": round(seconds, 2)}
        self._append({"name": one.name, **end})

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({**record, **self.about, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}) + "\n"
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")  # by a process that was killed
        with self.path.open("a") as file:
            file.write("\n" * torn + line)
            file.flush()
            os.fsync(file.fileno())


def attempts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Record]:
    """The last attempt at each measurement, the newest one last, from lines in the order in which they were written."""
    last: dict[str, Record] = {}
    for line in lines:
        if line["event"] == "began":
            last.pop(line["name"], None)
            last[line["name"]] = Record("began", line)
        elif line["name"] in last and line["event"] == "row":
            row = {key: line[key] for key in ("label", "value", "unit", "passed") if key in line}
            last[line["name"]].rows.append(Row(**row, samples=tuple(line.get("samples", ()))))
        elif line["name"] in last:
            record = last[line["name"]]
            record.status, record.failure, record.seconds = line["status"], line["failure"], line["seconds"]
    return last


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of results; one that is none, torn by a killed process, is passed over."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def table(one: Measurement, record: Record | None) -> str:
    """A measurement as text."""
    if record is None:
        return f"{one.name}: not measured"
    ended = f"{record.seconds:.0f} s" if record.status != "began" else "began and never ended"
    lines = [f"{one.name}  ({ended})  {one.summary}", *map(_line, record.rows)]
    return "\n".join([*lines, f"  FAILED: {record.failure}"] if record.failure else lines)


def faults(measurements: Iterable[Measurement], last: Mapping[str, Record]) -> list[str]:
    """What is not as it should be: no result, a failure, or a row that did not pass."""
    found = []
    for one in measurements:
        record = last.get(one.name)
        if record is None or record.status == "began":
            found.append(f"{one.name}: {record.status if record else 'not measured'}")
            continue
        found += [f"{one.name}: {record.failure}"] if record.failure else []
        found += [f"{one.name}: {row.label}: {shown(row)}" for row in record.rows if row.passed is False]
    return found


def _line(row: Row) -> str:
    verdict = {None: "", True: "  ok", False: "  FAILED"}[row.passed]
    return f"  {row.label:<58} {shown(row):>22}{verdict}"


def shown(row: Row) -> str:
    """Value and unit."""
    value = "-" if row.value is None else f"{row.value:.4g}" if isinstance(row.value, float) else str(row.value)
    return f"{value} {row.unit}".rstrip()
