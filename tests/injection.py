"""Planned faults of a run, and the witness who hears its events, strikes from outside and sees its processes end."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

GONE_S = 60.0
"""Longest time from the end of a run's first process to that of its last."""

ERRORS = ("EIO", "ENOSPC", "ESTALE")
"""Faults of the file system, by the name of their errno."""


CALLS = {"mkdir": 4, "write": 20, "put": 60, "fsync": 20, "rename": 12, "remove": 30, "read": 30, "get": 20}
"""Latest call of each kind that fails with an error; ENOSPC does not meet those that take no room."""

JUMPS = (-10 * 365 * 86400.0, -3600.0, 3600.0, 10 * 365 * 86400.0)
"""Seconds by which a clock jumps."""

KINDS = {"kill": 50, "EIO": 9, "ENOSPC": 9, "ESTALE": 8, "busy": 6, "second": 5, "growth": 6, "clock": 7}
"""How often each kind of fault is drawn, against the others."""


@dataclass(frozen=True)
class Fault:
    """One planned fault: at the `at`-th event `point` of a rank, or from outside after `at` events of all ranks.

    kind: "kill", a kill -9;  one of `ERRORS`, with which this event and the next `span` - 1 of that point fail;
        "busy", what was about to be removed there cannot be, until the run ends;  "second", the same command is started
        a second time and awaited;  "growth", the file of the corpus about to be read grows;  "clock", the wall clock
        jumps by `jump` seconds.
    victim: of a kill: the rank; its launcher, if it has one; or, from outside, "all" of them at once.
    slow: longest wait at an event, in seconds.  place: a pattern; only events at such a path count.
    """

    point: str
    at: int
    rank: int
    victim: str = "rank"
    slow: float = 0.0
    place: str = ""
    kind: str = "kill"
    span: int = 1
    jump: float = 0.0


NEVER = Fault("", 0, 0)


def drawn(rng: random.Random, kind: str, ranks: int) -> Fault:
    """A fault that is no kill."""
    if kind in ERRORS:
        point = rng.choice([p for p in CALLS if kind != "ENOSPC" or p in ("mkdir", "write", "put", "fsync", "rename")])
        span = rng.choice((1, 1, 3, 10_000))  # once, for a while, or for good
        return Fault(point, rng.randint(1, CALLS[point]), rank_of(rng, point, ranks), kind=kind, span=span)
    if kind == "busy":
        return Fault("remove", rng.randint(1, 20), 0, place="/checkpoints/", kind=kind)
    if kind == "growth":
        return Fault("corpus", rng.randint(13, 36), 0, kind=kind)  # 12 files, each hashed, read and looked at again
    point = rng.choice(("step", "fsync", "rename"))
    place = "" if point == "step" else "/checkpoints"
    return Fault(point, rng.randint(1, 20), 0, place=place, kind=kind, jump=rng.choice(JUMPS))


def rank_of(rng: random.Random, point: str, ranks: int) -> int:
    """Rank 0 alone makes, renames and removes folders."""
    return 0 if point in ("mkdir", "rename", "remove") else rng.randrange(ranks)


@dataclass
class Witness:
    """Who is seen in a run: process ids by rank, and the launcher's where it is a process of ours."""

    fault: Fault
    note: Path
    pids: dict[int, int] = field(default_factory=dict)
    launcher: int | None = None
    events: int = 0

    def hear(self, line: str) -> None:
        """An event; the planned one is the victim's last."""
        rank, pid = map(int, line.split())
        self.pids[rank] = pid
        self.events += 1
        if self.fault.point == "outside" and self.events >= self.fault.at and not self.note.exists():
            self.strike()

    def strike(self) -> None:
        wanted = {"rank": [self.pids.get(self.fault.rank)], "launcher": [self.launcher]}
        victims = wanted.get(self.fault.victim, [self.launcher, *self.pids.values()])
        for pid in [pid for pid in victims if pid is not None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.note.write_text(f"outside, after {self.events} events\n")


@contextlib.contextmanager
def witnessed(pipe: Path, note: Path, fault: Fault) -> Iterator[Witness]:
    """Hear the events of a run, and let go of it only when all of its processes are gone."""
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(pipe, os.O_WRONLY)
    os.set_blocking(reading, True)
    witness = Witness(fault, note)

    def read() -> None:
        with os.fdopen(reading) as events:
            for line in events:
                witness.hear(line)

    reader = Thread(target=read)
    reader.start()
    try:
        yield witness
    finally:
        os.close(writing)
        reader.join(GONE_S)
        assert not reader.is_alive(), f"processes of the run go on {GONE_S:g} s after it ended: {witness.pids}"
