"""A fake Slurm, whose nodes are all this machine: sbatch, srun, scancel and scontrol as programs in a folder for PATH.

    with Slurm(folder) as slurm:
        job = slurm.submit("--nodes=2", script, "its", "arguments")
        job.await_line("step 3/")
        slurm("scancel", job.name)
        assert job.await_end() == "CANCELLED"

It does what titan depends on as Slurm's source does it (github.com/SchedMD/slurm, src/): the variables of a batch
script and of a step (common/env.c); which processes a signal reaches, and what happens to a job that is cancelled,
requeued or both (`job_signal` and `_job_requeue_op` in slurmctld/job_mgr.c). It has no arrays.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

TOOLS = ("sbatch", "srun", "scancel", "scontrol")
KILL_WAIT_S = 60.0
"""Between SIGTERM and SIGKILL; 30 s by default in the real one, whose machines are not shared with other tests."""

PATIENCE_S = 250.0
ROOT = Path(__file__).parents[1]
CONTROLLER, STEP = "FAKE_SLURM_CONTROLLER", "FAKE_SLURM_STEP"
"""Variables of the fake's own: where its controller listens, and the step that a process belongs to."""

Options = dict[str, str]


@dataclass
class Job:
    """A batch job: one record, however often it is run.

    state: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, or with COMPLETING: its processes are being ended.
    """

    name: str
    argv: list[str]
    options: Options
    environment: dict[str, str]
    home: Path
    changed: Condition
    state: str = "PENDING"
    restarts: int = 0
    code: int | None = None
    lines: list[str] = field(default_factory=list)

    def await_line(self, words: str) -> None:
        """Wait until some line that the job printed has these words in it."""
        self._await(lambda: any(words in line for line in self.lines), f"print {words!r}")

    def await_end(self) -> str:
        """Wait until the job is over; its state."""
        self._await(lambda: self.over, "end")
        return self.state

    def _await(self, true: Any, what: str) -> None:
        with self.changed:
            seen = self.changed.wait_for(lambda: true() or self.over, PATIENCE_S)
            assert seen and true(), f"job {self.name}, {self.state}, did not {what}:\n" + "".join(self.lines)

    @property
    def over(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "CANCELLED")

    def mark(self, step: str = "") -> str:
        """In the environment of all processes of the job, or of a step."""
        return f"{STEP}={self.home}/{self.name}.{step}"


