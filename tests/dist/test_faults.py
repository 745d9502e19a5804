"""What goes wrong while a run is under way: it says so, loses nothing, and ends with the right code."""

import resource
import subprocess
from pathlib import Path

import pytest

import titan.launch
from tests.checkpoints import assert_same
from tests.commands import run_titan
from tests.signals import job
from tests.sweeps import swept_case
from titan.testing.jobs import train_job


def launch(folder: Path, *words: str, limit_kib: int | None = None) -> subprocess.CompletedProcess[str]:
    """`titan train`; with `limit_kib` its files grow to that size, as on a disk that is full beyond it."""
    argv = job(folder, *words)
    if limit_kib is None:
        return run_titan(["train", *argv], folder)
    return run_titan([str(limit_kib), *argv], folder, module=__name__)


def main(words: list[str]) -> int:
    """The command of a process whose files grow to words[0] KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(words[0]) * 1024,) * 2)
    return titan.launch.main(words[1:])


@pytest.mark.parametrize("asynchronous", ["true", swept_case("false")])
def test_disk_full_while_saving(asynchronous: str, tmp_path: Path) -> None:
    saving = ("--checkpoint.async", asynchronous)
    first = launch(tmp_path, *saving, "--train.steps", "2")
    assert first.returncode == 0, first.stderr
    full = launch(tmp_path, *saving, "--train.steps", "4", limit_kib=64)
    assert full.returncode == 1, full.stderr
    assert "disk full while saving step 4" in full.stderr and "Traceback" not in full.stderr
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    again = launch(tmp_path, *saving, "--train.steps", "4")
    assert again.returncode == 0 and "step-00000002, step 2" in again.stderr, again.stderr


def test_a_shard_that_was_cut_short(tmp_path: Path) -> None:
    assert launch(tmp_path, "--train.steps", "1").returncode == 0
    (shard,) = (tmp_path / "cache").rglob("*.bin")
    shard.write_bytes(shard.read_bytes()[:-64])
    done = launch(tmp_path, "--train.steps", "2")
    assert done.returncode == 2 and shard.name in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_deterministic_runs_are_bit_identical(tmp_path: Path) -> None:
    words = ("--run.deterministic", "true", "--mesh.dp_shard", "2")
    first, second = (train_job(tmp_path, 2, *words, name=name) for name in ("first", "second"))
    assert_same(first.weights, second.weights)
    assert first.grad_norm == second.grad_norm
