"""Under Slurm, a fake one (tests/slurm.py): a template of configs/launch/ on two nodes, signals and steps."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import free_port
from tests.signals import TEN
from tests.signals import job as arguments
from tests.slurm import ROOT, Job, Slurm
from tests.sweeps import swept_case
from titan.testing.jobs import read_rows, train_job

TEMPLATE = str(ROOT / "configs" / "launch" / "slurm-nvidia.sh")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Slurm(tmp_path) as running:
        yield running


def submit(slurm: Slurm, argv: list[str]) -> Job:
    """A run by the template, whose nodes have one rank each and meet at a port that is free."""
    port = str(free_port())
    variables = {"TITAN_PYTHON": sys.executable, "MASTER_PORT": port, "NPROC": "1", "OMP_NUM_THREADS": "1"}
    return slurm.submit(TEMPLATE, *argv, "--mesh.dp_shard", "2", "--metrics.console.enabled", "true", **variables)


def preempted(job: Job, name: str, since: int) -> int:
    """The step at which a run was preempted that waits before step `since` for the signal; nothing else is said."""
    lines = [line for line in job.lines if "preempted by" in line]
    # The rank that waits has begun that step; the other one may hear of it before it does.
    step = since if f"at step {since}" in "".join(lines) else since + 1
    assert len(lines) == 1 and f"preempted by {name} at step {step}: " in lines[0], job.lines
    return step


@pytest.mark.sweep
def test_a_job_comes_back_until_it_is_cancelled_or_done(tmp_path: Path, slurm: Slurm) -> None:
    """The run waits before step 4 for whoever cancels it, and before step 7 for the end of its time."""
    first = submit(slurm, arguments(tmp_path, to="nobody"))
    first.await_line("step 3/10")
    slurm("scancel", first.name)
    assert (first.await_end(), first.restarts) == ("CANCELLED", 0), first.lines
    step = preempted(first, "SIGTERM", 4)
    assert first.lines[-1].startswith("titan does not requeue job 41, because it received SIGTERM; unless Slurm ")

    second = submit(slurm, arguments(tmp_path, to="nobody", step=7))
    second.await_line("step 6/10")
    slurm.warn(second)
    assert second.await_end() == "COMPLETED", second.lines
    assert second.restarts == 1
    said = "".join(second.lines)
    later = preempted(second, "SIGUSR1", 7)
    assert f"step-0000000{step}, step {step}" in said and f"step-0000000{later}, step {later}" in said
    asking = "scontrol requeue 42: asking Slurm to run this job again; it will resume from its checkpoint\n"
    assert asking in second.lines

    rows, whole = read_rows(tmp_path / "run"), train_job(tmp_path, 2, "--mesh.dp_shard", "2", *TEN, name="whole").rows
    assert {step: row["loss"] for step, row in rows.items()} == {step: row["loss"] for step, row in whole.items()}


# --- what the launcher makes of Slurm's variables and of exit codes: no ranks -----------------------------------------

TRAINS = """\
import os, signal, sys
from titan import launch, train as training
from titan.ranks.meeting import signals

life = os.environ.get("SLURM_RESTART_COUNT", "0")

def main(words):
    with signals.listening():
        return {train}

training.main = main
sys.exit(launch.main([]))
"""

ASKS = """\
import os, sys
from titan.errors import ConfigError
from titan.ranks.meeting.launch_env import find_place, rank_environment

try:
    mine = rank_environment(os.environ)
    place = None if mine else find_place(os.environ)
    said = f"rank {mine['RANK']} of {mine['WORLD_SIZE']}" if mine else f"node {place.node} of {place.nodes}"
except ConfigError as error:
    said = str(error)
