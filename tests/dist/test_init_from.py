"""A run that starts from given weights has one curve, whatever the layout and the format they come in."""

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import FOUR_LAYERS, GPT, LLAMA, SAVING, mesh, run_with_state
from tests.sweeps import swept_case
from titan import cli
from titan.testing.jobs import Outcome, assert_same_curve, read_rows, train_job

STEPS = (*FOUR_LAYERS, "--train.steps", "3")


def start(folder: Path, config: Path) -> tuple[Path, Outcome]:
    """Hugging Face folder of a model trained for two steps, which no other run begins with, and a run on one rank."""
    run = train_job(
        folder, 1, *SAVING, *FOUR_LAYERS, "--train.steps", "2", "--run.seed", "5", config=config, name="before"
    )
    assert len(run.rows) == 2
    words = ("--from", str(folder / "before"), "--output", str(folder / "hf"), "--format", "hf", "--shard-size", "2e-5")
    assert cli.main(["convert", *words]) == 0
    assert len(list((folder / "hf").glob("*.safetensors"))) > 2
    return folder / "hf", train_job(folder, 1, *STEPS, "--checkpoint.init_from", str(folder / "hf"), config=config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    return start(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    return start(tmp_path_factory.mktemp("gpt"), GPT)


def test_the_first_loss_is_that_of_the_weights(llama: tuple[Path, Outcome], tmp_path: Path) -> None:
    given, curve = llama
    drawn = train_job(tmp_path, 1, *STEPS, "--train.steps", "1")
    assert abs(curve.rows[1]["loss"] - drawn.rows[1]["loss"]) > 0.01
    saved = given.parent / "before"
    assert_same_curve(curve, train_job(tmp_path, 1, *STEPS, "--checkpoint.init_from", str(saved), name="kept"))


@pytest.mark.parametrize(
    "degrees",
    [swept_case({"dp_shard": 2}), {"tp": 2}, {"pp": 2}, swept_case({"dp_shard": 2, "tp": 2, "pp": 2})],
    ids=" ".join,
)
def test_llama_on_layouts(degrees: dict[str, int], llama: tuple[Path, Outcome], tmp_path: Path) -> None:
    given, curve = llama
    assert_same_curve(curve, train_on(degrees, given, tmp_path))


def test_gpt_s_joined_and_transposed_tensors(gpt: tuple[Path, Outcome], tmp_path: Path) -> None:
    given, curve = gpt
    assert_same_curve(curve, train_on({"dp_shard": 2, "tp": 2}, given, tmp_path, config=GPT))


@pytest.mark.parametrize("kind", ["hf", "before"])
def test_both_copies_of_a_tied_head_on_one_rank(kind: str, gpt: tuple[Path, Outcome], tmp_path: Path) -> None:
    """A V-shaped schedule puts the first and the last stage on one rank."""
    given, curve = gpt
    words = ("--plugins.pipeline.schedule", "ZBVZeroBubble")
    found = train_on({"pp": 2}, given.parent / kind, tmp_path, *words, config=GPT, run=run_with_state)
    weights = {name: found.weights[name] for name in curve.weights}
    assert_same_curve(curve, Outcome(found.rows, weights))


def train_on(degrees: dict[str, int], given: Path, folder: Path, *words: str, **more: Any) -> Outcome:
    init_from = ("--checkpoint.init_from", str(given))
    return train_job(folder, 2 ** len(degrees), *mesh(**degrees), *words, *STEPS, *init_from, **more)


def test_a_run_that_has_begun_goes_on_with_its_own(llama: tuple[Path, Outcome], tmp_path: Path) -> None:
    given, _ = llama
    words = (*SAVING, "--checkpoint.init_from", str(given))
    train_job(tmp_path, 1, *words, *STEPS, "--train.steps", "2")
    train_job(tmp_path, 1, *words, *STEPS)
    assert list(read_rows(tmp_path / "run")) == [1, 2, 3]
    told = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"weights: from HF folder {given}\n" in told
    assert "step 2; checkpoint.init_from is ignored, because the run has a checkpoint\n" in told
