"""One CUDA device against the CPU. Run with `pytest -m gpu`; each test also runs with the CPU in the GPU's place."""

from pathlib import Path

import pytest

from tests.jobs import SAVING, run_with_state
from titan.testing.jobs import assert_same_curve, train_job

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "words", [(), ("--plugins.activation_checkpoint.mode", "selective")], ids=["plain", "recompute"]
)
def test_a_device_draws_the_curve_of_the_cpu(tmp_path: Path, device: str, words: tuple[str, ...]) -> None:
    """In fp32, from the weights of one checkpoint: initial weights differ between devices."""
    train_job(tmp_path, 1, *SAVING, "--train.steps", "4", "--run.device", "cpu", name="before")
    start = ("--checkpoint.init_from", str(tmp_path / "before"))
    expected = train_job(tmp_path, 1, *start, "--run.device", "cpu", name="cpu")
    assert_same_curve(expected, train_job(tmp_path, 1, *start, *words, "--run.device", device, name="device"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path, device: str) -> None:
    words = (*SAVING, "--run.device", device, "--run.deterministic", "true")
    whole = train_job(tmp_path, 1, *words, name="whole", run=run_with_state)
    train_job(tmp_path, 1, *words, "--train.steps", "4", name="pieces")
    pieces = train_job(tmp_path, 1, *words, name="pieces", run=run_with_state)
    assert whole.weights.keys() == pieces.weights.keys()
    assert all(whole.weights[name].equal(pieces.weights[name]) for name in whole.weights)
    assert [whole.rows[step]["loss"] for step in range(1, 11)] == [pieces.rows[step]["loss"] for step in range(1, 11)]
