"""Under a real Slurm, whose two nodes are this machine (tests/real_slurm.py): files of configs/launch/ through events.

The files are as they are, but for what the nodes lack: GPUs, cores and the interfaces of a network. So this shows
nothing of NCCL and RCCL, of options that bind GPUs and cores, and of containers.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import real_slurm
from tests.real_slurm import NODES, Job, ask, missing, processes, until
from tests.signals import TEN
from tests.signals import job as arguments
from tests.slurm import executable
from titan.testing.jobs import LOSS_RTOL, train_job

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(missing()), reason=missing())]

LAUNCHERS, RANKS = "configs/launch/slurm-nvidia.sh", "configs/launch/slurm-amd.sh"
FEWER = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=10", "--oversubscribe")
"""Options of sbatch over those of a file: no GPUs, few cores, and nodes that jobs share."""

VARIABLES = {"TITAN_PYTHON": sys.executable, "NPROC": "1", "OMP_NUM_THREADS": "1"}
SAVING = ("--checkpoint.every", "3", "--metrics.console.enabled", "true")
TWO = ("--mesh.dp_shard", "2", *SAVING)
NOT_BY_TITAN = "because it received SIGTERM; unless Slurm requeues it"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module", autouse=True)
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with real_slurm.running(tmp_path_factory.mktemp("slurm") / "daemons"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of a run that nobody interrupts."""
    return train_job(tmp_path_factory.mktemp("whole"), 1, *TEN).loss


def submit(folder: Path, *options: str, **signal: object) -> Job:
    """A job of ten steps on two nodes, one rank each, that waits before step 7 for a signal or does what is asked."""
    words = arguments(folder, *TWO, **(signal or {"to": "nobody", "step": 7}))
    return real_slurm.submit(folder, *FEWER, *options, LAUNCHERS, *words, **VARIABLES)


def losses(folder: Path) -> list[float]:
    """What metrics.jsonl of a run has, each step once."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def assert_done(job: Job, folder: Path, whole: list[float], restarts: int = 0) -> None:
    """The job ends well, on the curve of a run that nobody interrupts."""
    told = job.await_state(*OVER)
    assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), str(job)
    assert losses(folder) == pytest.approx(whole, rel=LOSS_RTOL)


def assert_over(job: Job, folder: Path, state: str, *codes: str) -> None:
    """The job ends so, with one of these codes, is not requeued, and leaves no process behind."""
    told = job.await_state(*OVER)
    assert (told["JobState"], told["Restarts"]) == (state, "0") and told["ExitCode"] in codes, str(job)
    assert_nobody_left(folder)


def assert_nobody_left(folder: Path) -> None:
    until(lambda: not processes(f"{folder}/text"), lambda: f"left behind: {processes(str(folder))}")


def saved(job: Job, signal: str) -> bool:
    """Whether the run has said that it saved for this signal, once in all."""
    steps = re.findall(rf"preempted by {signal} at step \d+: checkpoint saved", job.printed)
    return len(steps) == job.printed.count("preempted by") == 1


def test_time_limits(tmp_path: Path, whole: list[float]) -> None:
    """Slurm looks every 30 s: the signal of `--signal` comes before the limit, and SIGTERM at the limit."""
    warned, unwarned = (submit(tmp_path / name, f"--signal=USR1@{s}") for name, s in (("a", 300), ("b", 0)))
    for job in (warned, unwarned):
        job.await_line("step 6/10")
    ask("scontrol", "hold", warned.name)  # or it would begin again, at once near its limit
    ask("scontrol", "update", f"JobId={warned.name}", "TimeLimit=5")
    ask("scontrol", "update", f"JobId={unwarned.name}", "EndTime=now+1")
    assert_over(unwarned, tmp_path / "b", "TIMEOUT", "75:0")
    assert saved(unwarned, "SIGTERM") and NOT_BY_TITAN in unwarned.printed
    assert warned.await_state("PENDING")["Reason"] == "JobHeldAdmin"
    ask("scontrol", "update", f"JobId={warned.name}", "TimeLimit=10")
    ask("scontrol", "release", warned.name)
    assert_done(warned, tmp_path / "a", whole, restarts=1)
    assert saved(warned, "SIGUSR1")


def test_a_job_that_is_cancelled(tmp_path: Path) -> None:
    job = submit(tmp_path)
    job.await_line("step 6/10")
    ask("scancel", job.name)
    assert_over(job, tmp_path, "CANCELLED", "75:0")
    assert saved(job, "SIGTERM") and NOT_BY_TITAN in job.printed


def test_a_job_that_an_operator_holds(tmp_path: Path, whole: list[float]) -> None:
    """Before it runs, and while it does, which requeues it; it goes on once it is released."""
    job = submit(tmp_path, "--hold")
    assert job.await_state("PENDING")["Reason"] == "JobHeldUser"
    ask("scontrol", "release", job.name)
    job.await_line("step 6/10")
    ask("scontrol", "requeuehold", job.name)
    assert job.await_state("PENDING")["Reason"] == "job_requeued_in_held_state"
    assert_nobody_left(tmp_path)
    ask("scontrol", "release", job.name)
    assert_done(job, tmp_path, whole, restarts=1)
    assert saved(job, "SIGTERM") and NOT_BY_TITAN in job.printed


def test_tasks_of_an_array_are_requeued_alone(tmp_path: Path, whole: list[float]) -> None:
    """Without srun, where the script itself hears the signal. The last task has the number of the array."""
    script, words = tmp_path / "array.sh", arguments(tmp_path, *SAVING, to="nobody", step=7)
    script.write_text('#!/bin/bash\nexec ./run_train.sh "$@" --run.dir "$FOLDER/$SLURM_ARRAY_TASK_ID"\n')
    options = ("--array=0-2", "--requeue", "--open-mode=append", "--oversubscribe")
    array = real_slurm.submit(tmp_path, *options, str(script), *words, FOLDER=str(tmp_path), **VARIABLES)
    tasks = [array.task(number) for number in range(3)]
    for task in tasks:
        task.await_line("step 6/10")
    ask("scancel", "--batch", "--signal=USR1", tasks[2].name)
    until(lambda: tasks[2].told.get("Restarts") == "1", lambda: f"not requeued\n{tasks[2]}")
    assert [(task.told["JobState"], task.told["Restarts"]) for task in tasks[:2]] == [("RUNNING", "0")] * 2
    for task in tasks[:2]:
        ask("scancel", "--batch", "--signal=USR1", task.name)
    for number, task in enumerate(tasks):
        assert_done(task, tmp_path / str(number), whole, restarts=1)


def test_a_killed_rank(tmp_path: Path, whole: list[float]) -> None:
    """All ranks start again, of both nodes, without Slurm."""
    job = submit(tmp_path, signal="SIGKILL", rank=1, step=7, once=tmp_path / "once")
    assert_done(job, tmp_path, whole)
    assert "rank 1 was killed by SIGKILL" in job.printed and "restart 1 of 3" in job.printed


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_launcher(node: int, tmp_path: Path) -> None:
    """Slurm ends the launcher of the other node by SIGTERM, which may be about to end by itself."""
    job = submit(tmp_path, signal="SIGKILL", to="launcher", rank=node, step=7)
    assert_over(job, tmp_path, "FAILED", "137:0", "143:0")


def test_a_node_that_goes_down(tmp_path: Path, whole: list[float]) -> None:
    job = submit(tmp_path)
    job.await_line("step 6/10")
    try:
        ask("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
        job.await_state("PENDING")
        assert_nobody_left(tmp_path)
    finally:
        ask("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    assert_done(job, tmp_path, whole, restarts=1)


LATE = """\
#!/bin/bash
# Python; on the second node it is late the first time.
if [ "$SLURM_NODEID" = 1 ] && [ ! -e {folder}/late ]; then
    touch {folder}/late
    read -r _ <{folder}/gate
