"""Train whole jobs in tests, on any number of ranks of this machine, and compare what they leave behind.

    one = train_job(tmp_path, 1)
    two = train_job(tmp_path, 2, "--mesh.dp_shard", "2", name="two")
    assert_same_curve(one, two)

`run_job` is what each rank runs; `train_job` runs it on fresh ranks and gathers the outcome; `assert_same_curve` is the
comparator of the tolerance table (docs/correctness.md).
"""

import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.testing.ranks import run_ranks

if TYPE_CHECKING:
    from titan.training.build import Run

JOB = Path(__file__).with_name("llama.toml")
"""A llama of two layers over bytes: six steps of eight sequences of 16 tokens, in fp32."""

LOSS_RTOL, NORM_RTOL, WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-4, 1e-4, 1e-6
BOUNDS = {"loss": LOSS_RTOL, "validation_loss": LOSS_RTOL, "grad_norm": NORM_RTOL, "lr": 1e-12}
BOUNDS |= dict.fromkeys(("tokens", "valid_tokens"), 0.0)
"""Key of a row -> largest relative difference, in fp32 on CPU."""


@dataclass
class Outcome:
    """What a run leaves.

    rows: step -> the row of metrics.jsonl, with what validation has added.
    weights: canonical name -> final parameter, whole, float32 on the CPU.
    folder: of the run; holds metrics.jsonl, config.toml, logs and checkpoints.
    """

    rows: dict[int, dict[str, Any]]
    weights: dict[str, Tensor]
    folder: Path = Path()

    @property
    def loss(self) -> list[float]:
        """The loss of each step, in order."""
        return [self.rows[step]["loss"] for step in sorted(self.rows)]

    @property
    def grad_norm(self) -> list[float]:
        """The global gradient norm before clipping of each step, in order."""
        return [self.rows[step]["grad_norm"] for step in sorted(self.rows)]


# --- training -----------------------------------------------------------------------------------------------------


def train_job(
    folder: Path,
    ranks: int,
    *words: str,
    config: Path = JOB,
    name: str = "run",
    timeout: float = 240.0,
    run: Callable[..., dict[str, Tensor]] | None = None,
) -> Outcome:
    """Train a job on gloo ranks of this machine, and return what it leaves.

    Args:
        folder: where the text, the cache of tokens and the run are made; any folder, such as pytest's `tmp_path`. A
            second job in it reads the same text, and resumes the first where both have one name and save checkpoints.
        ranks: processes; the product of all mesh degrees.
        words: overrides as on the command line, "--mesh.tp", "2".
        config: TOML of the job.
        name: of the run, and so of its folder.
        timeout: longest run in seconds.
        run: what each rank calls instead of `run_job`, and returns tensors by name, equal where several ranks have one.

    Raises:
        RankError: a rank raised, died or hung; holds its traceback or stacks, and what it printed.
        AssertionError: ranks that hold the same weight have other values in it.
    """
    text = folder / "text"
    if not text.exists():
        write_text(text)
    overrides = ["--run.name", name, "--data.path", str(text), *words]
    held = run_ranks(run or run_job, ranks, str(folder), overrides, str(config), init=False, timeout=timeout)
    return Outcome(read_rows(folder / name), agreed(held), folder / name)


@functools.cache
def one_rank(*words: str, config: Path = JOB) -> Outcome:
    """The outcome of a job on one rank, trained once per process: what other layouts are compared with.

    Its folder is gone; rows and weights stay.
    """
    with tempfile.TemporaryDirectory(prefix="one-rank-") as folder:
        return train_job(Path(folder), 1, *words, config=config)


def run_job(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return this rank's weights, whole."""
    run = trained(folder, words, config)
    return {name: whole(p.detach()) for part in run.parts for name, p in part.parameters()}


def trained(folder: str, words: list[str], config: str) -> "Run":
    """On one rank: build the job, run all of its steps, and return the run."""
    # Here: the process of a test trains nothing, and need not wait for these imports.
    from titan.config import load_job
    from titan.ranks import process
    from titan.ranks.meeting.launch_env import launched_world_size
    from titan.training import build, trainer

    overrides = ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words]
    job = load_job(Path(config), overrides, launched_world_size())
    run = build.build(job, process.join(job))
    trainer.train(run)
    return run


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards, in float32 on the CPU. A collective where it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().cpu().clone()


