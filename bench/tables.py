"""Writes the tables of docs/benchmarks.md from bench/results.

    python -m bench.tables [--check]

The page marks the place of each table with a pair of comments, `<!-- table: NAME -->` and `<!-- end -->`; all between
them is replaced. The rest of the page is prose and stays. --check writes nothing, and exits with 1 if the page differs
from what would be written.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench import results
from bench.headlines import KINDS, dispatch_ms, dispatch_ratio, headline, speeds, timings, turns_ms

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
APART = 0.1
"""Relative difference of two measured step times above which their order is said to count."""
Found = Mapping[str, Any]


def main(arguments: list[str] | None = None, page: Path = PAGE) -> int:
    """Write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args(arguments).check
    text = page.read_text(encoding="utf-8")
    new = written(text)
    if check:
        if new != text:
            print(f"{page} is out of date; run python -m bench.tables", file=sys.stderr)
        return int(new != text)
    page.write_text(new, encoding="utf-8")
    return 0


def written(text: str) -> str:
    """A page with its marked tables made from bench/results.

    Raises:
        KeyError: the page marks a table that does not exist, or whose result is missing.
    """
    found = dict(results.newest())

    def table(place: re.Match[str]) -> str:
        name = place[2]
        made = _record(found, results.earlier()) if name == "record" else TABLES[name](found[name])
        return f"{place[1]}\n{made}\n{place[3]}"

    return PLACE.sub(table, text)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def _overhead(found: Found) -> str:
    rows = [[kind, f"{bare:.0f}", f"{ours:.0f}", f"{ratio:.2f}"] for kind, (bare, ours, ratio) in speeds(found).items()]
    pairs = len(found["fp32"]["bare_s"])
    said = f"Medians of {pairs} pairs of steps."
    if "start_s" in found:
        said += f" In the same run, the first step ended {median(found['start_s']):.1f} s after the start."
    return _table(["", "bare, tokens/s", "titan, tokens/s", "ratio"], rows) + f"\n{said}\n"


def _planning(found: Found) -> str:
    rows = [[f"`{name}`", f"{seconds:.1f}", f"{gib:.1f} GiB"] for name, (seconds, gib) in timings(found).items()]
    rows.append(["each further layout, in one process", f"{median(found['further_layout_s']):.3f}", ""])
    return _table(["command, start included", "seconds", "memory"], rows)


def _doctor(found: Found) -> str:
    layouts = found["layouts"]
    rows = [
        [name, of["ranks"], f"{of['predicted_s']:.2f}", f"{of['measured_s']:.2f}", f"{100 * of['error']:+.1f} %",
         f"{100 * of['spread']:.0f} %"]
        for name, of in layouts.items()
    ]  # fmt: skip
    errors = {name: abs(of["error"]) for name, of in layouts.items()}
    worst = max(errors, key=errors.__getitem__)
    far = [
        (a, b)
        for a, b in combinations(layouts.values(), 2)
        if abs(a["measured_s"] - b["measured_s"]) > APART * min(a["measured_s"], b["measured_s"])
    ]
    right = sum((a["predicted_s"] < b["predicted_s"]) == (a["measured_s"] < b["measured_s"]) for a, b in far)
    said = (
        f"- The mean error is {100 * mean(errors.values()):.1f} %, the worst {100 * errors[worst]:.1f} % ({worst}).\n"
        f"- {found['pairs_ranked_right']} of {found['pairs']} pairs of layouts are ranked correctly. Of the {len(far)} "
        f"pairs whose measured times differ by\n  more than a tenth, {right} are.\n"
    )
    head = ["layout", "ranks", "predicted, s", "measured, s", "error", "spread of measured steps"]
    return f"{_table(head, rows)}\n{said}"


def _record(found: Mapping[str, Found], earlier: Iterable[Mapping[str, str]]) -> str:
    """The newest result of each kind, and what replaced ones said."""
    rows = [
        [f"`{kind}.json`", f"`{KINDS[kind][0]}`", of["date"][:10], f"`{of['commit']}`", headline(kind, of)]
        for kind, of in found.items()
    ]
    before = [[one["kind"], one["date"][:10], f"`{one['commit']}`", one["said"]] for one in earlier]
    newest = _table(["newest result", "command", "date", "commit", "result"], rows)
    return f"{newest}\nResults that newer ones replaced:\n\n{_table(['kind', 'date', 'commit', 'result'], before)}"


def _dispatch(found: Found) -> str:
    rows = found["rows"]
    splits = next(iter(rows.values()))
    cells = []
    for name, row in rows.items():
        halves = (f"{forward:.2f} + {backward:.2f}" for forward, backward in dispatch_ms(row).values())
        cells.append([name, *halves, f"{dispatch_ratio(row):.2f}"])
    return _table([f"milliseconds of a layer, tp {found['tp']}", *splits, "ratio"], cells)


def _turns(found: Found) -> str:
    rows = [
        [name, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"]
        for name, row in found["rows"].items()
        for ours, theirs in [turns_ms(row)]
    ]
    return _table([f"sequences x tokens per step, tp {found['tp']}", "titan, ms", "torchtitan, ms", "ratio"], rows)


TABLES: Mapping[str, Callable[[Found], str]] = {
    "overhead": _overhead, "planning": _planning, "doctor": _doctor, "dispatch": _dispatch, "turns": _turns
}  # fmt: skip
"""Name of a table -> what is made of the newest result of that kind."""

if __name__ == "__main__":
    sys.exit(main())
