"""Compare the planner's predictions with published measurements, and fit its constants to them.

    python -m bench.plan_accuracy [--rows FILE] [--json] [--fit] [--write]

Predicts every row of a file of published runs and prints the errors as a Markdown page: step times by hardware and by
source, layout sweeps, memory, out-of-memory runs, schedules. Without --rows it also writes the page to
docs/validation.md. The rows are then those of a collection next to the repository if there is one, otherwise the
repository's copy, bench/published/rows.jsonl.

These errors are in-sample: the constants are fitted to the same rows. For an unseen cluster, use the
leave-one-source-out table of the page.

--fit refits the free constants (1 to 2 minutes) and the leave-one-source-out table (some minutes more), and stores both
in bench/published/fit.json. --write copies the stored constants into the cluster files and fabrics.toml, which are the
files that predictions read; with --fit, it copies the new ones.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.published import page, rows
from bench.published.fit import World, cases_of, fit, fitted
from bench.published.keep import kept, write
from bench.published.left_out import left_out
from bench.published.report import by_group, by_memory, by_source, of_others, out_of_memory, ranked, results, sweeps
from bench.published_schedules import schedule_rows

PAGE = Path(__file__).parents[1] / "docs" / "validation.md"
FITTED = Path(__file__).parent / "published" / "fit.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print it as Markdown or JSON; returns the exit code."""
    plainly = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.plan_accuracy", description=__doc__, formatter_class=plainly)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="published measurements, one JSON object per line")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every prediction")
    parser.add_argument("--fit", action="store_true", help="refit the constants and the leave-one-source-out table")
    parser.add_argument("--write", action="store_true", help="copy the stored constants into the cluster files")
    chosen = parser.parse_args(arguments)
    path = chosen.rows or rows.default()
    try:
        found = rows.load(path)
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    cases, skipped = cases_of(found)
    if chosen.fit:
        _refit(cases)
    if chosen.write:
        write(kept(json.loads(FITTED.read_text(encoding="utf-8"))["constants"]))
    measured = measure(found, cases, skipped)
    if chosen.json:
        print(json.dumps(measured, indent=1))
        return 0
    text = page.written(measured, json.loads(FITTED.read_text(encoding="utf-8")) if FITTED.is_file() else {})
    print(text)
    if chosen.rows is None:
        PAGE.write_text(text, encoding="utf-8")
    return 0


def _refit(cases: list[Any]) -> None:
    chosen = fitted(cases)
    values = fit(chosen, rounds=8)
    without = left_out(cases, values)
    constants = [
        {
            "devices": c.devices,
            "where": c.where,
            "value": value,
            "low": c.low,
            "high": c.high,
            "rows": c.seen_by(chosen),
        }
        for c, value in values.items()
    ]
    FITTED.write_text(json.dumps({"constants": constants, "left_out": without}, indent=1) + "\n", encoding="utf-8")


def measure(found: list[dict[str, Any]], cases: list[Any], skipped: dict[str, str]) -> dict[str, Any]:
    """All predictions and their errors as plain data: the object that --json prints."""
    predicted = results(cases, World())
    schedules = schedule_rows(row for row in found if _profiled(row))
    return {
        "rows": len(found),
        "groups": by_group(predicted),
        "sources": [{"of": list(key), **value} for key, value in by_source(predicted).items()],
        "sweeps": {name: ranked(each) for name, each in sweeps(predicted).items()},
        "memory": [{"of": list(key), **value} for key, value in by_memory(predicted).items()],
        "memory_of_others": of_others(predicted),
        "out_of_memory": out_of_memory(predicted),
        "schedules": schedules,
        "skipped": skipped,
        "results": [result.as_json() for result in predicted],
    }


def _profiled(row: dict[str, Any]) -> bool:
    """Whether a row states the times of its actions and every key that the schedule comparison needs."""
    extra = row.get("extra")
    if not isinstance(extra, dict) or not isinstance(row.get("schedule"), str):
        return False
    whole = [
        row.get(key, 1 if key == "vpp" else None)
        for key in ("pp", "vpp", "grad_accum", "layers", "hidden", "heads", "seq_len")
    ]
    times = [row.get("step_time_s"), *(extra.get(key) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))]
    few = all(isinstance(number, int) and 0 < number < 100_000 for number in whole)
    return few and all(isinstance(number, int | float) and number > 0 for number in times)


if __name__ == "__main__":
    sys.exit(main())
