"""Writes the tables of docs/benchmarks.md, correctness.md, communication.md, gpu.md and versions.md from bench/results.

    python -m bench.tables [--check]

A page marks the place of each table with a pair of comments, `<!-- table: NAME -->` and `<!-- end -->`; all between
them is replaced. The rest of the page is prose and stays. --check writes nothing, and exits with 1 if a page differs
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

from bench import __main__ as targets
from bench import results
from bench.gpu.page import TABLES as GPU_TABLES
from bench.headlines import (
    KINDS,
    SAVINGS,
    attention_ms,
    comm_rows,
    context_rows,
    counted,
    dispatch_ms,
    dispatch_ratio,
    headline,
    savings,
    speeds,
    timings,
    turns_ms,
)
from bench.versions import in_range, told

PAGES = tuple(
    Path(__file__).parents[1] / "docs" / name
    for name in ("benchmarks.md", "correctness.md", "communication.md", "gpu.md", "versions.md")
)
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
APART = 0.1
"""Relative difference of two measured step times above which their order is said to count."""
Found = Mapping[str, Any]


def main(arguments: list[str] | None = None, pages: Iterable[Path] = PAGES) -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    stale = False
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = written(text)
        if new == text:
            continue
        stale = True
        if check:
            print(f"{page} is out of date; run python -m bench.tables", file=sys.stderr)
        else:
            page.write_text(new, encoding="utf-8")
    return int(check and stale)


def written(text: str) -> str:
    """A page with its marked tables made from bench/results.

    Raises:
        KeyError: the page marks a table that does not exist.
    """
    found = dict(results.newest())

    def table(place: re.Match[str]) -> str:
        name = place[2]
        whole = {"record": lambda: _record(found, results.earlier()), "targets": _targets, **GPU_TABLES}
        whole["version-cases"] = lambda: _version_cases(found["versions"])
        whole["version-outside"] = lambda: _version_outside(found["versions"])
        made = whole[name]() if name in whole else TABLES[name](found[name])
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
        [
            name,
            of["ranks"],
            f"{of['predicted_s']:.2f}",
            f"{of['measured_s']:.2f}",
            f"{100 * of['error']:+.1f} %",
            f"{100 * of['spread']:.0f} %",
        ]
        for name, of in layouts.items()
    ]
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


def _targets() -> str:
    """What `make bench` prints."""
    head, *rows = targets.rows_of(targets.RUNS)
    return _table(head, rows)


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


def _attention(found: Found) -> str:
    rows = [
        [name, f"{masked:.0f}", f"{apart:.0f}", f"{masked / apart:.1f}"]
        for name, row in found["rows"].items()
        for masked, apart in [attention_ms(row)]
    ]
    return _table([f"{found['tokens']:,} tokens", "with a mask, ms", "by document, ms", "ratio"], rows)


def _turns(found: Found) -> str:
    rows = [
        [name, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"]
        for name, row in found["rows"].items()
        for ours, theirs in [turns_ms(row)]
    ]
    return _table([f"sequences x tokens per step, tp {found['tp']}", "titan, ms", "torchtitan, ms", "ratio"], rows)


def _transformers(found: Found) -> str:
    rows = [
        [
            row["model"],
            row["ranks"],
            row["layout"],
            f"{row['loss']:.1e}",
            f"{row['grad_norm']:.1e}",
            f"{row['weights']:.2f}",
        ]
        for row in found["rows"]
    ]
    head = ["model", "ranks", "layout", "loss", "gradient norm", "weights, share of the bound"]
    return _table(head, rows) + f"\nOver {found['steps']} steps, against transformers {found['transformers']}.\n"


def _context(found: Found) -> str:
    head = ["tokens", "method", "tokens/s", "relative to one rank", "GiB per rank", "of which steps add"]
    kernels = {
        f"- {method}: {', '.join(f'`{name}`' for name in names)}.\n"
        for methods in found["rows"].values()
        for method, of in methods.items()
        if (names := of["kernels"][0])
    }
    said = "\nKernels of attention:\n\n" + "".join(sorted(kernels)) if kernels else ""
    return _table(head, context_rows(found)) + said


def _peers(found: Found) -> str:
    cells = []
    for case, rows in found["rows"].items():
        ours = median(rows["titan"]["seconds"])
        for name, row in rows.items():
            taken = median(row["seconds"])
            cells.append([case, name, f"{taken:.2f}", f"{ours / taken:.2f}", f"{row['peak_gib']:.2f}"])
    head = ["", "trainer", "seconds per step", "speed relative to titan", "GiB, the largest rank"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "system")
    return _table(head, cells) + f"\nMedians of {found['steps']} steps; {versions}.\n"


def _savings(found: Found) -> str:
    head = ["", *SAVINGS]
    tables = []
    for name, rows in found["tables"].items():
        cells = [[f"{job}", *(f"{ratio:.2f}" for ratio in ratios)] for job, ratios in savings(rows).items()]
        tables.append(f"{name.capitalize()}:\n\n{_table(head, cells)}")
    return "\n".join(tables)


def _counted(found: Found) -> str:
    tables = []
    for name, rows in found["tables"].items():
        plain, ratios = next(iter(rows.values())), counted(rows)
        cells = [[job, f"{time:.2f}", f"{memory:.2f}"] for job, (time, memory) in ratios.items()]
        head = [f"{name} ({1e3 * plain['seconds']:,.0f} ms, {plain['gib']:.1f} GiB)", "time", "memory"]
        tables.append(_table(head, cells))
    return "\n".join(tables)


def _layouts(found: Found) -> str:
    rows = found["largest_relative_difference"].items()
    cells = [[name, f"{row['loss']:.1e}", f"{row['grad_norm']:.1e}"] for name, row in rows]
    return _table(["layout", "loss", "gradient norm"], cells)


def _versions(found: Found) -> str:
    inside = {version: there for version, there in found["versions"].items() if in_range(version)}
    of_each = [{part["part"]: told(part) for part in there["parts"]} for there in inside.values()]
    rows = [(part, *(told_of.get(part, "not run") for told_of in of_each)) for part in max(of_each, key=len)]
    commits = (dict.fromkeys(f"`{part['commit']}`" for part in there["parts"]) for there in inside.values())
    rows += [("commit", *map(", ".join, commits))]
    names = [f"PyTorch {version}, Python {there['python'].rpartition('.')[0]}" for version, there in inside.items()]
    return _table(["", *names], rows)


def _version_outside(found: Found) -> str:
    outside = {version: there for version, there in found["versions"].items() if not in_range(version)}
    rows = [
        (f"PyTorch {version}, Python {there['python'].rpartition('.')[0]}", part["part"], told(part), part["commit"])
        for version, there in outside.items()
        for part in there["parts"]
    ]
    return _table(["", "part", "result", "commit"], rows)


def _version_cases(found: Found) -> str:
    versions = {version: there for version, there in found["versions"].items() if in_range(version)}
    cases = [there.get("cases", {}) for there in versions.values()]
    said = {True: "works", False: "fails", None: "not run"}
    rows = [(name, *(said[of.get(name)] for of in cases)) for name in max(cases, key=len)]
    return _table(["case", *versions], rows)


def _comm(found: Found) -> str:
    head = [
        "method",
        "ranks",
        "MB per step and rank",
        "share of all-reduce",
        "training loss",
        "validation loss",
        "above all-reduce",
        "step time, relative",
    ]
    rows = [
        [
            name,
            row["ranks"],
            f"{row['bytes'] / 1e6:.3g}",
            f"{row['share']:.3g}",
            f"{row['loss']:.3f}",
            f"{row['validation']:.3f}",
            f"{row['further']:+.3f}",
            f"{row['time']:.2f}",
        ]
        for name, row in comm_rows(found).items()
    ]
    return _table(head, rows) + f"\nOver {found['steps']} steps.\n"


TABLES: Mapping[str, Callable[[Found], str]] = {
    "overhead": _overhead,
    "planning": _planning,
    "doctor": _doctor,
    "dispatch": _dispatch,
    "turns": _turns,
    "transformers": _transformers,
    "layouts": _layouts,
    "context": _context,
    "comm": _comm,
    "savings": _savings,
    "attention": _attention,
    "peers": _peers,
    "counted": _counted,
    "versions": _versions,
}
"""Name of a table -> what is made of the newest result of that kind."""

if __name__ == "__main__":
    sys.exit(main())
