"""A sample of the fuzzer's jobs, and faults planted in real runs: none of them gets past the comparator.

Of its first jobs, those on few ranks that have a feature for the first time are tests, the others a sweep. The rest of
the jobs: `python -m tests.fuzz`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.draw import draw
from tests.fuzz.judge import Judge
from tests.sweeps import but_sweep, swept_case
from titan.testing.jobs import Outcome, differences, run_job, train_job

SEED = 2026
JOBS = 11
MOST_RANKS = 4


def _jobs() -> list[Any]:
    """The index of each job, marked as a sweep where it has many ranks, compiles, or brings no new feature."""
    seen, jobs = set(), []
    for index in range(JOBS):
        job = draw(SEED, index)
        compiles = any(feature.startswith("backend ") for feature in job.features)
        new = set() if compiles or job.ranks > MOST_RANKS else job.features - seen
        seen |= new
        jobs.append(index if new else swept_case(index))
    return jobs


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("index", _jobs())
def test_drawn(index: int, judge: Judge) -> None:
    job = draw(SEED, index)
    verdict = judge.judge(job)
    assert verdict.kind != "failed", f"{judge.command(job)}\n{verdict.reason}"


# --- planted faults -----------------------------------------------------------------------------------------------


def gradient_times_tp() -> None:
    from titan.plugins.parallel.tensor import TensorParallel

    split, reduce = TensorParallel.apply, TensorParallel.after_backward
    parts = []

    def noted(self: Any, part: Any, context: Any) -> None:
        parts.append(part)
        split(self, part, context)

    def twice(self: Any) -> None:
        reduce(self)
        for _, parameter in parts[0].parameters():
            parameter.grad *= 2

    TensorParallel.apply, TensorParallel.after_backward = noted, twice


def lost_micro_batch() -> None:
    from titan.training.engine import SequentialEngine

    whole = SequentialEngine.forward_backward
    SequentialEngine.forward_backward = lambda self, batches: whole(self, batches[:-1])


def biased_weight() -> None:
    from titan.training import phases

    init = phases.init_weights

    def biased(part: Any, *more: Any) -> None:
        init(part, *more)
        with torch.no_grad():
            dict(part.parameters())["layers.1.ffn.w2.weight"] += 0.01

    phases.init_weights = biased


def biased_logit() -> None:
    from titan.plugins.losses.cross_entropy import CrossEntropy

    whole = CrossEntropy.of_hidden

    def biased(self: Any, hidden: Tensor, labels: Tensor, project: Any) -> Any:
        def moved(hidden: Tensor) -> Tensor:
            logits: Tensor = project(hidden)
            return logits + 1.0 * (torch.arange(logits.shape[-1]) == 7)

        return whole(self, hidden, labels, replace(project, forward=moved))

    CrossEntropy.of_hidden = biased


def shifted_label() -> None:
    from titan.plugins.losses.cross_entropy import CrossEntropy

    whole = CrossEntropy.of_hidden
    CrossEntropy.of_hidden = lambda self, hidden, labels, project: whole(self, hidden, labels.roll(1, 1), project)


def mean_of_means() -> None:
    from titan.contracts.base.mesh import Mesh
    from titan.training.engine import StepLoss

    add, begin = Mesh.sum, StepLoss.begin
    Mesh.sum = lambda self, tensor, *roles: tensor if tensor.dtype is torch.int64 else add(self, tensor, *roles)
    StepLoss.begin = lambda self, tokens: begin(self, 2 * tokens)


def one_rank_apart() -> None:
    from titan.plugins.parallel.ddp import DistributedDataParallel

    def nudge(self: Any) -> None:
        for parameter in self._roots[0].parameters():
            parameter.grad += 0.01 * dist.get_rank()

    DistributedDataParallel.after_backward = nudge


def _run(plant: Callable[[], None], *arguments: Any) -> dict[str, Tensor]:
    plant()
    return run_job(*arguments)


TP, DDP, FSDP = ("--mesh.tp", "2"), ("--mesh.dp_replicate", "2"), ("--mesh.dp_shard", "2")
ALL = {"loss", "grad_norm", "weights"}
PLANTED: dict[Callable[[], None], tuple[int, tuple[str, ...], set[str]]] = {
    # ranks, layout, and what must tell of it in the first step or at the end
    gradient_times_tp: (2, TP, {"grad_norm"}),  # AdamW hides it from all else
    lost_micro_batch: (1, ("--train.micro_batch_size", "2"), ALL),
    biased_weight: (2, TP, ALL),
    biased_logit: (2, FSDP, ALL),
    shifted_label: (2, FSDP, ALL),
    mean_of_means: (2, DDP, ALL | {"valid_tokens"}),
}
WORDS = ("--train.steps", "3", "--data.packing", "pad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With documents so short and uneven that no two ranks have as many tokens."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number:02}.txt").write_text("the gradient norm"[: 1 + 7 * number % 17])
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Outcome:
    return train_job(folder, 1, *WORDS, name="reference")


@pytest.mark.parametrize("plant", but_sweep(PLANTED, biased_logit, shifted_label), ids=lambda plant: plant.__name__)
def test_planted(plant: Callable[[], None], reference: Outcome, folder: Path) -> None:
    ranks, layout, expected = PLANTED[plant]
    words = (*layout, *WORDS)
    assert not differences(reference, train_job(folder, ranks, *words, name=f"{plant.__name__}-not"))
    found = differences(reference, train_job(folder, ranks, *words, name=plant.__name__, run=partial(_run, plant)))
    telling = {line.split()[2] for line in found if line.startswith("step 1:")}
    telling |= {"weights"} if any("differs by" in line for line in found) else set()
    assert telling == expected, found


def test_replicas_that_drift_apart(folder: Path) -> None:
    with pytest.raises(AssertionError, match="differs between its holders by"):
        train_job(folder, 2, *DDP, *WORDS, name="apart", run=partial(_run, one_rank_apart))