class Slurm:
    """The controller. It runs jobs at once, as many as there are; to be called as a program is: tool, arguments."""

    def __init__(self, folder: Path) -> None:
        self.jobs: list[Job] = []
        self._folder = folder / "slurm"
        self._changed = Condition()
        self._numbers = itertools.count(41)
        self._lives: list[Thread] = []

    def __enter__(self) -> "Slurm":
        (self._folder / "bin").mkdir(parents=True)
        for tool in TOOLS:
            executable(self._folder / "bin" / tool, f'#!/bin/sh\nexec {sys.executable} {__file__} {tool} "$@"\n')
        self._server = _Server(("127.0.0.1", 0), _Request)
        self._server.slurm = self
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            with self._changed:
                job.state = job.state.replace("PENDING", "CANCELLED")
            _send(signal.SIGKILL, job.mark())
        for life in self._lives:
            life.join()
        self._server.shutdown()
        self._server.server_close()

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a tool as a user does, with these variables."""
        own = {"PATH": f"{self._folder}/bin:{os.environ['PATH']}", CONTROLLER: str(self._server.server_address[1])}
        environment = {**os.environ, **own, **variables}
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def submit(self, *words: str, **variables: str) -> Job:
        """What sbatch submits."""
        done = self("sbatch", *words, **variables)
        assert done.returncode == 0, done.stderr
        return self.jobs[-1]

    def warn(self, job: Job) -> None:
        """What the controller does when the time limit of a job is as near as its --signal says.

        All processes of all steps hear it, of the batch script's own none.
        """
        name, _, _ = job.options["signal"].partition("@")
        _send(signal.Signals[f"SIG{name}"], job.mark(), job.mark("batch"))

    # --- what the tools ask for; each returns what they print on stderr where it fails --------------------------------

    def sbatch(self, argv: list[str], environment: dict[str, str]) -> str:
        given, words = _options(argv)
        script = Path(words[0])
        written = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line[:8] == "#SBATCH "]
        options = {"nodes": "1", **_options(written)[0], **given}
        name = str(next(self._numbers))
        spool = self._folder / f"job{name}"
        shutil.copy(script, spool)
        spool.chmod(0o700)
        job = Job(name, [str(spool), *words[1:]], options, environment, self._folder, self._changed)
        self.jobs.append(job)
        self._start(job)
        return ""

    def scancel(self, argv: list[str], _: object) -> str:
        for job in (job for job in self.jobs if job.name in argv and not job.over):
            with self._changed:
                running, job.state = job.state == "RUNNING", "CANCELLED COMPLETING"
            if running:
                self._end(job)
        return ""

    def scontrol(self, argv: list[str], _: object) -> str:
        """A job that is completing, or cancelled, or done, is requeued like any other."""
        what, name = argv
        [job] = (job for job in self.jobs if (what, name) == ("requeue", job.name))
        if "requeue" not in job.options:
            return f"Requested operation is presently disabled for job {job.name}\n"
        with self._changed:
            if "PENDING" in job.state:
                return f"Job is pending execution for job {job.name}\n"
            running, over = job.state == "RUNNING", job.over
            job.restarts += 1
            job.state = "PENDING" if over else "PENDING COMPLETING"
        if running:
            self._end(job)
        if over:
            self._start(job)
        return ""

    # --- a job's life -------------------------------------------------------------------------------------------------

    def _start(self, job: Job) -> None:
        life = Thread(target=self._live, args=(job,))
        self._lives.append(life)
        life.start()

    def _live(self, job: Job) -> None:
        """Run the batch script once, until nobody holds its output any more, and again if it was requeued meanwhile."""
        with self._changed:
            job.state = "RUNNING"
            shell = subprocess.Popen(
                job.argv,
                cwd=ROOT,
                env=_batch_environment(job),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        reader = Thread(target=self._read, args=(job, shell))
        reader.start()
        code = shell.wait()
        reader.join(KILL_WAIT_S)
        _send(signal.SIGKILL, job.mark())
        reader.join()
        with self._changed:
            job.code = code
            again = "PENDING" in job.state
            if not again:
                job.state = "CANCELLED" if "CANCELLED" in job.state else "FAILED" if code else "COMPLETED"
            self._changed.notify_all()
        if again:
            self._start(job)

    def _read(self, job: Job, shell: "subprocess.Popen[str]") -> None:
        assert shell.stdout is not None
        with shell.stdout:
            for line in shell.stdout:
                with self._changed:
                    job.lines.append(line)
                    self._changed.notify_all()

    def _end(self, job: Job) -> None:
        """SIGTERM to all processes of a job; SIGKILL to those that are there after `KILL_WAIT_S`."""

        def kill() -> None:
            with self._changed:
                gone = self._changed.wait_for(lambda: "COMPLETING" not in job.state, KILL_WAIT_S)
            if not gone:
                _send(signal.SIGKILL, job.mark())

        _send(signal.SIGTERM, job.mark())
        Thread(target=kill, daemon=True).start()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    slurm: Slurm


class _Request(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        tool, argv, environment = json.loads(self.rfile.readline())
        assert isinstance(self.server, _Server)
        fault = getattr(self.server.slurm, tool)(argv, environment)
        self.wfile.write(json.dumps(fault).encode() + b"\n")


VALUED = ("A", "nodes")
"""Options whose value may be the next word."""


def _options(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Leading options, of the form --name=value or --name or one of `VALUED`, and the other words."""
    options, others = {}, list(words)
    while others and others[0].startswith("-"):
        name, _, value = others.pop(0).lstrip("-").partition("=")
        options[name] = others.pop(0) if name in VALUED and not value else value
    return options, others


