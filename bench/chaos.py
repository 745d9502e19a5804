"""Injects faults into small runs until so many have struck, and says whether anything was lost or wrong.

    python -m bench.chaos [--kills 200] [--seed 0]

Needs Linux. Kills are drawn most often; the other faults are errors of the file system (EIO, ENOSPC, ESTALE), files
that cannot be removed, second starts of the same command, a corpus that grows and a clock that jumps. What happens
when and on which layout is drawn from the seed; what has to hold stands in tests/chaos.py, or the exit code is 1.
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
    """Hunt, print what struck and what did not hold, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="faults in all, kills among them")
    parser.add_argument("--seed", type=int, default=0, help="draws faults, moments and layouts")
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
        "seed": words.seed, "seconds": round(time.monotonic() - began), "runs": report.runs, "starts": report.starts,
        "violations": report.violations, "counts": counts, "struck": report.struck,
    }  # fmt: skip
    print(results.write("chaos", measured))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
