"""Tokens/s and peak memory of sequences split over ranks by ring, gather and ulysses, against one rank.

    python -m bench.context [--ranks 4] [--steps 5]

Each method has ranks of its own, all of which live through the measurement of a length and take steps in turn, so that
a temporarily slow machine slows all. The model is that of bench/overhead.toml with 4 layers, in fp32 on a CPU; a step
has one sequence. On a CPU, ranks share the cores: one rank computes on all of them, each of several on its share.
Splitting adds no cores, so tokens/s show what it costs there, not what it gains.

Prints a row per length and method and writes all samples under bench/results. With GPUs (one per rank; not tested yet)
the attention kernels of each method are listed too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from bench import results
from bench.gpu import jobs
from bench.headlines import ONE, context_rows
from titan.config import load_job
from titan.ranks import process
from titan.ranks.meeting.rendezvous import listen
from titan.training import build, trainer
from titan.training.metrics import peak_memory_gib

CONFIG = Path(__file__).parent / "overhead.toml"
LENGTHS = (1024, 2048, 4096)
METHODS = (ONE, "ring", "gather", "ulysses")
WARM_UP = 1
WORDS, TOKENS = 4096, 1 << 18
ATTENTION = ("attn", "attention", "flash", "fmha", "softmax")
"""Pieces of the names of kernels that compute attention."""


def main() -> None:
    """Measure all lengths, print a row per length and method, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks that split each sequence")
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps of each method, after {WARM_UP}")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)  # method, folder, length
    args = parser.parse_args()
    if args.rank_of:
        method, folder, length = args.rank_of
        _rank(method, Path(folder), int(length), args.ranks)
        return
    rows = {}
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as name:
            rows[str(length)] = _in_turns(Path(name), length, args.ranks, args.steps)
        for row in context_rows({"rows": {str(length): rows[str(length)]}}):
            print("   ".join(row))
    print(results.write("context", {"ranks": args.ranks, "rows": rows}))


def _in_turns(folder: Path, length: int, ranks: int, steps: int) -> dict[str, dict[str, Any]]:
    """Of each method: seconds of each step, and what its ranks say at the end."""
    jobs.tokens(folder, WORDS, TOKENS)
    groups = {method: _Group(method, folder, length, ranks) for method in METHODS}
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for number in tqdm(range(steps + WARM_UP), desc=f"{length} tokens", disable=None):
        for method, group in groups.items():
            seconds = max(group.ask("step"))
            if number >= WARM_UP:
                taken[method].append(seconds)
    found = {}
    for method, group in groups.items():
        ends = group.ask("end")
        found[method] = {"step_s": taken[method], **{key: [end[key] for end in ends] for key in ends[0]}}
        group.wait()
    return found


class _Group:
    """The ranks of one method, each a process that waits to be told what to do."""

    def __init__(self, method: str, folder: Path, length: int, ranks: int) -> None:
        with listen(0) as probe:
            port = probe.getsockname()[1]
        size = 1 if method == ONE else ranks
        command = [sys.executable, "-m", "bench.context", "--ranks", str(ranks)]
        command += ["--rank-of", method, str(folder), str(length)]
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **{k: str(v) for k, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            )
            for rank in range(size)
        ]

    def ask(self, what: str) -> list[Any]:
        """Tell every rank to do this; their answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(what, file=rank.stdin, flush=True)
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(answers):
            sys.exit("a rank failed")
        return [json.loads(answer) for answer in answers]

    def wait(self) -> None:
        for rank in self._ranks:
            rank.communicate()


def _rank(method: str, folder: Path, length: int, ranks: int) -> None:
    """Build the job of one rank, and do what the lines of stdin say."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no answer
    size = 1 if method == ONE else ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    keys = {
        "run.dir": folder,
        "run.name": method.replace(" ", "-"),
        "model.n_layers": 4,
        "model.vocab_size": WORDS,
        "model.max_seq_len": length,
        "tokenizer.name": "byte",
        "data.name": "shards",
        "data.path": jobs.tokens(folder, WORDS, TOKENS),
        "data.seq_len": length,
        "train.global_batch_size": 1,
        **({} if method == ONE else {"mesh.cp": ranks, "plugins.context.method": method}),
    }
    job = load_job(CONFIG, [word for key, value in keys.items() for word in (f"--{key}", str(value))], size)
    run = build.build(job, process.join(job))
    batches, device = iter(run.loader), run.rank.device
    before = peak_memory_gib(device)

    def step() -> float:
        if size > 1:
            dist.barrier()
        began = time.perf_counter()
        float(trainer.step(run, next(batches)).grad_norm)
        return time.perf_counter() - began

    for line in sys.stdin:
        if line.strip() == "step":
            said: Any = step()
        else:
            said = {"before_gib": before, "peak_gib": peak_memory_gib(device), "kernels": _kernels(step, device)}
        print(json.dumps(said), file=answers, flush=True)
    trainer.close(run)
    process.leave()


def _kernels(step: Any, device: torch.device) -> list[str]:
    """Names of the GPU's kernels of attention in a step; nothing on a CPU."""
    if device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize(device)
    names = {event.name for event in seen.events() or () if event.device_type == torch.autograd.DeviceType.CUDA}
    return sorted(name[:80] for name in names if any(piece in name.lower() for piece in ATTENTION))


if __name__ == "__main__":
    main()
