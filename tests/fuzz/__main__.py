"""The command: see the package."""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from bench import results
from tests.fuzz.draw import Drawn, draw
from tests.fuzz.judge import Judge, Verdict
from tests.fuzz.savings import arithmetic


def main() -> int:
    """Judge the jobs, print those that failed, write the results; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="train random layouts against one rank")
    parser.add_argument("--n", type=int, default=40, help="jobs")
    parser.add_argument("--seed", type=int, default=0, help="which jobs")
    parser.add_argument("--only", type=int, help="judge this job alone, and write no results")
    parser.add_argument("--keep-going", action="store_true", help="go on after a job that failed")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    began, judge = time.perf_counter(), Judge(folder)
    judged: dict[int, tuple[Drawn, Verdict]] = {}
    indices = range(given.n) if given.only is None else [given.only]
    for index in tqdm(indices, disable=None, smoothing=0):
        drawn = draw(given.seed, index)
        judged[index] = drawn, judge.judge(drawn)
        if judged[index][1].kind == "failed":
            tqdm.write(_complaint(judge, *judged[index]))
            if not given.keep_going:
                break
    if given.only is None:
        print(results.write("fuzz", _summary(given.seed, judged, time.perf_counter() - began)))
    else:
        print(_row(*judged[given.only]))
    return int(any(verdict.kind == "failed" for _, verdict in judged.values()))


def _complaint(judge: Judge, drawn: Drawn, verdict: Verdict) -> str:
    spoilt = f"spoilt: {', '.join(drawn.spoilt)}" if drawn.spoilt else "meant to be legal"
    again = f"python -m tests.fuzz --seed {drawn.seed} --only {drawn.index}"
    return f"--- job {drawn.index} ({spoilt}) failed; again: {again}\n{judge.command(drawn)}\n{verdict.reason}"


def _row(drawn: Drawn, verdict: Verdict) -> str:
    numbers = " ".join(f"{key} {value:.1e}" for key, value in verdict.worst.items())
    keys = " ".join(f"{key}={value}" for key, value in {**drawn.curve, **drawn.layout}.items())
    return f"{drawn.index} {verdict.kind} {verdict.seconds:.1f}s {numbers} ranks={drawn.ranks} {keys}"


def _summary(seed: int, judged: Mapping[int, tuple[Drawn, Verdict]], seconds: float) -> dict[str, object]:
    kinds = Counter(verdict.kind for _, verdict in judged.values())
    agreed = [(drawn, verdict.worst) for drawn, verdict in judged.values() if verdict.kind == "agreed"]
    worst: dict[str, list[Mapping[str, float]]] = {}
    for drawn, deviations in agreed:
        worst.setdefault(arithmetic(drawn.curve), []).append(deviations)
    features = Counter(feature for drawn, _ in agreed for feature in drawn.features)
    refused = Counter(_gist(verdict.reason) for _, verdict in judged.values() if verdict.kind == "refused")
    return {
        "seed": seed,
        "jobs": len(judged),
        "agreed": kinds["agreed"],
        "refused": kinds["refused"],
        "failed": kinds["failed"],
        "seconds": round(seconds),
        "largest_deviation": {
            kind: {quantity: max(one[quantity] for one in all_of) for quantity in all_of[0]}
            for kind, all_of in sorted(worst.items())
        },
        "agreed_with": dict(sorted(features.items())),
        "refused_for": dict(refused.most_common()),
        "rows": [_row(*pair) for pair in judged.values()],
    }


def _gist(reason: str) -> str:
    """The first fault without its source and its numbers, so that faults of a kind can be counted."""
    first = reason.splitlines()[0]
    return re.sub(r"\d+", "N", first[first.find("[") :])[:70]


if __name__ == "__main__":
    sys.exit(main())