fi
exec {python} "$@"
"""


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_while_nodes_meet(signal: str, tmp_path: Path, whole: list[float]) -> None:
    """It reaches the first node while it waits, and the other one before Python runs."""
    python, gate = tmp_path / "python", tmp_path / "gate"
    executable(python, LATE.format(folder=tmp_path, python=sys.executable))
    os.mkfifo(gate)
    words = arguments(tmp_path, *TWO)
    job = real_slurm.submit(tmp_path, *FEWER, LAUNCHERS, *words, **{**VARIABLES, "TITAN_PYTHON": str(python)})
    job.await_line("waiting for 1 other nodes")
    until((tmp_path / "late").exists, lambda: f"the other node has no Python yet\n{job}")
    ask("scancel", *(["--signal=USR1"] if signal == "USR1" else []), job.name)
    job.await_line(f"preempted by SIG{signal} while waiting for other nodes")
    gate.write_text("")
    if signal == "USR1":
        assert_done(job, tmp_path, whole, restarts=1)
    else:
        assert_over(job, tmp_path, "CANCELLED", "75:0")


@pytest.mark.parametrize("start", ["srun -N2", "srun -n2", "salloc -N2 srun"])
def test_without_a_batch_script(start: str, tmp_path: Path, whole: list[float]) -> None:
    """By hand: one task per node, one per rank, and within an allocation, whose variables srun inherits."""
    variables = {**VARIABLES, "NPROC": "" if "-n" in start else "1"}
    ask(*start.split(), "./run_train.sh", *arguments(tmp_path, *TWO), **variables)
    assert losses(tmp_path) == pytest.approx(whole, rel=LOSS_RTOL)


def test_an_allocation_without_srun(tmp_path: Path) -> None:
    said = ask("salloc", "-N2", "./run_train.sh", *arguments(tmp_path), **VARIABLES)
    assert "SLURM_NNODES = 2, but srun did not start this process" in said


def test_a_task_per_rank(tmp_path: Path, whole: list[float]) -> None:
    """Four ranks on two nodes. `GPU_BINDING`: the form that names no GPUs."""
    words = arguments(tmp_path, *SAVING, "--mesh.dp_shard", "4", to="nobody", step=7)
    variables = {**VARIABLES, "NPROC": "", "GPU_BINDING": "--gpu-bind=none", "GLOO_SOCKET_IFNAME": "lo"}
    job = real_slurm.submit(tmp_path, *FEWER, "--ntasks-per-node=2", RANKS, *words, **variables)
    job.await_line("step 6/10")
    ask("scancel", "--signal=USR1", job.name)
    assert_done(job, tmp_path, whole, restarts=1)
    assert saved(job, "SIGUSR1") and ": Terminated" not in job.printed
