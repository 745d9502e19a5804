"""Makes the file system slow and kills processes at chosen moments; on under `CHAOS` in the environment (tests.chaos).

A moment is the n-th event of a kind in one rank: a hook of the step, or a call that touches the run's folder, on
whichever thread. Every event goes to a pipe too, so that somebody outside can choose a moment and see all ranks end.
"""

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from titan.contracts import Technique, register

CALLS = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options: a run's TOML is the same with and without a plan."""


@dataclass(frozen=True)
class Plan:
    """When a rank dies, or kills its launcher: before the `at`-th event `point` of that rank.

    folder: of the run.  point: step, mkdir, write, fsync, cut (the file at its fsync loses its second half), rename,
    remove, read; "" for never.  place: a pattern; only events at such a path count.  slow: longest wait at an event, in
    seconds.  pipe: takes a line "RANK PID" an event.  note: file that is told what was struck.
    """

    folder: str
    rank: int
    point: str
    at: int
    victim: str
    slow: float
    place: str
    pipe: str
    note: str


class _Saboteur:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.count = plan, 0
        self.pid, self.rank, self.pipe = 0, 0, -1

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Hear of every call before it is made."""
        if event == "open" and isinstance(args[0], str) and args[0].startswith(self.plan.folder):
            self.happens("write" if args[2] & (os.O_WRONLY | os.O_RDWR) else "read", args[0])
        elif event in CALLS:
            path, inside = os.fspath(args[0]), args[-1]
            path = path if inside == -1 else f"{os.readlink(f'/proc/self/fd/{inside}')}/{path}"
            if path.startswith(self.plan.folder):
                self.happens(CALLS[event], path)

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self.plan.folder):
            self.happens("fsync", path)
            self.happens("cut", path, descriptor)
        _fsync(descriptor)

    def happens(self, point: str, path: str, descriptor: int | None = None) -> None:
        if os.getpid() != self.pid:
            self.pid, self.rank = os.getpid(), int(os.environ.get("RANK", "0"))
            self.pipe = os.open(self.plan.pipe, os.O_WRONLY)
            self.random = random.Random(self.pid)
        plan = self.plan
        os.write(self.pipe, f"{self.rank} {self.pid}\n".encode())
        time.sleep(self.random.uniform(0, plan.slow))
        if (self.rank, point) == (plan.rank, plan.point) and re.search(plan.place, path):
            self.count += 1
            if self.count == plan.at:
                self.strike(point, path, descriptor)

    def strike(self, point: str, path: str, descriptor: int | None) -> None:
        with open(self.plan.note, "w") as note:
            note.write(f"{point} {path}")
        if point == "cut" and descriptor is not None and os.path.isfile(path):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        os.kill(os.getppid() if self.plan.victim == "launcher" else os.getpid(), signal.SIGKILL)


_fsync = os.fsync
_saboteur: _Saboteur | None = None
if "CHAOS" in os.environ:
    _saboteur = _Saboteur(Plan(**json.loads(os.environ["CHAOS"])))
    sys.addaudithook(_saboteur.audit)
    os.fsync = _saboteur.fsync


@register
class Saboteur(Technique):
    """Counts the moments of a step."""

    name = "saboteur"
    Config = Config
    phase = "recompute"
    parity = True

    def before_step(self, step: int) -> None:
        self._moment(f"before step {step}")

    def after_backward(self) -> None:
        self._moment("after a backward")

    def before_update(self, grad_norm: Any) -> None:
        self._moment("before an update")

    def after_step(self, step: int) -> None:
        self._moment(f"after step {step}")

    def _moment(self, name: str) -> None:
        if _saboteur is not None:
            _saboteur.happens("step", name)
