"""Runs that earlier versions have left (tests/released) go on today, on the curve that those versions gave."""

import json
import shutil
from pathlib import Path

import pytest

from titan import train
from titan.testing.jobs import LOSS_RTOL, read_rows
from titan.testing.ranks import run_ranks

RELEASED = Path(__file__).parents[1] / "released"


@pytest.mark.parametrize("version", sorted(path.parent.name for path in RELEASED.glob("*/losses.json")))
def test_the_run_of_an_earlier_version_goes_on(
    version: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    run, losses = tmp_path / "run", json.loads((RELEASED / version / "losses.json").read_text())
    shutil.copytree(RELEASED / version, run)
    steps = max(map(int, losses))
    words = [
        "--config", str(run / "config.toml"), "--run.dir", str(tmp_path), "--run.name", "run",
        "--data.path", str(RELEASED / "text.txt"), "--data.cache", str(tmp_path / "cache"),
        "--train.steps", str(steps),
    ]  # fmt: skip
    assert run_ranks(train.main, 1, words, init=False) == [0]
    said = capfd.readouterr().out
    assert "step-00000004, step 4" in said
    assert said.count("changed: ") == 1 and f"changed: train.steps = {steps}, the checkpoint has 4" in said
    rows = read_rows(run)
    assert {str(step): row["loss"] for step, row in rows.items()} == pytest.approx(losses, rel=LOSS_RTOL)


def test_there_is_one() -> None:
    assert list(RELEASED.glob("*/losses.json"))
