"""`titan tune` with real trials on two gloo ranks: measured, refused by the run itself, written, trained."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.jobs import LLAMA
from titan.testing.jobs import read_rows, write_text

pytest.importorskip("optuna")


def _titan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return run_titan(words, folder, {"NPROC": "2"}, timeout=200)


@pytest.mark.sweep
def test_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
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