def _batch_environment(job: Job) -> dict[str, str]:
    """That of the user who called sbatch; what `env_array_for_batch_job` sets; and the script is task 0 on node 0."""
    nodes, per_node = int(job.options["nodes"]), job.options.get("ntasks-per-node", "")
    tasks = job.options.get("ntasks") or (str(nodes * int(per_node)) if per_node else "")
    listed = "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"
    mark, _, step = job.mark("batch").partition("=")
    own = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": job.name, "SLURM_JOBID": job.name}
    own |= {"SLURM_JOB_NODELIST": listed, "SLURM_NODELIST": listed}
    own |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes)}
    own |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", mark: step}
    if job.restarts:
        own |= {"SLURM_RESTART_COUNT": str(job.restarts)}
    if per_node:
        own |= {"SLURM_NTASKS_PER_NODE": per_node}
    if cpus := job.options.get("cpus-per-task"):
        own |= {"SLURM_CPUS_PER_TASK": cpus}
    if tasks:
        each = -(-int(tasks) // nodes)
        own |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_TASKS_PER_NODE": f"{each}(x{nodes})"}
    return {**job.environment, **own}


def executable(path: Path, text: str) -> Path:
    """Write a program."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def _send(number: int, mark: str, spared: str = "") -> None:
    """A signal to every process whose environment has a mark that begins so, but for those with a mark to be spared."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if any(each.startswith(mark) and each != spared for each in variables):
                os.kill(int(folder.name), number)


# --- the tools, as programs -------------------------------------------------------------------------------------------


def _srun(argv: list[str]) -> int:
    """Run a step of this job's: what `env_array_for_step` sets, and each task's own place."""
    options, command = _options(argv)
    env = dict(os.environ)
    nodes = int(options.get("nodes", env["SLURM_JOB_NUM_NODES"]))
    per_node = options.get("ntasks-per-node", "" if "ntasks" in options else env.get("SLURM_NTASKS_PER_NODE", ""))
    tasks = nodes * int(per_node) if per_node else int(options.get("ntasks") or env.get("SLURM_NTASKS") or nodes)
    nodes = min(nodes, tasks)
    listed = "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"
    job, _, _ = env[STEP].rpartition(".")
    env |= {STEP: f"{job}.0", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": listed}
    env |= {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(tasks)}
    env |= {"SLURM_NNODES": str(nodes), "SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks)}
    running: dict[int, subprocess.Popen[bytes]] = {}  # by process id; reaped here alone

    def forward(number: int, _: object) -> None:
        for pid in tuple(running):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, lambda *_: _send(signal.SIGKILL, f"{STEP}={env[STEP]}"))
    for task, node, local in _places(tasks, nodes):
        own = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        process = subprocess.Popen(command, env={**env, **own})
        running[process.pid] = process
    codes = [0]
    while running:
        ended, status = os.wait()
        del running[ended]
        code = os.waitstatus_to_exitcode(status)
        codes.append(code if code >= 0 else 128 - code)
        if code and options.get("kill-on-bad-exit", "0") != "0" and not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, KILL_WAIT_S)
            _send(signal.SIGTERM, f"{STEP}={env[STEP]}")
    return max(codes)


def _places(tasks: int, nodes: int) -> Iterator[tuple[int, int, int]]:
    """(task, node, place on that node), as many on each node as on any other, and the rest on the first."""
    task = 0
    for node in range(nodes):
        for local in range(tasks // nodes + (node < tasks % nodes)):
            yield task, node, local
            task += 1


def _main(tool: str, *argv: str) -> int:
    if tool == "srun":
        return _srun(list(argv))
    if argv[:2] == ("show", "hostnames"):
        head, _, most = argv[2].rstrip("]").partition("[1-")
        print(*(f"{head}{node}" for node in range(1, int(most) + 1)) if most else [head], sep="\n")
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the real one has its answer before the job that calls it is ended
    with socket.create_connection(("127.0.0.1", int(os.environ[CONTROLLER]))) as link, link.makefile("rw") as lines:
        lines.write(json.dumps([tool, argv, dict(os.environ)]) + "\n")
        lines.flush()
        fault = json.loads(lines.readline())
    print(fault, file=sys.stderr, end="")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
