"""A pytest plugin that ends a session with its dearest files and its total, beside those that are committed.

Seconds are those of workers: two of them spend two in a second. The speed of the machine counts, measured as the
session begins and ends; the faster one, as workers may still be ending then. `python -m tests.cost --write` commits
others.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from bench.results import about
from tests.cost import kept, pace_ms

SHOWN = 10
GROWTH = 1.2
"""More than this times the committed seconds is said to have grown."""

WHOLE = 0.9
"""A session with at least this share of the committed tests is compared as a whole."""


_pace = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Measure the speed of the machine, in the process that reports."""
    if not hasattr(config, "workerinput"):
        config.stash[_pace] = pace_ms()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, where there is a committed one."""
    if (committed := kept()) is None or config.option.markexpr or config.option.collectonly:
        return
    reports = [each for reports in terminalreporter.stats.values() for each in reports if hasattr(each, "duration")]
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    tests = len({report.nodeid for report in reports})
    if not tests:
        terminalreporter.write_line("error: no test ran; do the paths and words of ARGS exist?", red=True)
        return
    terminalreporter.section("cost", sep="-")
    for line in summary(seconds, tests, committed, min(config.stash[_pace], pace_ms())):
        terminalreporter.write_line(line)


def summary(seconds: Mapping[str, float], tests: int, committed: Mapping[str, Any], pace: float) -> list[str]:
    """The lines of a session: file -> seconds, the tests that it ran, the cost that is committed, and `pace_ms`."""
    former = {file: cost[0] for file, cost in committed["files"].items()}
    dearest = sorted(seconds, key=lambda file: -seconds[file])[:SHOWN]
    wide = max(map(len, dearest), default=0)
    lines = [f"{file:{wide}} {seconds[file]:7.1f} s, committed {former.get(file, 0.0):7.1f} s" for file in dearest]
    if tests < WHOLE * committed["tests"]:
        return [*lines, f"{tests} of some {committed['tests']} tests: the total is compared when all run"]
    total, before = sum(seconds.values()), sum(former.values())
    lines.append(f"{tests} tests {total:.0f} s, committed {committed['tests']} tests {before:.0f} s")
    here, slower = about(), pace / committed["pace_ms"]
    lines.append(f"the machine took {slower:.2f} times as long for the same as when that was measured")
    if any(committed[key] != here[key] for key in ("device", "cores")):
        lines.append(f"committed was measured on another machine: {committed['cores']} cores, {committed['device']}")
    elif total > GROWTH * slower * before:
        lines.append(
            f"the tests take {total / before:.2f} times the committed seconds, more than {GROWTH:g} at this speed: "
            "make them cheaper, or say why and run python -m tests.cost --write"
        )
    return lines
