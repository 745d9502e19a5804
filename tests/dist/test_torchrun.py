"""torchrun, on two ranks of a tiny job: what its agent makes of the exit codes of ranks (docs/hpc.md)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.signals import job

LAUNCH = Path(__file__).parents[2] / "configs" / "launch" / "torchrun.sh"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--train.steps", "2"), 0, "step-00000002"),
        (("--train.steps", "no"), 1, "exitcode: 2"),
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


LIVES = """\
import os, pathlib, signal, sys

life = pathlib.Path(os.environ["LIVES"], os.environ["RANK"])
life.write_text(life.read_text() + "x" if life.exists() else "x")
if os.environ["CODE"].isdecimal():
    own, both = life.read_text(), [life.with_name(rank) for rank in "01"]
    while not all(other.exists() and len(other.read_text()) >= len(own) for other in both):
        os.sched_yield()  # a rank that ends has the other one killed, which may not have begun
    sys.exit(int(os.environ["CODE"]))
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: sys.exit(75))
os.write(1, b"ready\\n")  # at once: both ranks have one pipe, and print may write the end of the line by itself
signal.pause()
"""


def start(code: str, restarts: int, folder: Path) -> "subprocess.Popen[str]":
    """torchrun.sh on two ranks that take no time: they end with a code, or with 75 when they hear a signal."""
    (folder / code).mkdir()
    (folder / "lives.py").write_text(LIVES)
    stub = folder / "python"
    stub.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "${{@/titan.train/lives}}"\n')
    stub.chmod(0o755)
    own = {"TITAN_PYTHON": str(stub), "PYTHONPATH": str(folder), "LIVES": str(folder / code), "CODE": code}
    more = {"NPROC": "2", "MAX_RESTARTS": str(restarts), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [LAUNCH], env={**os.environ, **own, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.sweep
def test_restarts_and_signals(tmp_path: Path) -> None:
    """It starts ranks again whatever they fail with, also where that cannot help, but not after a signal."""
    failing = {code: start(code, 1, tmp_path) for code in ("1", "2", "75")}
    for process in failing.values():
        process.communicate(timeout=250)
    asked = {name: start(name, 1, tmp_path) for name in ("SIGTERM", "SIGUSR1")}
    for name, process in asked.items():
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.Signals[name])
        process.communicate(timeout=250)
    ended = {code: process.returncode for code, process in {**failing, **asked}.items()}
    assert ended == dict.fromkeys(("1", "2", "75", "SIGTERM", "SIGUSR1"), 1)
    lives = {code: [path.read_text() for path in (tmp_path / code).iterdir()] for code in ended}
    assert lives == {**dict.fromkeys(failing, ["xx"] * 2), **dict.fromkeys(asked, ["x"] * 2)}
