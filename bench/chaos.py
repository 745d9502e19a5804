"""Kills small runs at chosen moments until so many kills have struck, and says whether anything was lost.

    python -m bench.chaos [--kills 200] [--seed 0]

Needs Linux. What is killed, when and on which layout is drawn from the seed; what has to hold stands in tests/chaos.py.
Exit code 1 if something did not.
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
    """Hunt, print what was struck and what did not hold, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills in all")
    parser.add_argument("--seed", type=int, default=0, help="draws moments, victims and layouts")
    words = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=words.kills, unit="kill", disable=None) as bar:
        hunting = Hunt(Path(folder))
        hunting.told = lambda: bar.update(len(hunting.report.kills) - bar.n)
        report = hunting.hunt(words.kills, words.seed)
    counts = {key: dict(Counter(kill[key] for kill in report.kills)) for key in ("point", "victim", "way", "layout")}
    for key, found in counts.items():
        print(f"{key:<8}", ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    print(f"{len(report.kills)} kills of {report.runs} runs, {report.starts} starts: {len(report.faults)} faults")
    for fault in report.faults:
        print("fault:", fault)
    measured = {
        "seed": words.seed, "seconds": round(time.monotonic() - began), "runs": report.runs, "starts": report.starts,
        "struck": len(report.kills), "faults": report.faults, "counts": counts, "kills": report.kills,
    }  # fmt: skip
    print(results.write("chaos", measured))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
