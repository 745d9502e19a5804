"""Tests of the technique example: the suite of the contract, and its arithmetic by what checkpoints hold."""

from pathlib import Path

import pytest
import torch

from titan.testing import Check, checks, saved_tensors, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))
WORDS = (*PLUGINS, "--plugins.example.decay", "0.75", "--checkpoint.enabled", "true")


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="technique"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(("ranks", "layout"), [(1, ()), (2, ("--mesh.dp_shard", "2")), (2, ("--mesh.pp", "2"))])
def test_average(ranks: int, layout: tuple[str, ...], tmp_path: Path) -> None:
    saving = ("--checkpoint.every", "1", "--checkpoint.keep_latest", "4", "--train.steps", "4")
    folder = train_job(tmp_path, ranks, *WORDS, *layout, *saving).folder
    steps = [saved_tensors(path) for path in sorted((folder / "checkpoints").glob("step-*"))]
    averages = [name for name in steps[0] if ".example.weights." in name]
    assert averages and len(steps) == 4
    for name in averages:
        average, parameter = steps[0][name], name.partition(".example.weights.")[2]
        for step in steps[1:]:
            average = 0.75 * average + 0.25 * step[f"model.{parameter}"]
        torch.testing.assert_close(steps[-1][name], average)
