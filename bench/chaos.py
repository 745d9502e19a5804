"""Injects faults into small runs until --kills have struck, and reports lost or wrong results.

    python -m bench.chaos [--kills 200] [--seed 0]

Needs Linux. Most faults are kills; the others are file system errors (EIO, ENOSPC, ESTALE), files that cannot be
removed, second starts of the same command, a growing corpus and a jumping clock. The seed determines faults, moments
and layouts. tests/chaos.py has the invariants. Exit code 1: at least one was violated.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from bench import results
from tests.chaos import Hunt


def main() -> int:
    """Inject faults, print counts and violations, write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of faults, kills included; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="seed of faults, moments and layouts; default: 0")
    words = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=words.kills, unit="fault", disable=None) as bar:
        hunting = Hunt(Path(folder))
        hunting.told = lambda: bar.update(len(hunting.report.struck) - bar.n)
        report = hunting.hunt(words.kills, words.seed)
    keys = ("kind", "point", "victim", "way", "layout", "code")
    counts = {key: dict(Counter(str(one[key]) for one in report.struck)) for key in keys}
    for key, found in counts.items():
        print(f"{key:<8}", ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    about = f"{len(report.struck)} faults in {report.runs} runs, {report.starts} starts"
    print(f"{about}: {len(report.violations)} violations")
    for violation in report.violations:
        print("violation:", violation)
    measured = {
        "seed": words.seed,
        "seconds": round(time.monotonic() - began),
        "runs": report.runs,
        "starts": report.starts,
        "violations": report.violations,
        "counts": counts,
        "struck": report.struck,
    }
    print(results.write("chaos", measured))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
