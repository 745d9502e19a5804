"""`titan tune` with real trials on two gloo ranks: measured, refused by the run itself, written, trained. 40 s."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import LLAMA, read_rows, write_text

pytest.importorskip("optuna")


def _titan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "NNODES")}
    environment = {**own, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "titan.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_tune(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    words = ["tune", "--config", str(LLAMA), "--data.path", "text", "--data.cache", "cache", "--train.steps", "3"]
    words += ["--steps", "2", "--warmup", "1", "--json"]
    done = _titan(tmp_path, *words, "--trials", "2", "--output", "best.toml")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for row in report["trials"]:
        found = row["measured"]
        assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(8 * 16, rel=0.2)
        assert row["value"] == found["model_tflops_per_device"] > 0
    assert len(report["trials"]) == 2 and not list(tmp_path.rglob("*.trial"))

    trained = _titan(tmp_path, "train", "--config", "best.toml", "--run.name", "trained")
    assert trained.returncode == 0 and len(read_rows(tmp_path / "runs" / "trained")) == 3, trained.stderr
    (tmp_path / "text").rename(tmp_path / "gone")
    lost = _titan(tmp_path, *words, "--trials", "3")
    failed = json.loads(lost.stdout)["trials"][-1]["failed"]
    assert (lost.returncode, failed["kind"]) == (0, "refused") and "text" in failed["why"], lost.stderr
