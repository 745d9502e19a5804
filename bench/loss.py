"""A training step with the logits of some tokens at a time against one with all of a micro batch's, in turns.

    python -m bench.loss [--steps 8]

Both are titan's step of one and the same run, on the CPU with one thread: llama of bench/overhead.toml, 8 x 512 tokens,
with 32,000 words. Prints the ratio of the median steps and of what they held at most, and writes all samples under
bench/results. Reads /proc and needs glibc: Linux alone.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.gpu import jobs
from bench.peak import forget_peak, peak_mib
from titan.config import load_job
from titan.contracts import Loss
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.ranks import process
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
WORDS, TOKENS, WARM_UP = 32_000, 1 << 18, 1
MEMORY, CPU_TIME = 0.7, 1.03
"""Most of the memory and of the CPU time of all logits that chunks may take."""

MICRO_BATCH = 8 * 512
"""Tokens."""


def main() -> None:
    """Train in turns, print the ratios, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=8, help=f"pairs of measured steps, after {WARM_UP} pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    losses: dict[str, Loss] = {
        "all logits": CrossEntropy(Config(chunk_tokens=MICRO_BATCH)),
        "in chunks": CrossEntropy(Config()),
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = _in_turns(losses, args.steps, Path(folder))
    whole, chunks = (rows[name] for name in losses)
    for key, unit in (("wall_s", "s"), ("cpu_s", "s"), ("peak_gib", "GiB")):
        one, other = (statistics.median(row[key]) for row in (whole, chunks))
        print(f"{key}: all logits {one:.2f} {unit}, in chunks {other:.2f} {unit}, ratio {other / one:.3f}")
    print(results.write("loss", {"words": WORDS, "tokens": MICRO_BATCH, "rows": rows}))


def figures(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(what, target, measured, whether it is met) of a result."""
    whole, chunks = found["rows"].values()
    asked = (("peak memory", "peak_gib", MEMORY), ("CPU time", "cpu_s", CPU_TIME))
    shares = [(what, most, statistics.median(chunks[key]) / statistics.median(whole[key])) for what, key, most in asked]
    return [
        (f"loss in chunks, {found['words']:,} words: {what}", f"at most {most}", f"{share:.2f}", share <= most)
        for what, most, share in shares
    ]


def _in_turns(losses: dict[str, Loss], steps: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Of each loss, per step: seconds on the clock and of the CPU, and the most memory of the process, in GiB."""
    keys = {
        "run.dir": folder,
        "model.vocab_size": WORDS,
        "tokenizer.name": "byte",
        "data.name": "shards",
        "data.path": jobs.tokens(folder, WORDS, TOKENS),
        "run.device": "cpu",
        "train.global_batch_size": 8,
        "train.micro_batch_size": 8,
    }
    job = load_job(CONFIG, [word for key, value in keys.items() for word in (f"--{key}", str(value))], 1)
    run = build.build(job, process.join(job))
    batches = iter(run.loader)
    taken: dict[str, dict[str, list[float]]] = {
        name: {"wall_s": [], "cpu_s": [], "peak_gib": [], "loss": []} for name in losses
    }
    for number in tqdm(range(WARM_UP + steps), disable=None):
        for name, run.loss._loss in losses.items():
            batch = next(batches)
            began, used = time.perf_counter(), time.process_time()
            loss = float(trainer.step(run, batch).loss)
            ended = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "loss": loss}
            for key, value in ended.items():
                taken[name][key] += [value] * (number >= WARM_UP)
    for name, run.loss._loss in losses.items():  # beside the times: what is given back must be had again
        batch = next(batches)
        forget_peak()
        trainer.step(run, batch)
        taken[name]["peak_gib"].append(peak_mib() / 1024)
    trainer.close(run)
    process.leave()
    return taken


if __name__ == "__main__":
    main()
