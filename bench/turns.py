"""Tensor-parallel steps of titan and of torchtitan 0.2.2, in turns in the same CPU ranks.

    python -m bench.turns [--tp 2] [--steps 20]

Both train the model of bench/overhead.toml in fp32, eager, with sequence parallelism and a vocabulary-parallel loss, on
8 x 512 tokens per step, which the arithmetic takes most of, and on 1 x 128, where the host's share is large. Prints the
ratios of the median steps and writes all samples under bench/results. Needs torchtitan 0.2.2 and what it imports: tyro,
datasets, tokenizers, einops, triton.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from bench import results
from bench.gpu import jobs, opponent
from titan.config import Job, load_job
from titan.ranks import process
from titan.ranks.meeting.rendezvous import listen
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
WARM_UP = 3
SHAPES = ((8, 512), (1, 128))
"""Sequences per step, and their tokens."""

WORDS, TOKENS = 4096, 1 << 19


def main() -> None:
    """Start the ranks, print the ratio, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks, all of them tensor-parallel")
    parser.add_argument("--steps", type=int, default=20, help=f"pairs of measured steps, after {WARM_UP} pairs")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)  # folder, sequences, tokens
    args = parser.parse_args()
    if args.rank_of:
        folder, sequences, seq_len = args.rank_of
        _rank(args.tp, args.steps, Path(folder), int(sequences), int(seq_len))
        return
    measured = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            samples = _in_turns(args.tp, Path(folder), *shape)
        ours, theirs = (statistics.median(samples[who]) * 1e3 for who in ("titan_s", "torchtitan_s"))
        name = " x ".join(map(str, shape))
        print(f"tp {args.tp}, {name}: titan {ours:.1f} ms, torchtitan {theirs:.1f} ms, speed {theirs / ours:.2f}")
        measured[name] = samples
    print(results.write("turns", {"tp": args.tp, "rows": measured}))


def _in_turns(tp: int, folder: Path, sequences: int, seq_len: int) -> dict[str, list[float]]:
    """Seconds of each step of both trainers, from the ranks that this command starts."""
    jobs.tokens(folder, WORDS, TOKENS)
    with listen(0) as probe:
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [
        sys.executable,
        "-m",
        "bench.turns",
        *sys.argv[1:],
        "--rank-of",
        str(folder),
        str(sequences),
        str(seq_len),
    ]
    ranks = []
    for rank in range(tp):
        own = {key: str(value) for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(subprocess.Popen(command, env={**os.environ, **own}))
    if any([rank.wait() for rank in ranks]):
        sys.exit("a rank failed")
    found: dict[str, list[float]] = json.loads((folder / "samples.json").read_text())
    return found


def _rank(tp: int, steps: int, folder: Path, sequences: int, seq_len: int) -> None:
    torch.set_num_threads(1)
    keys = {
        "run.dir": folder,
        "mesh.tp": tp,
        "model.vocab_size": WORDS,
        "tokenizer.name": "byte",
        "data.name": "shards",
        "data.path": jobs.tokens(folder, WORDS, TOKENS),
        "data.seq_len": seq_len,
        "train.global_batch_size": sequences,
    }
    job = load_job(CONFIG, [word for key, value in keys.items() for word in (f"--{key}", str(value))], tp)
    run = build.build(job, process.join(job))
    batches = iter(run.loader)
    turns: dict[str, Callable[[], object]] = {
        "titan_s": lambda: float(trainer.step(run, next(batches)).grad_norm),
        "torchtitan_s": _torchtitan(job, tp, folder),
    }
    taken: dict[str, list[float]] = {who: [] for who in turns}
    for number in tqdm(range(steps + WARM_UP), disable=None if dist.get_rank() == 0 else True):
        for who, step in turns.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if number >= WARM_UP:
                taken[who].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "samples.json").write_text(json.dumps(taken))
    dist.barrier()
    os._exit(0)  # two trainers share the process groups, and neither expects the other to close them


def _torchtitan(job: Job, tp: int, folder: Path) -> Callable[[], object]:
    """A step of torchtitan's own Trainer, of the same model and on the same tokens."""
    opponent.accept_cpu()
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    theirs = opponent.trainer_of(
        {
            **{name: getattr(job.spec, name) for name in sizes},
            "seq_len": job.data.seq_len,
            "tp": tp,
            "backend": "",
            "batch": job.train.global_batch_size,
            "dtype": "float32",
            "recompute": "none",
            "folder": str(folder),
            "tokens": str(jobs.tokens(folder, WORDS, TOKENS)),
        }
    )
    batches = theirs.batch_generator(theirs.dataloader)
    theirs.step = 2  # neither the first step nor one that is logged
    return lambda: theirs.train_step(batches)


if __name__ == "__main__":
    main()