def agreed(held: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all holders.

    Raises:
        AssertionError: several hold one, and its values are not the same to the last bit.
    """
    weights: dict[str, Tensor] = {}
    for own in held:
        for name, tensor in own.items():
            first = weights.setdefault(name, tensor)
            same = torch.allclose(first, tensor, rtol=0, atol=0, equal_nan=True)
            assert same, f"{name} differs between its holders by {(first - tensor).abs().max().item():.2e}"
    return weights


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
    """The rows of a run by step: of training, with what validation has added."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return {step: row for step, row in rows.items() if "loss" in row}


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint (RUN/checkpoints/step-N), whole: model.NAME, optimizer.NAME.SLOT, and the rest.

    What a technique's `state_dict` returns is in rest.techniques.PLUGIN.KEY.
    """
    from titan.checkpoint import restore
    from titan.checkpoint.ranks import Ranks

    saved = restore.Saved.open(path, Ranks(0, 1))
    tensors = {name: saved.empty(name) for name in saved.tensors}
    saved.read(tensors, Ranks(0, 1))
    return tensors


# --- comparing ----------------------------------------------------------------------------------------------------


def assert_same_curve(reference: Outcome, other: Outcome) -> None:
    """Assert that two runs have the same loss and gradient norm at each step, and the same weights at the end.

    Within the fp32 table of docs/correctness.md: loss to 1e-5, gradient norm to 1e-4, weights to 1e-4 and 1e-6
    absolutely; tokens and steps are equal. That ranks of one run agree with each other, `train_job` has asserted.

    Raises:
        AssertionError: with every difference beyond the table, a line each.
    """
    found = differences(reference, other)
    assert not found, "\n".join(found)
    assert reference.rows and reference.weights, "nothing was compared"


def differences(reference: Outcome, other: Outcome, rows_only: Mapping[str, float] | None = None) -> list[str]:
    """What lies outside the tolerance table, a line each; empty when the curves are the same.

    rows_only: bounds of another precision, in place of those of `BOUNDS`; weights are not compared then.
    """
    found, bounds = [], {**BOUNDS, **(rows_only or {})}
    if reference.rows.keys() != other.rows.keys():
        found.append(f"steps {sorted(reference.rows)} against {sorted(other.rows)}")
    for step in sorted(reference.rows.keys() & other.rows.keys()):
        rows = reference.rows[step], other.rows[step]
        for key in bounds.keys() & (rows[0].keys() | rows[1].keys()):
            ours, theirs = (_finite(row.get(key, math.nan)) for row in rows)
            if not math.isclose(ours, theirs, rel_tol=bounds[key], abs_tol=0):
                found.append(f"step {step}: {key} {ours} against {theirs}")
    if rows_only is not None:
        return found
    if reference.weights.keys() != other.weights.keys():
        found.append(f"parameters differ: {sorted(reference.weights.keys() ^ other.weights.keys())}")
    for name in reference.weights.keys() & other.weights.keys():
        mine, its = reference.weights[name], other.weights[name]
        if mine.shape != its.shape:
            found.append(f"{name}: shape {list(mine.shape)} against {list(its.shape)}")
        elif not torch.allclose(its, mine, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL):
            found.append(f"{name}: differs by {(its - mine).abs().max().item():.2e}")
    return found


def _finite(value: float | None) -> float:
    """A number of a row, in which null stands for one that is not finite."""
    return math.inf if value is None else value


def deviations(reference: Outcome, other: Outcome) -> dict[str, float]:
    """How far apart they are: loss and grad_norm relatively, at the worst step; weights as a share of their bound."""
    steps = reference.rows.keys() & other.rows.keys()
    found = {
        key: max(_relative(_finite(reference.rows[step][key]), _finite(other.rows[step][key])) for step in steps)
        for key in ("loss", "grad_norm")
    }
    moved = [
        ((other.weights[name] - ours).abs() / (WEIGHT_ATOL + WEIGHT_RTOL * ours.abs())).max().item()
        for name, ours in reference.weights.items()
    ]
    return {**found, "weights": max(moved)}


def _relative(reference: float, other: float) -> float:
    if other == reference:
        return 0.0
    return abs(other / reference - 1) if reference else math.inf
