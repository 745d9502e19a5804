"""A real Slurm of two nodes, both this machine: its daemons, for as long as a block, and what tests ask of them.

    with running(folder):
        job = submit(folder, script, "its", "arguments", NPROC="1")
        job.await_line("step 3/")
        ask("scancel", job.name)
        assert job.await_state("CANCELLED")["ExitCode"] == "75:0"

Needs the programs of Debian's packages slurm-wlm and munge, and root. The nodes are called by addresses of the loopback
device, so that each can be reached by the name that Slurm knows it by.
"""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.commands import free_port

ROOT = Path(__file__).parents[1]
NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scancel", "scontrol", "squeue")
PROGRAMS += ("setpriv",)
PATIENCE_S = 120.0
LOOK_S = 0.1

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued begins again when its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
# Longer than by default, as the machine may be busy.
KillWait=60
MessageTimeout=60
FirstJobId={first}
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [program for program in PROGRAMS if _program(program) is None]
    return f"Slurm is not installed: no {', '.join(absent)}" if absent else "not root" if os.geteuid() else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def until(true: Callable[[], object], what: Callable[[], str], limit_s: float = PATIENCE_S) -> None:
    """Look until something is so."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(LOOK_S)


@dataclass
class Job:
    """A job, or one task of an array. output: the file that holds all that it prints, in all of its lives."""

    name: str
    output: Path

    def task(self, number: int) -> "Job":
        """One task of this array, once it has a number of its own."""
        name = f"{self.name}_{number}"
        until(lambda: "JobState=RUNNING" in ask("scontrol", "show", "job", name), lambda: f"no {name}\n{self}")
        job = Job(name, self.output)
        job.output = Path(job.told["StdOut"])
        return job

    def await_line(self, words: str) -> None:
        """Wait until the job has printed these words."""
        until(lambda: words in self.printed, lambda: f"no {words!r}\n{self}")

    def await_state(self, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states; what Slurm tells of it, key by key."""
        until(lambda: self.told.get("JobState") in states, lambda: f"not {states}\n{self}")
        return self.told

    @property
    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def told(self) -> dict[str, str]:
        words = ask("scontrol", "--oneliner", "show", "job", self.name).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def __str__(self) -> str:
        return f"job {self.name}: {self.told}\n{self.printed}"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Slurm's daemons: munged, which vouches for users, the controller, and one for each node. Jobs end with the block.

    folder: for all that they write; made.
    """
    host, socket = os.uname().nodename.partition(".")[0], folder / "munge.socket"
    # A job's number gives the port where its nodes meet, and another Slurm may run beside this one.
    places = {"host": host, "folder": folder, "nodes": NODES, "first": random.randrange(1, 9000)}
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONFIG.format(ports=[free_port() for _ in range(3)], **places))
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(os.urandom(1024))
    files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]

    def logs() -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.out")))

    with contextlib.ExitStack() as stack, patch.dict(os.environ, SLURM_CONF=str(folder / "slurm.conf")):
        # By force, as others cannot reach the socket in a folder of root's.
        stack.enter_context(_daemon(folder, "munged", "--foreground", "--force", f"--socket={socket}", *files))
        until(socket.exists, logs)
        stack.enter_context(_daemon(folder, "slurmctld", "-D"))
        for node in NODES:
            stack.enter_context(_daemon(folder, "slurmd", "-D", "-N", node))
        until(lambda: ask("scontrol", "show", "node").count("State=IDLE ") == len(NODES), logs)
        yield
        ask("scancel", "--user=root")
        until(lambda: not ask("squeue", "--noheader"), lambda: ask("squeue"))


@contextlib.contextmanager
def _daemon(folder: Path, name: str, *options: str) -> Iterator[None]:
    """A daemon of the block; what ends this process at once ends it too."""
    command = ["setpriv", "--pdeathsig", "TERM", str(_program(name)), *options]
    with (folder / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def submit(folder: Path, *words: str, **variables: str) -> Job:
    """What sbatch submits, which prints into this folder."""
    number = ask("sbatch", "--parsable", f"--output={folder}/%j.out", *words, **variables).strip()
    return Job(number, folder / f"{number}.out")


def ask(*words: str, **variables: str) -> str:
    """Run a tool of Slurm's as a user does, from the repository; what it prints."""
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.stdout + done.stderr


def processes(words: str) -> list[int]:
    """The processes whose command line has these words, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
