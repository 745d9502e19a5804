"""How often token shards are opened at the start of a job and while it trains.

Opens are counted in each rank by Python's audit hook "open", which hears every file that Python code opens, mapped ones
included. The ranks are processes that communicate by gloo. They open the data of a job as `titan train` does and then
take steps of samples, without a model.
"""

import hashlib
import pickle
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from titan.config import load_job
from titan.data.open import open_data
from titan.data.samples.loader import Loader
from titan.data.samples.samples import Samples
from titan.data.samples.stream import MOST_OPEN
from titan.data.tokens.shards import Shard, ShardWriter
from titan.data.tokens.tokenize import SHARD_TOKENS
from titan.ranks import process
from titan.ranks.meeting.launch_env import launched_world_size
from titan.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TOKENS, LENGTH, STEPS, SAMPLES_PER_RANK = 512, 64, 4, 2
"""Of each shard and of each sample; steps, and samples per rank and step."""

LARGE_TOKENS, LARGE_RANKS, LARGE_CONFIG = 1.4e12, 2048, ROOT / "configs" / "llama65b.toml"
FORMERLY = 2
"""Opens per shard and rank at the start in commit cc1bb99, by the same count: in `prepare` and in `Stream`."""


def measure(ranks: int, shards: int) -> dict[str, Any]:
    """Opens per shard on that many ranks of this machine, and by formula for 1.4 T tokens on 2,048 ranks.

    "before" is commit cc1bb99. "at_start" counts what is opened before the first step, "in_4_steps" what steps open.
    "large" adds the opens per step of a run that shuffles, once it has as many shards mapped as it keeps.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), shards)
        words = [
            *("--data.name", "shards", "--data.path", folder, "--data.seq_len", str(LENGTH), "--run.dir", folder),
            *("--train.global_batch_size", str(ranks * SAMPLES_PER_RANK), "--mesh.dp_shard", str(ranks)),
        ]
        found = run_ranks(_opens, ranks, words, init=False)
    return {
        "ranks": ranks,
        "shards": shards,
        "opens_per_shard_at_start": {
            "before": FORMERLY * ranks,
            "after": sum(sum(start.values()) for start, _ in found) / shards,
        },
        "opens_at_start_by_rank": [sum(start.values()) for start, _ in found],
        "opens_in_4_steps_by_rank": [sum(steps.values()) for _, steps in found],
        "formula": {"before": "2 x shards x ranks", "after": "shards"},
        "large": _large(),
    }


def _write(folder: Path, shards: int) -> None:
    for number in range(shards):
        with ShardWriter(folder / f"shard-{number:05}.bin", 257) as writer:
            writer.add([(number + n) % 257 for n in range(TOKENS)])


def _opens(words: list[str]) -> tuple[Counter[str], Counter[str]]:
    """On one rank: opens of each shard before the first step, and in the steps."""
    job = load_job(ROOT / "configs" / "debug.toml", words, launched_world_size())
    rank = process.join(job)
    opened: Counter[str] = Counter()

    def heard(event: str, about: tuple[Any, ...]) -> None:
        if event == "open" and str(about[0]).endswith(".bin"):
            opened.update([str(about[0])])

    sys.addaudithook(heard)
    samples, _ = open_data(job, rank)
    start = opened.copy()
    loader = Loader(
        samples,
        global_batch=job.train.global_batch_size,
        micro_batch=SAMPLES_PER_RANK,
        first=0,
        index=rank.number,
        ranks=rank.world_size,
        workers=0,
        device=rank.device,
    )
    for _ in range(STEPS):
        next(loader)
    return start, opened - start


def _large() -> dict[str, Any]:
    """The counts of a large job. shards: as `titan data prepare` writes them, where files are not smaller than one."""
    job, shards = load_job(LARGE_CONFIG), -int(-LARGE_TOKENS // SHARD_TOKENS)
    read = job.train.global_batch_size * LARGE_RANKS // job.batch_ranks
    return {
        "tokens": LARGE_TOKENS,
        "ranks": LARGE_RANKS,
        "shards": shards,
        "opens_at_start": {"before": FORMERLY * shards * LARGE_RANKS, "after": shards},
        "bytes_sent_to_each_rank": _sent(shards, job.data.seq_len),
        "config": LARGE_CONFIG.name,
        "opens_per_step": round(read * (1 - min(1.0, MOST_OPEN / shards))),
        "formula_per_step": "global_batch_size x ranks / batch ranks x (1 - 128 / shards), shuffled, packing concat",
    }


def _sent(shards: int, seq_len: int) -> int:
    """Bytes of what rank 0 sends: the samples, pickled."""
    folder = Path("/home/someone/.cache/titan", hashlib.sha256(b"").hexdigest()[:32])
    headers = [
        Shard(folder / f"shard-{n:05}.bin", 2, SHARD_TOKENS - n, 90_000 + n, hashlib.sha256(b"%d" % n).hexdigest())
        for n in range(shards)
    ]
    samples = Samples([(headers, 1.0)], seq_len=seq_len, packing="concat", seed=0, shuffle=True, vocab_size=32_000)
    return len(pickle.dumps(samples))
