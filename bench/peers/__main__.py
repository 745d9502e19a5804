"""Steps of titan and of other trainers in turns: the same model, tokens, optimizer and clipping, each in its own loop.

    python -m bench.peers [--steps 6] [--only TEXT] [--list]

One rank, in fp32 and in bf16 with compilation, where a CPU without bf16 takes one sequence per step: a bare PyTorch
loop, torchtitan, Hugging Face's Trainer and LitGPT. Two ranks, in fp32: torchtitan with FSDP, tensor parallelism and a
pipeline (1F1B, 4 micro batches). titan takes part twice, without and with its attention kernel (`[plugins.attention]`),
where the CPU has AVX2. Each rank is a process of its own; while one trainer takes a step, all others wait. Prints the
ratio of median step times, and the most memory that a rank has held. Writes all samples under bench/results. Linux
only.

Trainers that are not installed are left out, and said. All of them, where LitGPT needs NumPy 1 and so an older pyarrow:
    pip install transformers accelerate litgpt torchtitan==0.2.2 tyro datasets 'pyarrow<26' tokenizers einops triton
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.peers import KERNEL, OURS
from bench.peers.cases import CASES, SEQ_LEN, SIZES, Case
from bench.peers.turns import Trainer
from titan.plugins.attention.cpu_kernel import why_not

NEEDS: Mapping[str, tuple[str, ...]] = {
    OURS: (),
    KERNEL: (),
    "bare": (),
    "torchtitan": ("torchtitan", "tyro", "datasets", "tokenizers", "einops", "triton"),
    "huggingface": ("transformers", "accelerate"),
    "litgpt": ("litgpt",),
}
"""Trainer -> packages that it needs; but for titan's second one, each is a module of this package."""

ON_SEVERAL_RANKS = (OURS, KERNEL, "torchtitan")
WARM_UP = 2
HEAD_DIM = SIZES["dim"] // SIZES["n_heads"]


def main() -> None:
    """Measure all cases, print ratios, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=6, help=f"measured steps of each trainer, after {WARM_UP}")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--list", action="store_true", help="print the cases and their trainers, measure nothing")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.only in case.name]
    if not chosen:
        parser.error(f"--only {args.only}: no case has this in its name; they are {', '.join(c.name for c in CASES)}")
    if args.list:
        for case in chosen:
            print(f"{case.name}: {', '.join(trainers_of(case))}")
        return
    absent = {name: [each for each in needed if find_spec(each) is None] for name, needed in NEEDS.items()}
    for name, packages in absent.items():
        if packages:
            print(f"{name} is left out: no {', '.join(packages)}; `python -m bench.peers --help` has what to install")
    measured = {}
    for case in chosen:
        names = [name for name in trainers_of(case) if not absent[name]]
        measured[case.name] = _measure(case, names, args.steps)
        print("\n".join(lines(case.name, measured[case.name])))
    if not args.only:
        found = {
            "steps": args.steps,
            "versions": versions(),
            "tokens": {case.name: case.sequences * SEQ_LEN for case in chosen},
            "rows": measured,
        }
        print(results.write("peers", found))


def trainers_of(case: Case) -> list[str]:
    """Who is compared in a case."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    kernel = not why_not(torch.device("cpu"), dtype, HEAD_DIM)
    everyone = [name for name in NEEDS if name != KERNEL or kernel]
    return everyone if case.ranks == 1 else [name for name in everyone if name in ON_SEVERAL_RANKS]


def lines(case: str, rows: Mapping[str, Any]) -> list[str]:
    """A line per trainer: seconds, speed of titan over it, memory of a rank."""
    own = median(rows[OURS]["seconds"])
    return [
        f"{case}: {name} {(took := median(row['seconds'])):.2f} s, speed of titan over it {took / own:.2f}, "
        f"{row['peak_gib']:.2f} GiB"
        for name, row in rows.items()
    ]


def versions() -> dict[str, str]:
    """Of the trainers that are installed, and of the system."""
    found = {"system": platform.platform()}
    for name in ("torchtitan", "transformers", "accelerate", "litgpt"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _measure(case: Case, names: list[str], steps: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        trainers: dict[str, Trainer] = {}
        try:
            for name in names:
                below = Path(folder) / name
                below.mkdir()
                module, asked = (OURS, {"kernel": True}) if name == KERNEL else (name, {})
                trainers[name] = Trainer(f"bench.peers.{module}", {**case.asked(below), **asked}, case.ranks)
                trainers[name].seconds()  # it is ready; others that start would take its cores
            for number in tqdm(range(steps + WARM_UP), desc=case.name, disable=None):
                for name, trainer in trainers.items():
                    trainer.go()
                    seconds = trainer.seconds()
                    if number >= WARM_UP:
                        rows[name]["seconds"].append(seconds)
            for name, trainer in trainers.items():
                rows[name]["peak_gib"] = trainer.peak_gib()
        finally:
            for trainer in trainers.values():
                trainer.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
