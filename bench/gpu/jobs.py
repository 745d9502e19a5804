"""Training jobs of the measurements, in this process on one device."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.gpu.setting import Setting, no_garbage
from titan.config import load_job
from titan.contracts.base import mesh
from titan.data.tokens.shards import ShardWriter
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.search.unset_options import settle
from titan.ranks import process
from titan.train import main as train_main
from titan.training import build, trainer

HERE = Path(__file__).parent
PARITY, SPEED = HERE / "parity.toml", HERE / "speed.toml"
PLUGINS = HERE.parents[1] / "tests" / "plugins"
Keys = Mapping[str, object]
Curve = dict[int, dict[str, Any]]
BYTE = 257
"""Ids of the tokenizer `byte`; its last one ends a document."""


def arguments(setting: Setting, name: str, keys: Keys) -> list[str]:
    """The command line of a job called `name`, below the setting's folder."""
    own = {"run.dir": setting.folder / "runs", "run.name": name, "run.device": setting.device.type, **keys}
    return [each for key, value in own.items() for each in (f"--{key}", word(value))]


def word(value: object) -> str:
    """A value as a word of a command line."""
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)


@contextmanager
def open_run(setting: Setting, config: Path, name: str, keys: Keys, ranks: int = 1) -> Iterator[build.Run]:
    """Build the run of a job as `titan.train` does, and close it afterwards.

    ranks: of the job. This process is the first, and the others are faked: a gather copies this rank's own piece into
        each place, and all other collectives leave their results as they were, so the numbers mean nothing.
    """
    setting.free()  # the run before is garbage by now, and not yet while the body of its `with` could still name it
    job, on_gpus = load_job(config, arguments(setting, name, keys), ranks), mesh.ON_GPUS
    rank = process.join(job) if ranks == 1 else _first_of(ranks, setting)
    try:
        least = process.smallest_memory_gib(rank)
        job, chosen = settle(job, None if least is None else DeviceMemory(least))
        print(*chosen, sep="\n", flush=True)
        run = build.build(job, rank)
        try:
            yield run
        finally:
            trainer.close(run)
    finally:
        process.leave()
        mesh.ON_GPUS = on_gpus


def _first_of(ranks: int, setting: Setting) -> process.Rank:
    """The first of these ranks. It is told that it is the only one, as nobody will come whom it could wait for."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh.ON_GPUS = "fake"
    return process.here(setting.device.type)


def train(setting: Setting, name: str, keys: Keys) -> Curve:
    """Train a job of `PARITY` to its end; returns its rows by step."""
    with open_run(setting, PARITY, name, {"checkpoint.resume": "never", **keys}) as run:
        trainer.train(run)
    return rows_of(setting, name)


def start(setting: Setting, name: str, keys: Keys) -> int:
    """Run a job of `PARITY` as the command does, signals included; returns the exit code."""
    try:
        return train_main(["--config", str(PARITY), *arguments(setting, name, keys)])
    finally:
        torch.use_deterministic_algorithms(False)  # a job that asks for them leaves them on
        setting.free()


def rows_of(setting: Setting, name: str) -> Curve:
    """The rows of a run by step."""
    lines = (setting.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if "loss" in row}


def tokens(folder: Path, vocab_size: int, count: int) -> Path:
    """A shard of about `count` seeded tokens, made once: documents of uneven length, small ids more often."""
    path = folder / f"tokens-{vocab_size}-{count}.bin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.Generator(np.random.PCG64(17))
        with ShardWriter(path, vocab_size) as writer:
            while writer.tokens < count:
                length = int(random.integers(16, 16 + min(4096, count // 8)))
                ids = (vocab_size * random.random(length) ** 4).astype(np.int64)
                ids[-1] = BYTE - 1
                writer.add(ids)
    return path


def step_seconds(setting: Setting, run: build.Run, steps: int, warm_up: int = 3) -> list[float]:
    """Seconds of consecutive steps, queued one after the other; the next batch included, no row of metrics."""
    batches = iter(run.loader)
    with no_garbage():
        for _ in range(warm_up):
            trainer.step(run, next(batches))
        return setting.each(lambda: trainer.step(run, next(batches)), steps)


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in any bit, or that only one side has."""
    differ = set(one.keys() ^ other.keys())
    return sorted(differ | {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])})
