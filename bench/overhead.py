"""Measure the trainer's overhead: titan's step against a bare PyTorch loop of the same model, in turn in one process.

    python -m bench.overhead [--steps 20] [--no-start]

Prints the ratio of median tokens/s in fp32, in bf16, and in bf16 with compiled blocks, in the first and the last also
with `[plugins.attention]`; and the seconds from the start of the command to the end of the first step. Writes all
samples under bench/results. Absolute speeds depend on the machine: quote ratios.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.headlines import speeds
from titan.config import Job, load_job
from titan.contracts import Batch, ModelPart
from titan.layers.products import LACKS_BF16
from titan.plugins.attention.cpu_kernel import why_not
from titan.ranks import process
from titan.training import build, trainer
from titan.training.init import init_weights

CONFIG = Path(__file__).parent / "overhead.toml"
HEAD_DIM = 32
LEAST = 1.0
"""Speed over the bare loop to reach in each case."""

BF16 = ("--plugins.bf16.enabled", "true")
COMPILED = (*BF16, "--plugins.compile.enabled", "true")
OWN_KERNEL = ("--plugins.attention.backend", "cpu")
CASES: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "fp32, [plugins.attention]": OWN_KERNEL,
    "bf16": BF16,
    "bf16, compiled": COMPILED,
    "bf16, compiled, [plugins.attention]": (*COMPILED, *OWN_KERNEL),
}
"""What titan is given; the bare loop has the same precision, and compiles each block where titan does."""

SEQUENCES = {"fp32": 8, "fp32, [plugins.attention]": 8}
"""Of 512 tokens per step, if not 1: where the CPU lacks bf16, a bare loop takes seconds for each of them."""


def main() -> None:
    """Measure both loops and the start-up time, print ratios, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=20, help="pairs of measured steps, after two warm-up pairs")
    parser.add_argument("--no-start", action="store_true", help="do not measure the start-up time")
    args = parser.parse_args()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, words in CASES.items():
            if set(OWN_KERNEL) <= set(words) and why_not(torch.device("cpu"), _dtype(case), HEAD_DIM):
                continue
            measured[case] = _compare(case, args.steps, folder)
        if not args.no_start:
            measured["start_s"] = [_start(folder, number) for number in range(3)]
    for case, (bare, ours, ratio) in speeds(measured).items():
        print(f"{case}: bare {bare:.0f} tokens/s, titan {ours:.0f}, ratio {ratio:.3f}")
    if not args.no_start:
        print(f"start to end of the first step: {statistics.median(measured['start_s']):.1f} s (median of 3)")
    print(results.write("overhead", measured))


def figures(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(what, target, measured, whether it is met) of a result."""
    ratios = {case: ratio for case, (_, _, ratio) in speeds(found).items()}
    return [
        (f"{case}: step, speed over a bare loop", f"at least {LEAST}", f"{ratio:.2f}", ratio >= LEAST)
        for case, ratio in ratios.items()
    ]


def _dtype(case: str) -> torch.dtype:
    return torch.bfloat16 if case.startswith("bf16") else torch.float32


def _compare(case: str, steps: int, folder: str) -> dict[str, Any]:
    sequences = SEQUENCES.get(case, 1 if LACKS_BF16 else 8)
    batch_size = ("--train.global_batch_size", str(sequences), "--train.micro_batch_size", str(sequences))
    job = load_job(CONFIG, ["--run.dir", folder, *batch_size, *CASES[case]], 1)
    rank = process.join(job)
    run = build.build(job, rank)
    batches = iter(run.loader)
    bare = bare_loop(job, rank.device, bf16=_dtype(case) is torch.bfloat16, compiled="compiled" in case)

    def ours(batch: list[Batch]) -> None:
        float(trainer.step(run, batch).grad_norm)

    samples: dict[str, list[float]] = {"bare_s": [], "titan_s": []}
    for number in tqdm(range(steps + 2), desc=case, disable=None):
        batch = next(batches)
        for who, step in (("bare_s", bare), ("titan_s", ours)):
            began = time.perf_counter()
            step(batch)
            if number >= 2:
                samples[who].append(time.perf_counter() - began)
    trainer.close(run)
    process.leave()
    return {"tokens": sequences * job.data.seq_len, **samples}


def bare_loop(job: Job, device: torch.device, *, bf16: bool, compiled: bool) -> Callable[[list[Batch]], None]:
    """The loop a researcher would write for this model on one device; compiled: block by block."""
    with torch.device(device):
        model = job.model.build()
    part = ModelPart(model)
    init_weights(part, job.spec, job.run.seed)
    if compiled:
        for _, layer in part.layers(job.spec):
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    lower = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()

    def step(batch: list[Batch]) -> None:
        for micro in batch:
            with lower:
                logits = model(micro.tokens, micro.positions)
                loss = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten())
            loss.backward()
        float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _start(folder: str, number: int) -> float:
    """Seconds from starting the command to the end of its first step."""
    name = f"start{number}"
    began = time.time()
    words = ["--config", str(CONFIG), "--run.dir", folder, "--run.name", name, "--train.steps", "1"]
    subprocess.run([sys.executable, "-m", "titan.launch", *words], check=True, capture_output=True)
    row = json.loads((Path(folder) / name / "metrics.jsonl").read_text().partition("\n")[0])
    return float(row["time"]) - began


if __name__ == "__main__":
    main()