sys.stdout.write(said + chr(10))  # in one write: tasks share a pipe
"""


def script(folder: Path, python: str, shell: str = "titan") -> str:
    """A batch script; `titan` stands for a program in Python."""
    (folder / "program.py").write_text(python)
    command = shell.replace("titan", f"{sys.executable} {folder / 'program.py'}")
    (folder / "script.sh").write_text(f"#!/bin/bash\n#SBATCH --requeue\n{command}\n")
    return str(folder / "script.sh")


@pytest.mark.parametrize(
    ("sent", "restarts"), [swept_case((["USR1"], 1)), (["USR1", "TERM"], 0), swept_case((["TERM", "USR1"], 0))]
)
def test_a_signal_that_cancels_wins(sent: list[str], restarts: int, tmp_path: Path, slurm: Slurm) -> None:
    """To a process that is the only rank."""
    train = f'0 if life == "1" else 75 + 0 * len([os.kill(os.getpid(), signal.Signals["SIG" + n]) for n in {sent}])'
    job = slurm.submit(script(tmp_path, TRAINS.format(train=train), "exec titan"), NPROC="1")
    assert job.await_end() == ("COMPLETED" if restarts else "FAILED"), job.lines
    assert (job.code, job.restarts) == (0 if restarts else 75, restarts)


@pytest.mark.sweep
def test_the_first_rank_of_srun_has_the_job_run_again(tmp_path: Path, slurm: Slurm) -> None:
    """Of one task per rank, all preempted."""
    program = script(tmp_path, TRAINS.format(train='75 * (life == "0")'), "exec srun titan")
    job = slurm.submit("--ntasks=2", program, MASTER_ADDR="h")
    assert (job.await_end(), job.code, job.restarts) == ("COMPLETED", 0, 1), job.lines
    assert sum("scontrol requeue" in line for line in job.lines) == 1, job.lines


@pytest.mark.sweep
def test_what_all_tasks_of_srun_refuse_is_printed_once(tmp_path: Path, slurm: Slurm) -> None:
    """For real, of one task per rank; the exit code is that of wrong input."""
    words = ["--config", f"{ROOT}/configs/debug.toml", "--train.stepz", "3", "--run.dir", str(tmp_path)]
    program = f"import sys; from titan import launch; sys.exit(launch.main({words}))"
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = slurm.submit("--ntasks=3", script(tmp_path, program, "exec srun titan"), **own)
    assert (job.await_end(), job.code) == ("FAILED", 2), job.lines
    assert [line for line in job.lines if "error" in line] == [
        "error: command line: [train] stepz: unknown key (did you mean 'steps'?)\n"
    ]


LEADS = """\
import os, sys
from titan.ranks.meeting.launch_env import find_place
from titan.ranks.launcher import start
from titan.ranks.meeting.same_job import Statement

sys.exit(start(lambda words: 2 * int(os.environ["RANK"]), [], find_place(os.environ), Statement()))
"""


@pytest.mark.sweep
def test_a_launcher_per_node_ends_with_the_code_of_the_run(tmp_path: Path, slurm: Slurm) -> None:
    """On both nodes: 2, because rank 1, of the other node, found wrong input."""
    shell = "srun titan || echo code $?"
    own = {"NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", script(tmp_path, LEADS, shell), **own)
    assert job.await_end() == "COMPLETED" and job.lines[-1] == "code 2\n", job.lines


FILE = "configs/launch/slurm-nvidia.sh"
FOUR = ["--nodes=2", "--ntasks-per-node=2"]
ALONE = f"environment: {{}}, but srun did not start this process; start it with srun (example: {FILE}), or set {{}}"
MANY_NODES = ALONE.format("SLURM_NNODES = 2", "NNODES=1 to use this node alone")
MANY_TASKS = ALONE.format("SLURM_NTASKS = 8", "NPROC to the number of ranks that this process starts")


@pytest.mark.parametrize(
    ("options", "shell", "said"),
    [
        (FOUR, "srun titan", [f"rank {rank} of 4" for rank in range(4)]),
        (FOUR, "NPROC=1 srun --ntasks-per-node=1 titan", ["node 0 of 2", "node 1 of 2"]),
        swept_case((FOUR, "NPROC=1 srun --ntasks=1 titan", ["node 0 of 1"])),
        (["--nodes=2"], "NPROC=1 titan", [MANY_NODES]),
        (["--ntasks-per-node=8"], "titan", [MANY_TASKS]),
        swept_case((["--ntasks-per-node=8"], "NPROC=8 titan", ["node 0 of 1"])),
        (["--nodes=2"], "NPROC=8 NNODES=1 titan", ["node 0 of 1"]),
        swept_case((["--nodes=1"], "NPROC=1 titan", ["node 0 of 1"])),
        (["--nodes=1", "--ntasks=1"], "titan", ["node 0 of 1"]),
    ],
)
def test_only_srun_starts_ranks(options: list[str], shell: str, said: list[str], tmp_path: Path, slurm: Slurm) -> None:
    job = slurm.submit(*options, script(tmp_path, ASKS, shell))
    assert job.await_end() == "COMPLETED"
    assert sorted(job.lines) == [line + "\n" for line in said]
