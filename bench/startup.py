"""Seconds from the start of the command to the end of the first step: titan's launcher against torchrun and torchtitan.

    python -m bench.startup [--turns 3]

The model of `bench.peers` in fp32 on one rank, and on 8 ranks with dp 2, tp 2 and pp 2, which share the cores of this
machine. The trainers start in turns. Prints the ratio of the medians, and writes all samples under bench/results. Needs
torchtitan 0.2.2 and what it imports (`python -m bench.peers --help`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.gpu import opponent
from bench.peers.cases import Case
from bench.peers.titan import words_of
from bench.peers.turns import share_cores

CASES = (Case("1 rank"), Case("8 ranks", ranks=8, degrees={"dp": 2, "tp": 2, "pp": 2}))
TARGETS = {"1 rank": 0.5, "8 ranks": 0.25}
"""Share of torchtitan's time that titan may take."""

LIMIT_S = 300
LEFT_OUT = 2
"""Exit code where the other trainer is not installed."""


def main() -> None:
    """Start both in turns, print the ratios, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=3, help="starts of each trainer")
    parser.add_argument("--torchtitan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torchtitan:
        _first_step(json.loads(args.torchtitan))
        return
    if find_spec("torchtitan") is None:
        print("left out: no torchtitan; `python -m bench.peers --help` has what to install")
        sys.exit(LEFT_OUT)
    measured: dict[str, dict[str, list[float]]] = {}
    for case in CASES:
        rows = measured[case.name] = {"titan": [], "torchtitan": []}
        for _ in tqdm(range(args.turns), desc=case.name, disable=None):
            with tempfile.TemporaryDirectory() as folder:
                rows["titan"].append(_titan(case, Path(folder)))
                rows["torchtitan"].append(_torchtitan(case, Path(folder)))
        ours, theirs = (median(rows[who]) for who in ("titan", "torchtitan"))
        print(f"{case.name}: titan {ours:.1f} s, torchtitan {theirs:.1f} s, {ours / theirs:.2f} of it")
    print(results.write("startup", {"rows": measured}))


def figures(found: dict[str, dict[str, dict[str, list[float]]]]) -> list[tuple[str, str, str, bool]]:
    """(what, target, measured, whether it is met) of a result."""
    shares = {name: median(row["titan"]) / median(row["torchtitan"]) for name, row in found["rows"].items()}
    return [
        (
            f"start to the end of the first step, {name}, share of torchtitan's",
            f"at most {TARGETS[name]}",
            f"{share:.2f}",
            share <= TARGETS[name],
        )
        for name, share in shares.items()
    ]


def _titan(case: Case, folder: Path) -> float:
    words = [*words_of(case.asked(folder)), "--train.steps", "1", "--metrics.every", "1"]
    began = time.time()
    _run(["-m", "titan.launch", *words], {"NPROC": str(case.ranks)})
    (first, *_) = (folder / "titan" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(first)["time"]) - began


def _torchtitan(case: Case, folder: Path) -> float:
    asked = json.dumps(case.asked(folder))
    began = time.time()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
    _run([*torchrun, "-m", "bench.startup", "--torchtitan", asked], {})
    return float((folder / "ended").read_text()) - began


def _run(words: list[str], more: dict[str, str]) -> None:
    environment = {**os.environ, **more}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {' '.join(words)}\n{done.stderr[-2000:]}")


def _first_step(asked: dict[str, object]) -> None:
    """A rank of torchtitan: one step of its Trainer; rank 0 leaves the time."""
    opponent.accept_cpu()
    share_cores(int(str(asked["ranks"])))
    trainer = opponent.trainer_of(asked)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    if os.environ["RANK"] == "0":
        Path(str(asked["folder"]), "ended").write_text(str(time.time()))
    os._exit(0)


if __name__ == "__main__":
    main()
