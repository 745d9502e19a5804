"""Where the time of the tests goes, and whether it is what was committed.

    python -m tests.cost                  # `make test`, measured: by file, by kind of work, the hundred dearest tests
    python -m tests.cost -- -m sweep      # `make sweep`; what follows `--` goes to pytest
    python -m tests.cost --write          # the whole of `make test`, and keep it in bench/results/tests.json

The plugin `summary`, which `make test` loads, prints the dearest files of a session beside those that were kept.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

KIND = "tests"
KEPT = Path(__file__).parents[2] / "bench" / "results" / f"{KIND}.json"


def pace_ms() -> float:
    """Milliseconds in which this machine adds up a million numbers now: a shared one has days of half its speed."""
    return round(statistics.median(_loop_ms() for _ in range(9)), 1)


def _loop_ms() -> float:
    began, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number
    return 1e3 * (time.perf_counter() - began)


def kept() -> dict[str, Any] | None:
    """The cost of the tests that is committed; None in a copy of the checkout without results."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else None
