"""Clipping within the update gives the bits of clipping before it, and the plan knows where which is done."""

from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoints import assert_same
from tests.contract.test_guests import GUESTS
from tests.jobs import mesh
from tests.sweeps import but_sweep
from titan.config import Job
from titan.testing.jobs import train_job, trained, whole

CLIPPED = ("--train.grad_clip", "0.3", "--train.steps", "5")  # in each step
LAYOUTS = {
    "one rank": (1, []),
    "dp 2": (2, mesh(dp_shard=2)),
    "ddp 2": (2, mesh(dp_replicate=2)),
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "groups": (1, ["--optimizer.groups", "[{match = 'head', lr = 1e-3}]"]),
}


def within(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Train, and return the weights; the update must have been given a factor."""
    run = trained(folder, words, config)
    assert not run.job.clips_apart and float(run.optimizer.grad_scale) > 1  # type: ignore[attr-defined]
    return {name: whole(p.detach()) for part in run.parts for name, p in part.parameters()}


def before(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Train with gradients clipped in a pass of their own, and return the weights."""
    Job.clips_apart = True  # type: ignore[assignment, method-assign]
    run = trained(folder, words, config)
    assert not hasattr(run.optimizer, "grad_scale")
    return {name: whole(p.detach()) for part in run.parts for name, p in part.parameters()}


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "ddp 2", "pp 2", "tp 2"))
def test_same_bits_in_the_update_and_before_it(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    runs = [train_job(tmp_path, ranks, *words, *CLIPPED, name=run.__name__, run=run) for run in (within, before)]
    assert runs[0].grad_norm == runs[1].grad_norm and min(runs[0].grad_norm) > 0.3
    assert runs[0].weights
    assert_same(runs[0].weights, runs[1].weights)


def test_a_technique_that_looks_before_the_update_sees_clipped_gradients(tmp_path: Path) -> None:
    seen = (*GUESTS, "--plugins.tally.enabled", "true", "--train.grad_clip", "0.01")
    rows = train_job(tmp_path, 1, *seen, "--train.steps", "3").rows
    assert len(rows) == 3 and all(0 < row["largest_gradient"] <= 0.01 < row["grad_norm"] for row in rows.values())
