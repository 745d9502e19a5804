"""All benchmarks of a CPU that have a target, one after the other: what was asked, what was measured, ok or short.

    python -m bench [--only TEXT] [--table]

Takes 20 to 30 minutes on two cores. Each benchmark is a command of its own, which writes its result under bench/results
(`python -m bench.peers --help`, ...). One that needs packages which are absent is left out, and said.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from bench import results
from bench.startup import LEFT_OUT

RUNS: Mapping[str, Sequence[str]] = {
    "overhead": ("--steps", "10", "--no-start"),
    "peers": ("--steps", "12"),
    "startup": ("--turns", "1"),
    "saves": (),
    "data": (),
    "memory": ("--steps", "2"),
    "loss": ("--steps", "4"),
}
"""Benchmark, a module here with a function `figures` -> arguments that keep all of them within 30 minutes."""

Row = tuple[str, str, str, bool | None]
"""Figure, target, measured, and whether it is met; None: there is no target, or nothing to hold against it here."""

Words = tuple[str, str, str, str]


def main() -> int:
    """Measure, print the table; returns the exit code: 1 where a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="benchmarks with this in their name")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of the results that are there")
    args = parser.parse_args()
    chosen = [name for name in RUNS if args.only in name]
    if not chosen:
        parser.error(f"--only {args.only}: no benchmark has this in its name; they are {', '.join(RUNS)}")
    codes = dict.fromkeys(chosen, 0) if args.table else {name: _run(name) for name in chosen}
    print("\n".join(aligned(rows_of(name for name, code in codes.items() if not code))))
    for name, code in codes.items():
        if code:
            print(f"{name}: {'left out' if code == LEFT_OUT else 'failed'}; its words are above")
    return int(any(code not in (0, LEFT_OUT) for code in codes.values()))


def rows_of(names: Iterable[str]) -> list[Words]:
    """Of the newest results of these benchmarks: a head, and figure, target, measured, ok or short."""
    rows = [row for name in names for row in _rows(name)]
    return [("figure", "target", "measured", ""), *((*row[:3], _verdict(row[3])) for row in rows)]


def aligned(rows: Sequence[Words]) -> list[str]:
    """Lines of columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]


def _verdict(met: bool | None) -> str:
    return "" if met is None else "ok" if met else "short"


def _run(name: str) -> int:
    """The exit code of a benchmark; what it prints is shown as it comes."""
    began = time.monotonic()
    print(f"--- {name}", flush=True)
    code = subprocess.run([sys.executable, "-m", f"bench.{name}", *RUNS[name]]).returncode
    print(f"--- {name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def _rows(name: str) -> list[Row]:
    path = results.FOLDER / f"{name}.json"
    if not path.is_file():
        return [(name, "", "no result", None)]
    rows: list[Row] = importlib.import_module(f"bench.{name}").figures(json.loads(path.read_text()))
    return rows


if __name__ == "__main__":
    sys.exit(main())
