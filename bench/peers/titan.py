"""titan, for `bench.peers`: its own training loop."""

import json
import sys
from typing import Any

from bench.overhead import CONFIG
from bench.peers.cases import SIZES
from bench.peers.turns import Waiting, share_cores
from titan.config import Job, load_job
from titan.ranks import process
from titan.training import build, trainer

AXES = {"dp": "dp_shard", "tp": "tp", "pp": "pp"}


def main() -> None:
    """Train until stdin ends."""
    asked = json.loads(sys.argv[1])
    share_cores(asked["ranks"])
    job = job_of(asked)
    run = build.build(job, process.join(job))
    run.loader = _Loader(run.loader)  # type: ignore[assignment]
    trainer.train(run)


def job_of(asked: dict[str, Any]) -> Job:
    """The job of a case."""
    return load_job(CONFIG, words_of(asked)[2:], asked["ranks"])


def words_of(asked: dict[str, Any]) -> list[str]:
    """The command line of a case's job."""
    keys = {
        "config": CONFIG,
        "run.dir": asked["folder"],
        "run.name": "titan",
        "run.device": "cpu",
        "tokenizer.name": "byte",
        "data.name": "shards",
        "data.path": asked["tokens"],
        "data.seq_len": asked["seq_len"],
        "train.global_batch_size": asked["sequences"],
        "train.micro_batch_size": 1 if "pp" in asked else asked["batch"],
        "optimizer.lr": asked["lr"],
        "metrics.every": 1_000_000,
        "checkpoint.enabled": "false",
        **{f"model.{size}": asked[size] for size in SIZES},
        **{f"mesh.{axis}": asked[name] for name, axis in AXES.items() if name in asked},
        "plugins.bf16.enabled": str(asked["dtype"] == "bfloat16").lower(),
        **({"plugins.attention.backend": "cpu"} if "kernel" in asked else {}),
        "plugins.compile.enabled": str(bool(asked["backend"])).lower(),
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


class _Loader:
    """titan's loader, whose batches wait."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(Waiting(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


if __name__ == "__main__":
    main()
