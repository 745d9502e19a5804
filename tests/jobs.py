"""Run whole jobs in tests, on any number of ranks, and compare what they leave behind.

`run_job` is what each rank runs; `train_job` runs it on fresh ranks and gathers the outcome; `assert_same_curve` is the
comparator of the tolerance table (docs/correctness.md), which has tests of its own.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks

LLAMA, GPT = (Path(__file__).parent / "configs" / f"{name}.toml" for name in ("llama", "gpt"))
LOSS_RTOL, NORM_RTOL, WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-4, 1e-4, 1e-6


@dataclass
class Outcome:
    """What a run leaves: its rows by step, and its final weights by canonical name."""

    rows: dict[int, dict[str, Any]]
    weights: dict[str, Tensor]


def run_job(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return this rank's weights, whole."""
    from titan import build, ranks, trainer
    from titan.config import load_job

    overrides = ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words]
    job = load_job(Path(config), overrides, ranks.launched_world_size())
    run = build.build(job, ranks.join(job))
    trainer.train(run)
    return {name: _whole(p.detach()) for part in run.parts for name, p in part.parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def train_job(
    folder: Path, world_size: int, *words: str, config: Path = LLAMA, name: str = "run", timeout: float = 240.0
) -> Outcome:
    """Train a job on that many ranks under `folder`/`name`."""
    text = folder / "text"
    if not text.exists():
        write_text(text)
    overrides = ["--run.name", name, "--data.path", str(text), *words]
    weights: dict[str, Tensor] = {}
    for held in run_ranks(run_job, world_size, str(folder), overrides, str(config), init=False, timeout=timeout):
        weights |= held
    return Outcome(read_rows(folder / name), weights)


def write_text(folder: Path) -> None:
    """A few kilobytes of text in documents of uneven length, the same on every machine."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    words = "the a model trains on many ranks and its loss falls while the gradient norm stays small".split()  # noqa: SIM905
    for number in range(12):
        count = int(torch.randint(20, 400, (1,), generator=generator))
        picks = torch.randint(len(words), (count,), generator=generator).tolist()
        (folder / f"{number:02}.txt").write_text(" ".join(words[i] for i in picks) + ".\n")


def read_rows(run: Path) -> dict[int, dict[str, Any]]:
    """The training rows of a run by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "loss" in row}


def differences(reference: Outcome, other: Outcome) -> list[str]:
    """What lies outside the tolerance table, a line each; empty when the curves are the same."""
    found = []
    if reference.rows.keys() != other.rows.keys():
        found.append(f"steps {sorted(reference.rows)} against {sorted(other.rows)}")
    for step in reference.rows.keys() & other.rows.keys():
        for key, rtol in (("loss", LOSS_RTOL), ("grad_norm", NORM_RTOL), ("tokens", 0.0), ("lr", 1e-12)):
            ours, theirs = reference.rows[step][key], other.rows[step][key]
            if not math.isclose(ours, theirs, rel_tol=rtol, abs_tol=0):
                found.append(f"step {step}: {key} {ours} against {theirs}")
    if reference.weights.keys() != other.weights.keys():
        found.append(f"parameters differ: {sorted(reference.weights.keys() ^ other.weights.keys())}")
    for name in reference.weights.keys() & other.weights.keys():
        ours, theirs = reference.weights[name], other.weights[name]
        if ours.shape != theirs.shape:
            found.append(f"{name}: shape {list(ours.shape)} against {list(theirs.shape)}")
        elif not torch.allclose(theirs, ours, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL):
            found.append(f"{name}: differs by {(theirs - ours).abs().max().item():.2e}")
    return found


def assert_same_curve(reference: Outcome, other: Outcome) -> None:
    """Fail with every difference beyond the tolerance table."""
    found = differences(reference, other)
    assert not found, "\n".join(found)
    assert reference.rows and reference.weights, "nothing was compared"
