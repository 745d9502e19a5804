"""Measurements as rows, each the same work on several ranks, groups or pairs; and the outliers among them."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

RATE_TOLERANCE, LATENCY_TOLERANCE = 0.15, 0.5
DEVIATIONS = 3 * 1.4826
"""Three standard deviations of a normal distribution, in median absolute deviations."""

UNSTEADY, TIMES_AS_UNSTEADY = 0.5, 3.0

RULE = fill(
    "A rank, group or pair is an outlier if it is slower than the median of its peers at the same work by more than "
    f"{RATE_TOLERANCE:.0%} ({LATENCY_TOLERANCE:.0%} for latencies), by more than the spread of its own repeats, and by "
    "more than three standard deviations (estimated by the median absolute deviation). Of several sizes, the median "
    "ratio counts. If half of the peers are slow, the faster half is the reference. A rank, group or pair is unsteady "
    f"if its repeats differ by more than {UNSTEADY:.0%}, and by {TIMES_AS_UNSTEADY:g} times as much as those of its "
    "peers (a flapping port, a throttling device). If all pairs of a rank are slow, the rank is reported instead.",
    width=120,
)
"""The definition of an outlier, for `titan doctor --help`."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measurement of one rank.

    kind: kind of work; readings of a kind are compared with each other.  name: the work, with its size.  subject: rank,
    group or pair.  seconds: per call, median.  spread: (longest - shortest) / median.  work: FLOPs, bytes or calls per
    call, by `unit` ("TFLOP/s", "GB/s" or "us").  about: parameters of the work.
    """

    kind: str
    name: str
    subject: str
    seconds: float
    spread: float
    work: float
    unit: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The same work on several subjects. seconds, spreads: by subject; other fields as in `Reading`."""

    kind: str
    name: str
    work: float
    unit: str
    about: Mapping[str, Any]
    seconds: Mapping[str, float]
    spreads: Mapping[str, float]

    @property
    def middle(self) -> float:
        """Seconds per call of the median subject."""
        return statistics.median(self.seconds.values())

    def shown(self, seconds: float) -> float:
        """Seconds per call converted to this row's unit (TFLOP/s, GB/s or us)."""
        if self.unit == "us":
            return seconds / self.work * 1e6
        return self.work / seconds / {"TFLOP/s": 1e12, "GB/s": 1e9}[self.unit]


@dataclass(frozen=True)
class Finding:
    """An outlier. fault: "slow" or "unsteady".  by: relative slowdown against its peers, or spread of its repeats."""

    subject: str
    kind: str
    fault: str
    by: float

    def __str__(self) -> str:
        if self.fault == "slow":
            return f"{self.subject}: slow at {self.kind}, takes {self.by:.0%} longer than its peers"
        return f"{self.subject}: unsteady at {self.kind}, repeats differ by {self.by:.0%}"


def rows(readings: Iterable[Reading]) -> list[Row]:
    """Group the readings of all ranks into rows. If several ranks timed a subject, the slowest reading counts."""
    grouped: dict[tuple[str, str], list[Reading]] = defaultdict(list)
    for reading in readings:
        grouped[reading.kind, reading.name].append(reading)
    made = []
    for (kind, name), same in grouped.items():
        by_time = sorted(same, key=lambda reading: reading.seconds)
        made.append(
            Row(
                kind=kind,
                name=name,
                work=same[0].work,
                unit=same[0].unit,
                about=same[0].about,
                seconds={reading.subject: reading.seconds for reading in by_time},
                spreads={reading.subject: reading.spread for reading in by_time},
            )
        )
    return made


def outliers(measured: Sequence[Row], links: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The outliers among rows, by `RULE`. links: names of the two ranks of each pair, by the pair's name."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in measured:
        kinds[row.kind].append(row)
    found = []
    for kind, same in kinds.items():
        found += _blamed(_odd(kind, same), [subject for row in same for subject in row.seconds], links)
    return found


def _odd(kind: str, same: Sequence[Row]) -> list[Finding]:
    slowness: dict[str, list[float]] = defaultdict(list)
    spreads: dict[str, list[float]] = defaultdict(list)
    for row in same:
        usual = statistics.median_low(row.seconds.values())
        for subject, seconds in row.seconds.items():
            slowness[subject].append(seconds / usual)
            spreads[subject].append(row.spreads[subject])
    times = {subject: statistics.median(values) for subject, values in slowness.items()}
    jitter = {subject: statistics.median(values) for subject, values in spreads.items()}
    if len(times) == 1:
        return []
    usual = statistics.median_low(times.values())
    deviation = statistics.median_low(abs(value - usual) for value in times.values())
    tolerance = LATENCY_TOLERANCE if same[0].unit == "us" else RATE_TOLERANCE
    found = []
    for subject, value in times.items():
        if value - usual > max(tolerance * usual, DEVIATIONS * deviation, jitter[subject] * usual):
            found.append(Finding(subject, kind, "slow", value / usual - 1))
        if jitter[subject] > max(UNSTEADY, TIMES_AS_UNSTEADY * statistics.median_low(jitter.values())):
            found.append(Finding(subject, kind, "unsteady", jitter[subject]))
    return found


def _blamed(found: list[Finding], subjects: Sequence[str], links: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Report a rank instead of its pairs if it has several pairs and all are slow."""
    slow = {finding.subject: finding for finding in found if finding.fault == "slow" and finding.subject in links}
    of_rank: dict[str, set[str]] = defaultdict(set)
    for pair in dict.fromkeys(subject for subject in subjects if subject in links):
        for rank in links[pair]:
            of_rank[rank].add(pair)
    blamed = []
    for rank, pairs in of_rank.items():
        if len(pairs) > 1 and pairs <= slow.keys():
            least = min((slow[pair] for pair in pairs), key=lambda finding: finding.by)
            blamed.append(Finding(f"{rank}, all {len(pairs)} pairs", least.kind, "slow", least.by))
            found = [finding for finding in found if finding.fault != "slow" or finding.subject not in pairs]
    return blamed + found


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, of t = a x + b y through points (x, y, t), by least squares of relative errors.

    With messages, bytes and seconds: seconds of a message and of a byte.
    """
    scaled = [(x / t, y / t) for x, y, t in points]
    xx, yy = sum(x * x for x, _ in scaled), sum(y * y for _, y in scaled)
    xy, sx, sy = sum(x * y for x, y in scaled), sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    only_x, only_y = (sx / xx if xx else 0.0), (sy / yy if yy else 0.0)
    wrong_x = math.fsum((only_x * x - 1) ** 2 for x, _ in scaled)
    wrong_y = math.fsum((only_y * y - 1) ** 2 for _, y in scaled)
    return (only_x, 0.0) if wrong_x < wrong_y else (0.0, only_y)
