"""Injects faults at chosen moments: kills, errors of the file system, a corpus that grows, a clock that jumps, a second
start of the same command; on under `CHAOS` in the environment (tests.chaos).

A moment is the n-th event of a kind in one rank: a hook of the step, or a call that touches the run's folder or the
corpus, on whichever thread. Every event goes to a pipe too, so that somebody outside can choose a moment and see all
ranks end.
"""

import builtins
import errno
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from titan.contracts import Technique, register

CALLS = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove", "os.link": "rename"}

OF_A_RANK = ("CHAOS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a second start must not inherit; TORCHELASTIC_... and TITAN_... too."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options: a run's TOML is the same with and without a plan."""


@dataclass(frozen=True)
class Plan:
    """What happens and when: the fields of `tests.injection.Fault`, and where.

    folder: of the run.  corpus: folder of its text.  point: step, corpus (a file of the corpus is opened), mkdir, write
    and read (a file is opened), put and get (bytes are), fsync, cut (the file at its fsync loses its second half),
    rename, remove; "" for never.  pipe: takes a line "RANK PID" an event.  note: file that is told what was struck, a
    line each.  again: the words of the run's command.
    """

    folder: str
    corpus: str
    pipe: str
    note: str
    again: list[str]
    point: str
    at: int
    rank: int
    victim: str
    slow: float
    place: str
    kind: str
    span: int
    jump: float


class _Injector:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.count = plan, 0
        self.pid, self.rank, self.pipe = 0, 0, -1
        self.busy = ""
        self.striking = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Hear of every call before it is made."""
        if event == "open" and isinstance(args[0], str):
            if args[0].startswith(self.plan.folder):
                self.happens("write" if args[2] & (os.O_WRONLY | os.O_RDWR) else "read", args[0])
            elif args[0].startswith(f"{self.plan.corpus}/"):
                self.happens("corpus", args[0])
        elif event in CALLS:
            path, inside = os.fspath(args[0]), -1 if event == "os.link" else args[-1]
            path = path if inside == -1 else f"{_path_of(inside)}/{path}"
            if path.startswith(self.plan.folder):
                self.happens(CALLS[event], path)

    def fsync(self, descriptor: int) -> None:
        path = _path_of(descriptor)
        if path.startswith(self.plan.folder):
            self.happens("fsync", path)
            self.happens("cut", path, descriptor)
        _fsync(descriptor)

    def write(self, descriptor: int, data: bytes) -> int:
        path = _path_of(descriptor)
        if path.startswith(self.plan.folder):
            self.happens("put", path)
        return _write(descriptor, data)

    def pwrite(self, descriptor: int, data: bytes, at: int) -> int:
        path = _path_of(descriptor)
        if path.startswith(self.plan.folder):
            self.happens("put", path)
        return _pwrite(descriptor, data, at)

    def open(self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        """`open`, whose reads and writes are events where the file is in the run's folder."""
        if isinstance(file, int) or "opener" in named or not str(file).startswith(self.plan.folder):
            return _open(file, mode, buffering, *more, **named)
        raw = _Raw(os.fspath(file), mode.replace("b", "").replace("t", ""))
        if "b" in mode and not buffering:
            return raw
        buffered = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        return buffered(raw) if "b" in mode else io.TextIOWrapper(buffered(raw), *more, **named)

    def happens(self, point: str, path: str, descriptor: int | None = None) -> None:
        if self.striking:
            return
        if os.getpid() != self.pid:
            self.pid, self.rank = os.getpid(), int(os.environ.get("RANK", "0"))
            self.pipe = os.open(self.plan.pipe, os.O_WRONLY)
            self.random = random.Random(self.pid)
        plan = self.plan
        _write(self.pipe, f"{self.rank} {self.pid}\n".encode())
        time.sleep(self.random.uniform(0, plan.slow))
        if (self.rank, point) == (plan.rank, plan.point) and re.search(plan.place, path):
            self.count += 1
            if plan.at <= self.count < plan.at + plan.span:
                self.striking = True
                try:
                    self.strike(point, path, descriptor)
                finally:
                    self.striking = False
        elif point == "remove" and path == self.busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    def strike(self, point: str, path: str, descriptor: int | None) -> None:
        kind, told = self.plan.kind, f"{point} {path}"
        if kind == "second":
            told = f"{told}: {self.start_again()}"
        with _open(self.plan.note, "a") as note:
            note.write(f"{told}\n")
        if kind == "kill":
            if point == "cut" and descriptor is not None and os.path.isfile(path):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getppid() if self.plan.victim == "launcher" else os.getpid(), signal.SIGKILL)
        elif kind == "busy":
            self.busy = path
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        elif kind == "growth":
            with _open(path, "a") as text:
                text.write("It grows. " * 50)
        elif kind == "clock":
            _jump(self.plan.jump)
        elif kind.startswith("E"):
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number), path)

    def start_again(self) -> str:
        """The same command, while this run waits; how it ended."""
        own = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        own = {name: value for name, value in own.items() if not name.startswith(("TORCHELASTIC_", "TITAN_"))}
        own["NPROC"] = os.environ.get("WORLD_SIZE", "1")
        done = subprocess.run(self.plan.again, env=own, capture_output=True, text=True, timeout=150)
        return f"exit code {done.returncode}: {' '.join(done.stderr.split())[-1000:]}"


class _Raw(io.FileIO):
    def write(self, data: Any) -> int:
        assert _injector is not None
        view = memoryview(data).cast("B")
        try:
            _injector.happens("put", str(self.name))
        except OSError:
            super().write(view[: len(view) // 2])  # as a disk that fills up meanwhile
            raise
        return super().write(view)

    def readinto(self, buffer: Any) -> int:
        assert _injector is not None
        _injector.happens("get", str(self.name))
        return super().readinto(buffer)

    def readall(self) -> bytes:
        assert _injector is not None
        _injector.happens("get", str(self.name))
        return super().readall()


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _jump(seconds: float) -> None:
    true, true_ns = time.time, time.time_ns
    time.time = lambda: true() + seconds
    time.time_ns = lambda: true_ns() + int(seconds) * 10**9


_fsync, _write, _pwrite, _open = os.fsync, os.write, os.pwrite, open
_injector: _Injector | None = None
if "CHAOS" in os.environ:
    _injector = _Injector(Plan(**json.loads(os.environ["CHAOS"])))
    sys.addaudithook(_injector.audit)
    os.fsync, os.write, os.pwrite = _injector.fsync, _injector.write, _injector.pwrite
    builtins.open = io.open = _injector.open


@register
class FaultInjector(Technique):
    """Counts the moments of a step."""

    name = "fault_injector"
    Config = Config
    phase = "recompute"
    preserves_numerics = True

    def before_step(self, step: int) -> None:
        self._moment(f"before step {step}")

    def after_backward(self) -> None:
        self._moment("after a backward")

    def before_update(self, grad_norm: Any) -> None:
        self._moment("before an update")

    def after_step(self, step: int, updated: Any) -> None:
        self._moment(f"after step {step}")

    def _moment(self, name: str) -> None:
        if _injector is not None:
            _injector.happens("step", name)
