"""The command: see the package."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import results
from tests.cost import KIND, pace_ms
from tests.cost.inside import FOLDER, KINDS

ROOT = Path(__file__).parents[2]
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
"""As in the Makefile."""

DEAREST = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests, print what they cost; returns pytest's exit code."""
    given = _parser().parse_args(argv)
    if sys.platform != "linux":
        print("error: the idle share of the cores is read from /proc/stat, of Linux", file=sys.stderr)
        return 2
    if given.write and given.words:
        print("error: --write keeps the cost of all of `make test`; leave out the words", file=sys.stderr)
        return 2
    try:
        code, measured = _measured(given.words)
    except KeyboardInterrupt:
        print("interrupted; nothing is kept", file=sys.stderr)
        return 130
    if not measured["tests"]:
        print("error: no test ran, so nothing was measured; do the paths and words after -- exist?", file=sys.stderr)
        return code or 2
    print(_table(measured))
    if given.write:
        if code:
            print("error: a test failed, so the cost is not kept", file=sys.stderr)
            return code
        print(results.write(KIND, measured))
    return code


def _measured(words: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """pytest's exit code for the tests that `words` name, and what they cost."""
    with tempfile.TemporaryDirectory(prefix="test-cost-") as folder:
        paces = [pace_ms()]
        began, busy = time.perf_counter(), _busy()
        command = [sys.executable, "-m", "pytest", *WORKERS, "-p", "tests.cost.inside", *words]
        code = subprocess.run(command, cwd=ROOT, env={**_environment(), FOLDER: folder}).returncode
        measured = _summed(_lines(Path(folder)), time.perf_counter() - began, _idle(busy))
        measured["pace_ms"] = sum([*paces, pace_ms()]) / 2
    return code, measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cost", description="run the tests as `make test` does, and say where their time goes"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep it in bench/results/tests.json; all tests run and pass"
    )
    parser.add_argument("words", nargs="*", metavar="-- WORD", help="for pytest: paths, -k, -m sweep")
    return parser


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as `make` does


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def _summed(lines: Iterable[dict[str, Any]], wall_s: float, idle: float) -> dict[str, Any]:
    """The cost of a session.

    Returns wall_s: of all.  idle: share of the cores that did nothing.  kinds: kind -> [wall, CPU] of all processes.
    files: file -> [seconds of its worker, CPU seconds with ranks and commands, tests].  dearest: test -> the first two.
    """
    kinds: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in KINDS}
    tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in lines:
        test = tests[line["test"]]
        test[0] += line.get("wall", 0.0)
        test[1] += line.get("commands_cpu", 0.0)
        kinds["commands"][1] += line.get("commands_cpu", 0.0)
        for kind, (wall, cpu) in line["spent"].items():
            test[1] += cpu
            kinds[kind][0] += wall
            kinds[kind][1] += cpu
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for name, (seconds, cpu) in tests.items():
        file = files[name.partition("::")[0]]
        for at, value in enumerate((seconds, cpu, 1)):
            file[at] += value
    return {
        "wall_s": round(wall_s, 1),
        "worker_s": round(sum(seconds for seconds, _ in tests.values()), 1),
        "cpu_s": round(sum(cpu for _, cpu in tests.values()), 1),
        "idle": round(idle, 3),
        "tests": len(tests),
        "kinds": {kind: _rounded(spent) for kind, spent in kinds.items()},
        "files": _dearest(files),
        "dearest": dict(list(_dearest(tests).items())[:DEAREST]),
    }


def _dearest(table: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: _rounded(cost) for name, cost in sorted(table.items(), key=lambda item: -item[1][0])}


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in values]


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['tests']} tests: {found['wall_s']:.0f} s, {found['worker_s']:.0f} s of workers, "
        f"{found['cpu_s']:.0f} s of CPU; the cores idle for {found['idle']:.0%}; a million additions take "
        f"{found['pace_ms']:.1f} ms",
        f"\n{'kind of work, in all processes':40} {'wall, s':>9} {'CPU, s':>9}",
        *(f"{kind:40} {wall:9.1f} {cpu:9.1f}" for kind, (wall, cpu) in found["kinds"].items()),
        f"\n{'file':40} {'worker, s':>9} {'CPU, s':>9} {'tests':>6}",
        *(f"{file:40} {wall:9.1f} {cpu:9.1f} {count:6.0f}" for file, (wall, cpu, count) in found["files"].items()),
        f"\n{'worker, s':>9} {'CPU, s':>9}  the dearest tests",
        *(f"{wall:9.1f} {cpu:9.1f}  {test}" for test, (wall, cpu) in found["dearest"].items()),
    ]
    return "\n".join(lines)


def _busy() -> tuple[float, float]:
    """Seconds since the start of the machine in which its cores idled, and all."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    times = [int(number) for number in re.findall(r"\d+", first)]
    return float(times[3] + times[4]), float(sum(times[:8]))


def _idle(before: tuple[float, float]) -> float:
    idle, everything = (now - then for now, then in zip(_busy(), before, strict=True))
    return idle / everything


if __name__ == "__main__":
    sys.exit(main())
