"""The average of the weights: the recurrence, one average at any layout, through resumes, and used by the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands import run_titan
from tests.jobs import LLAMA, MOE, SAVING, mesh
from tests.sweeps import sweep_but
from titan.testing.jobs import WEIGHT_ATOL, WEIGHT_RTOL, saved_tensors, train_job

EMA = ("--plugins.ema.decay", "0.5", "--optimizer.lr", "1e-3")
TRAINED, AVERAGED = "model.", "rest.techniques.ema.weights."
EACH_STEP = ("--checkpoint.enabled", "true", "--checkpoint.every", "1", "--checkpoint.keep_latest", "0")
LAYOUTS = {
    "hsdp 2x2": (4, mesh(dp_replicate=2, dp_shard=2), LLAMA),
    "ddp 2": (2, mesh(dp_replicate=2), LLAMA),
    "dp_shard 2, zero 1": (2, [*mesh(dp_shard=2), "--plugins.fsdp.zero_stage", "1"], LLAMA),
    "dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2), LLAMA),
    "tied, pp 2": (2, [*mesh(pp=2), "--model.tied", "true"], LLAMA),
    "ep 2, tp 2": (4, mesh(dp_shard=2, ep=2, tp=2), MOE),
}


def weights(folder: Path, step: int, begin: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin so, without that."""
    tensors = saved_tensors(folder / "checkpoints" / f"step-{step:08}")
    return {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL)


def test_the_recurrence(tmp_path: Path) -> None:
    """From the initial weights, which a rate of almost nothing leaves as they were; d is 2/11, 3/12, and then 0.3."""
    still = ("--optimizer.lr", "1e-30", "--train.steps", "1", *EACH_STEP)
    train_job(tmp_path, 1, *still, name="still")
    train_job(tmp_path, 1, "--plugins.ema.decay", "0.3", "--train.steps", "4", *EACH_STEP)
    average = weights(tmp_path / "still", 1, TRAINED)
    for step, decay in enumerate((2 / 11, 3 / 12, 0.3, 0.3), 1):
        trained = weights(tmp_path / "run", step, TRAINED)
        average = {name: decay * average[name] + (1 - decay) * trained[name] for name in trained}
        assert_close(weights(tmp_path / "run", step, AVERAGED), average)


@pytest.mark.parametrize("layout", sweep_but(LAYOUTS, "dp_shard 2, zero 1", "tied, pp 2"))
def test_one_average_at_any_layout(layout: str, tmp_path: Path) -> None:
    ranks, words, config = LAYOUTS[layout]
    same = (*EMA, *SAVING, "--train.steps", "4", *(words[-2:] if "tied" in layout else ()))
    train_job(tmp_path, 1, *same, config=config, name="one")
    train_job(tmp_path, ranks, *same, *words, config=config, name="many")
    one, many = (weights(tmp_path / name, 4, AVERAGED) for name in ("one", "many"))
    assert_close(many, one)
    moved = weights(tmp_path / "one", 4, TRAINED)
    assert any((moved[name] - average).abs().max() > 1e-4 for name, average in one.items())


def test_resumed_at_another_layout_and_switched_on_late(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *EMA, *SAVING, name="whole")
    train_job(tmp_path, 4, *EMA, *SAVING, *mesh(dp_shard=2, tp=2), "--train.steps", "4", name="halves")
    train_job(tmp_path, 2, *EMA, *SAVING, *mesh(pp=2), name="halves")
    assert_close(weights(tmp_path / "halves", 6, AVERAGED), weights(tmp_path / "whole", 6, AVERAGED))

    train_job(tmp_path, 1, *SAVING, "--train.steps", "4", name="late")
    train_job(tmp_path, 2, *EMA, *EACH_STEP, *mesh(dp_shard=2), "--train.steps", "5", name="late")
    before, after = (weights(tmp_path / "late", step, TRAINED) for step in (4, 5))
    decay = 6 / 15  # of step 5
    average = {name: decay * before[name] + (1 - decay) * after[name] for name in after}
    assert_close(weights(tmp_path / "late", 5, AVERAGED), average)


def test_the_commands_use_it(tmp_path: Path) -> None:
    """`eval` of the average is that of a folder into which it was converted, and not that of the trained weights."""
    train_job(tmp_path, 2, *EMA, *SAVING, *mesh(dp_shard=2), "--optimizer.lr", "3e-2")
    run, text = str(tmp_path / "run"), ["--data", "text", "--path", str(tmp_path / "text")]

    def said(*words: str) -> dict[str, Any]:
        done = run_titan([*words, "--json"], tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    said("convert", "--from", run, "--weights", "ema", "--output", str(tmp_path / "hf"), "--format", "hf")
    said("convert", "--from", run, "--weights", "ema", "--output", str(tmp_path / "kept"), "--format", "titan")
    sources = ((run, "--weights", "ema"), (str(tmp_path / "kept"),))
    asked, converted, trained = (said("eval", "--checkpoint", *words, *text)["loss"] for words in (*sources, (run,)))
    assert asked == converted and abs(asked - trained) > 1e-3
    prompt = ("--prompt", "the model", "--max-new-tokens", "8")
    asked, converted = (said("generate", "--checkpoint", *words, *prompt)["tokens"] for words in sources)
    assert asked == converted

    for source, told in (
        (run, "has no weights of 'tally'; it has those of ema"),
        (str(tmp_path / "hf"), "is no checkpoint of titan's, so it has no weights of 'tally'"),
        (str(tmp_path / "kept"), "has no weights of 'tally'; it has none but those that were trained"),
    ):
        done = run_titan(["eval", "--checkpoint", source, "--weights", "tally", *text], tmp_path)
        assert done.returncode == 2 and told in done.stderr
