"""Tokens/s of the loader beside those of training, and seconds until the first batch of a loader that resumes.

    python -m bench.data [--steps 10]

The model is that of bench/overhead.toml, 8 x 512 tokens per step, on one rank. In turns: batches of the loader alone,
and a step that has its batch; for each packing that models train on. Then the time from opening the data to the first
batch of a loader that goes on at global sample 10^9, for shards, text and JSON lines. Their tokens are in the cache by
then, as they are where a run resumes. Prints medians and writes all samples under bench/results.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.gpu import jobs
from titan.config import Job, load_job
from titan.data import open as of_job
from titan.data.samples.loader import Loader
from titan.ranks import process
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
PACKINGS = ("concat", "document_mask")
WORDS, TOKENS, SAMPLES = 4097, 1 << 24, 8
"""Ids of the model's vocabulary; tokens of the shard; sequences per step."""

BATCHES = 50
"""Of the loader alone, timed together."""

DOCUMENTS, SENTENCES = 64, 400
"""Of the text: documents, and sentences in each; 1.1 MB."""

RESUMED = 10**9
"""Global sample that a resumed loader begins at."""

LOADER_TARGET = 50.0
"""The loader gives at least this many times the tokens/s of training."""

RESUME_TARGET_S = 1.0
"""Seconds until the first batch of a resumed loader, at most."""

Figure = tuple[str, str, str, bool | None]
"""What is asked, the target, what was measured, and whether that meets the target."""


def main() -> None:
    """Measure the loader, print the figures, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=10, help="turns of each packing, and starts of each dataset")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        found = measure(Path(folder), args.steps)
    for what, target, measured, _ in figures(found):
        print(f"{what}: {measured} ({target})")
    print(results.write("data", found))


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Figure by figure: what was asked of the loader, the target, what was measured, and whether it is met."""
    return [*_speeds(found), *_resumes(found)]


def _speeds(found: Mapping[str, Any]) -> list[Figure]:
    figures: list[Figure] = []
    for packing, taken in found["packings"].items():
        loader, training = (found["tokens_per_step"] / statistics.median(taken[key]) for key in ("batch_s", "step_s"))
        measured = f"{loader / training:.0f} ({loader:,.0f} and {training:,.0f} tokens/s)"
        target, met = f"at least {LOADER_TARGET:g}", loader / training >= LOADER_TARGET
        figures.append((f"loader, relative to training, {packing}", target, measured, met))
    return figures


def _resumes(found: Mapping[str, Any]) -> list[Figure]:
    figures: list[Figure] = []
    for dataset, seconds in found["resume_s"].items():
        middle = statistics.median(seconds)
        measured = f"{middle:.3f} s (slowest {max(seconds):.3f} s)"
        what = f"first batch at global sample {RESUMED:,}, {dataset}"
        figures.append((what, f"at most {RESUME_TARGET_S:g} s", measured, middle <= RESUME_TARGET_S))
    return figures


def measure(folder: Path, steps: int, tokens: int = TOKENS, **keys: object) -> dict[str, Any]:
    """Measure the loader resumed and beside training; returns the samples in seconds.

    tokens: of the shard.  keys: overrides of all jobs, with `__` for each dot.
    """
    shard = {"data.name": "shards", "data.path": jobs.tokens(folder, WORDS, tokens)}
    text, lines = write_texts(folder)
    datasets = {
        "shards": shard,
        "text": {"data.name": "text", "data.path": text},
        "jsonl": {"data.name": "jsonl", "data.path": lines},
    }
    resumed = {name: _resume(_job(folder, {**data, **keys}), steps) for name, data in datasets.items()}
    jobs_of = {packing: _job(folder, {**shard, "data.packing": packing, **keys}) for packing in PACKINGS}
    beside = {packing: _beside(job, steps, packing) for packing, job in jobs_of.items()}
    return {"tokens_per_step": jobs_of[PACKINGS[0]].tokens_per_step, "packings": beside, "resume_s": resumed}


def _job(folder: Path, keys: Mapping[str, object]) -> Job:
    words = {
        "run.dir": folder / "runs",
        "run.device": "cpu",
        "validation.every": 0,
        "tokenizer.name": "byte",
        "train.global_batch_size": SAMPLES,
        "data.cache": folder / "cache",
        "data.prepare_workers": 1,
        **keys,
    }
    return load_job(
        CONFIG, [word for key, value in words.items() for word in (f"--{key.replace('__', '.')}", str(value))], 1
    )


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write the same documents as text and as JSON lines; returns the folder of text and the file of lines."""
    sentence = "The a model reads again and again, in another order each epoch: {}.\n"
    documents = ["".join(sentence.format(n * i) for i in range(SENTENCES)) for n in range(DOCUMENTS)]
    text, lines = folder / "text", folder / "text.jsonl"
    text.mkdir()
    for number, document in enumerate(documents):
        (text / f"{number:03}.txt").write_text(document)
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return text, lines


def _resume(job: Job, starts: int) -> list[float]:
    """Seconds of each start: the data opened, and the first batch read."""
    rank = process.join(job)
    of_job.open_samples(job, rank)  # tokenizes text
    try:
        return [_seconds(lambda: _first_batch(job, rank)) for _ in range(starts)]
    finally:
        process.leave()


def _first_batch(job: Job, rank: process.Rank) -> None:
    samples, _ = of_job.open_data(job, rank)
    loader = Loader(
        samples,
        global_batch=job.train.global_batch_size,
        micro_batch=job.micro_batch,
        first=RESUMED,
        index=0,
        ranks=1,
        workers=job.data.workers,
        device=rank.device,
    )
    next(loader)
    loader.close()


def _beside(job: Job, steps: int, packing: str) -> dict[str, list[float]]:
    """Seconds per batch of the loader, and of steps that have their batch."""
    run = build.build(job, process.join(job))
    taken: dict[str, list[float]] = {"batch_s": [], "step_s": []}
    gc.disable()  # as in training
    try:
        trainer.step(run, next(run.loader))  # starts what reads ahead, and makes the optimizer's state
        for _ in tqdm(range(steps), desc=packing, disable=None):
            taken["batch_s"].append(_seconds(lambda: [next(run.loader) for _ in range(BATCHES)]) / BATCHES)
            batch = next(run.loader)
            taken["step_s"].append(_seconds(lambda: float(trainer.step(run, batch).grad_norm)))  # noqa: B023  called at once
    finally:
        gc.enable()
        trainer.close(run)
        process.leave()
    return taken


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
