"""Slurm: a job is put back into its queue, or not, by one sentence each way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import executable
from titan.ranks.meeting import slurm


def scontrol(folder: Path, code: int = 0) -> dict[str, str]:
    """An environment with a `scontrol` that writes its arguments down."""
    answer = f'#!/bin/sh\necho "$@" >>{folder}/asked\necho no such job >&2\nexit {code}\n'
    executable(folder / "scontrol", answer)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "41"}


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_is_queued_again(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.requeue(scontrol(tmp_path, code), {signal.SIGUSR1})
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
    said = ["scontrol requeue 41: asking Slurm to run this job again; it will resume from its checkpoint"]
    refused = "warning: Slurm refuses to requeue job 41 (no such job); submit it again to resume"
    assert capsys.readouterr().err.splitlines() == said + [refused] * code


def test_a_job_is_queued_again_though_nobody_listens(tmp_path: Path) -> None:
    """A terminal that is gone takes the words, and not what has to be done."""
    reading, writing = os.pipe()
    os.close(reading)
    asking = "import os, signal; from titan.ranks.meeting import slurm; slurm.requeue(os.environ, {signal.SIGUSR1})"
    done = subprocess.run([sys.executable, "-c", asking], env={**os.environ, **scontrol(tmp_path)}, stderr=writing)
    os.close(writing)
    assert done.returncode == 0 and (tmp_path / "asked").read_text() == "requeue 41\n"


def test_a_controller_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = scontrol(tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(slurm, "ANSWER_S", 0.1)
    slurm.requeue(environment, {signal.SIGUSR1})
    assert "refuses to requeue job 41 (no answer within 0.1 s); submit" in capsys.readouterr().err


def test_without_scontrol_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.requeue({"PATH": str(tmp_path), "SLURM_JOB_ID": "41"}, ())
    said = "warning: scontrol is not in PATH, so job 41 is not requeued; submit it again to resume\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("heard", [{signal.SIGTERM}, {signal.SIGUSR1, signal.SIGTERM}])
def test_a_job_that_is_cancelled_is_not(
    heard: set[signal.Signals], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.requeue(scontrol(tmp_path), heard)
    assert not (tmp_path / "asked").exists()
    why = "because it received SIGTERM; unless Slurm requeues it, submit it again to resume"
    assert capsys.readouterr().err == f"titan does not requeue job 41, {why}\n"


@pytest.mark.parametrize(
    ("array", "name"),
    [
        ({"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}, "41_3"),
        ({"SLURM_ARRAY_JOB_ID": "38", "SLURM_ARRAY_TASK_ID": "3"}, "41"),
    ],
    ids=["the last task", "another task, or a job that a task has submitted"],
)
def test_a_task_of_an_array_has_a_name_of_its_own(array: dict[str, str], name: str, tmp_path: Path) -> None:
    slurm.requeue({**scontrol(tmp_path), **array}, ())
    assert (tmp_path / "asked").read_text() == f"requeue {name}\n"


def test_elsewhere_it_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.requeue({"PATH": scontrol(tmp_path)["PATH"]}, {signal.SIGTERM})
    assert not (tmp_path / "asked").exists() and capsys.readouterr().err == ""
