"""What goes wrong while a run is under way: it says so, loses nothing, and ends with the right code."""

import resource
import subprocess
from pathlib import Path

import pytest
import torch

import titan.launch
from tests.commands import run_titan
from tests.jobs import LLAMA
from tests.sweeps import swept_case
from titan.testing.jobs import train_job, write_text


def launch(folder: Path, *words: str, limit_kib: int | None = None) -> subprocess.CompletedProcess[str]:
    """`titan train`; with `limit_kib` its files grow to that size, as on a disk that is full beyond it."""
    if not (folder / "text").exists():
        write_text(folder / "text")
    places = ["--run.dir", str(folder), "--run.name", "run", "--data.cache", f"{folder}/cache"]
    places += ["--data.path", f"{folder}/text"]
    words = ("--config", str(LLAMA), *places, *words)
    if limit_kib is None:
        return run_titan(["train", *words], folder)
    return run_titan([str(limit_kib), *words], folder, module=__name__)


def main(words: list[str]) -> int:
    """The command of a process whose files grow to words[0] KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(words[0]) * 1024,) * 2)
    return titan.launch.main(words[1:])


@pytest.mark.parametrize("asynchronous", ["true", swept_case("false")])
def test_disk_full_while_saving(asynchronous: str, tmp_path: Path) -> None:
    saving = ("--checkpoint.enabled", "true", "--checkpoint.async", asynchronous)
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
    done = launch(tmp_path, "--train.steps", "1")
    assert done.returncode == 2 and shard.name in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_deterministic_runs_are_bit_identical(tmp_path: Path) -> None:
    words = ("--run.deterministic", "true", "--mesh.dp_shard", "2")
    first, second = (train_job(tmp_path, 2, *words, name=name) for name in ("first", "second"))
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert [row["grad_norm"] for row in first.rows.values()] == [row["grad_norm"] for row in second.rows.values()]
