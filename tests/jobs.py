"""The jobs of the repository's own tests, and what their ranks return beside weights; `titan.testing` trains them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan.testing.jobs import JOB, agreed, trained, whole

if TYPE_CHECKING:
    from titan.checkpoint.disk.index import Index

CONFIGS = Path(__file__).parent / "configs"
LLAMA = JOB
GPT, QWEN3, NEOX, OLMO2, MOE, BLOOM, GEMMA = (
    CONFIGS / f"{name}.toml" for name in ("gpt", "qwen3", "neox", "olmo2", "moe", "bloom", "gemma")
)
FOUR_LAYERS = ("--model.n_layers", "4")
"""For schedules with two stages a rank: the jobs have two layers."""
THREE_STEPS = ("--train.steps", "3")
"""Enough for a curve at another layout: a wrong gradient shows in its norm, a wrong update in the next step's loss."""
DECAYING = ("--optimizer.weight_decay", "1")
"""So much that weights after three steps show a decay that is missing: they shrink by 7e-4."""
SAVING = ("--checkpoint.enabled", "true", "--checkpoint.every", "4")


def mesh(**degrees: int) -> list[str]:
    """Words of a command line that set degrees of the mesh."""
    return [word for axis, degree in degrees.items() for word in (f"--mesh.{axis}", str(degree))]


def settings(words: Sequence[str], *keys: str) -> tuple[str, ...]:
    """Of a layout's words those that set one of these keys: what the run is a function of, on one rank too."""
    return tuple(word for at, key in enumerate(words) if key in keys for word in words[at : at + 2])


def run_with_state(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return its weights and its optimizer's state, as NAME.SLOT.

    Copies that two stages of a rank hold are the same bits.
    """
    run = trained(folder, words, config)
    return agreed(
        {name: whole(p.detach())} | {f"{name}.{slot}": whole(value) for slot, value in run.optimizer.state[p].items()}
        for part in run.parts
        for name, p in part.parameters()
    )


def run_with_biases(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job, return the persistent buffers that are biases."""
    run = trained(folder, words, config)
    return {name: b.clone() for part in run.parts for name, b in part.module.named_buffers() if name.endswith("bias")}


def of_each_worker(path: Path, name: str) -> list[Tensor]:
    """What a checkpoint holds of a tensor: that of each worker, or the one that all share."""
    from titan.checkpoint import storage

    index = stored(path)
    entry, found = index.tensors[name], []
    for one in [entry.of(worker) for worker in range(entry.shape[0])] if entry.stacked else [entry]:
        found.append(torch.empty(one.shape, dtype=one.dtype))
        storage.read(path, {name: found[-1]}, replace(index, tensors={name: one}))
    return found


def stored(path: Path) -> "Index":
    """What a checkpoint holds, and where."""
    from titan.checkpoint.disk import index, manifest

    return index.read(path / manifest.INDEX, manifest.data_sizes(manifest.read(path)))
