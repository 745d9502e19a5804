"""torchrun, on two ranks of a tiny job: what its agent makes of the exit codes of ranks (docs/hpc.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.signals import job
from tests.sweeps import swept_case

LAUNCH = Path(__file__).parents[2] / "configs" / "launch" / "torchrun.sh"


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--train.steps", "2"), 0, "step-00000002"),
        swept_case((("--train.steps", "no"), 1, "exitcode: 2")),
        (("--run.max_minutes", "0.001"), 1, "exitcode: 75"),
    ],
    ids=["done", "wrong input", "preempted"],
)
def test_exit_codes(more: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    """Whatever a rank fails with, torchrun ends with 1, and names the rank's own code."""
    argv = job(tmp_path, "--mesh.dp_shard", "2", "--metrics.console.enabled", "true", *more, to="nobody")
    environment = {**os.environ, "TITAN_PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([LAUNCH, *argv], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
