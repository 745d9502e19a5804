"""Run whole jobs in tests, on any number of ranks, and compare what they leave behind.

`run_job` is what each rank runs; `train_job` runs it on fresh ranks and gathers the outcome; `assert_same_curve` is the
comparator of the tolerance table (docs/correctness.md), which has tests of its own.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks

if TYPE_CHECKING:
    from titan.checkpoint.disk.index import Index
    from titan.training.build import Run

LLAMA, GPT, QWEN3, NEOX, OLMO2, MOE, BLOOM, GEMMA = (
    Path(__file__).parent / "configs" / f"{name}.toml"
    for name in ("llama", "gpt", "qwen3", "neox", "olmo2", "moe", "bloom", "gemma")
)
SAVING = ("--checkpoint.enabled", "true", "--checkpoint.every", "4")
LOSS_RTOL, NORM_RTOL, WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-4, 1e-4, 1e-6
BOUNDS = {"loss": LOSS_RTOL, "validation_loss": LOSS_RTOL, "grad_norm": NORM_RTOL, "tokens": 0.0, "lr": 1e-12}

SELF_SEND = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether a rank can send to itself with gloo, which the V-shaped schedules do as they start."""


def mesh(**degrees: int) -> list[str]:
    """Words of a command line that set degrees of the mesh."""
    return [word for axis, degree in degrees.items() for word in (f"--mesh.{axis}", str(degree))]


@dataclass
class Outcome:
    """What a run leaves: its rows by step, validation's in them, and its final weights by canonical name."""

    rows: dict[int, dict[str, Any]]
    weights: dict[str, Tensor]


def run_job(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return this rank's weights, whole."""
    run = _trained(folder, words, config)
    return {name: _whole(p.detach()) for part in run.parts for name, p in part.parameters()}


def run_with_state(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """The same with the optimizer's state, as NAME.SLOT; copies that two stages of a rank hold are the same bits."""
    run = _trained(folder, words, config)
    return _agreed(
        {name: _whole(p.detach())} | {f"{name}.{slot}": _whole(value) for slot, value in run.optimizer.state[p].items()}
        for part in run.parts
        for name, p in part.parameters()
    )


def run_with_biases(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return the persistent buffers that are biases."""
    run = _trained(folder, words, config)
    return {name: b.clone() for part in run.parts for name, b in part.module.named_buffers() if name.endswith("bias")}


def _trained(folder: str, words: list[str], config: str) -> "Run":
    from titan.config import load_job
    from titan.ranks import process
    from titan.ranks.launch_env import launched_world_size
    from titan.training import build, trainer

    overrides = ["--run.dir", folder, "--data.cache", f"{folder}/cache", *words]
    job = load_job(Path(config), overrides, launched_world_size())
    run = build.build(job, process.join(job))
    trainer.train(run)
    return run


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().cpu().clone()


def train_job(
    folder: Path,
    world_size: int,
    *words: str,
    config: Path = LLAMA,
    name: str = "run",
    timeout: float = 240.0,
    run: Callable[..., dict[str, Tensor]] = run_job,
) -> Outcome:
    """Train a job on that many ranks, each of which calls `run`, under `folder`/`name`.

    Raises:
        RankError: see `run_ranks`.
        AssertionError: ranks that hold the same weight have other values in it.
    """
    text = folder / "text"
    if not text.exists():
        write_text(text)
    overrides = ["--run.name", name, "--data.path", str(text), *words]
    held = run_ranks(run, world_size, str(folder), overrides, str(config), init=False, timeout=timeout)
    return Outcome(read_rows(folder / name), _agreed(held))


def _agreed(held: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all holders; those that several hold are the same to the last bit."""
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


def stored(path: Path) -> "Index":
    """What a checkpoint holds, and where."""
    from titan.checkpoint.disk import manifest, metadata

    return metadata.read(path, manifest.read(path))


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    from titan.checkpoint import restore
    from titan.checkpoint.ranks import Ranks

    saved = restore.Saved.open(path, Ranks(0, 1))
    tensors = {name: saved.empty(name) for name in saved.tensors}
    saved.read(tensors, Ranks(0, 1))
    return tensors


def differences(reference: Outcome, other: Outcome) -> list[str]:
    """What lies outside the tolerance table, a line each; empty when the curves are the same."""
    found = []
    if reference.rows.keys() != other.rows.keys():
        found.append(f"steps {sorted(reference.rows)} against {sorted(other.rows)}")
    for step in sorted(reference.rows.keys() & other.rows.keys()):
        rows = reference.rows[step], other.rows[step]
        for key in BOUNDS.keys() & (rows[0].keys() | rows[1].keys()):
            ours, theirs = (row.get(key, math.nan) for row in rows)
            if not math.isclose(ours, theirs, rel_tol=BOUNDS[key], abs_tol=0):
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


def deviations(reference: Outcome, other: Outcome) -> dict[str, float]:
    """How far apart they are: loss and grad_norm relatively, at the worst step; weights as a share of their bound."""
    steps = reference.rows.keys() & other.rows.keys()
    found = {
        key: max(_relative(reference.rows[step][key], other.rows[step][key]) for step in steps)
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


def assert_same_curve(reference: Outcome, other: Outcome) -> None:
    """Fail with every difference beyond the tolerance table."""
    found = differences(reference, other)
    assert not found, "\n".join(found)
    assert reference.rows and reference.weights, "nothing was compared"
