"""Planned deaths of a run's processes, and the witness who hears its events, strikes from outside and sees all end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

GONE_S = 60.0
"""Longest time from the end of a run's first process to that of its last."""


@dataclass(frozen=True)
class Kill:
    """One planned death: before the `at`-th event `point` of a rank, or from outside after `at` events of all ranks.

    victim: the rank; its launcher, if it has one; or, from outside, "all" of them at once.  slow: longest wait at an
    event, in seconds.  place: a pattern; only events at such a path count.
    """

    point: str
    at: int
    rank: int
    victim: str = "rank"
    slow: float = 0.0
    place: str = ""


NEVER = Kill("", 0, 0)


@dataclass
class Witness:
    """Who is seen in a run: process ids by rank, and the launcher's where it is a process of ours."""

    kill: Kill
    note: Path
    pids: dict[int, int] = field(default_factory=dict)
    launcher: int | None = None
    events: int = 0

    def hear(self, line: str) -> None:
        """An event; the planned one is the victim's last."""
        rank, pid = map(int, line.split())
        self.pids[rank] = pid
        self.events += 1
        if self.kill.point == "outside" and self.events >= self.kill.at and not self.note.exists():
            self.strike()

    def strike(self) -> None:
        wanted = {"rank": [self.pids.get(self.kill.rank)], "launcher": [self.launcher]}
        victims = wanted.get(self.kill.victim, [self.launcher, *self.pids.values()])
        for pid in [pid for pid in victims if pid is not None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.note.write_text(f"outside, after {self.events} events")


@contextlib.contextmanager
def witnessed(pipe: Path, note: Path, kill: Kill) -> Iterator[Witness]:
    """Hear the events of a run, and let go of it only when all of its processes are gone."""
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(pipe, os.O_WRONLY)
    os.set_blocking(reading, True)
    witness = Witness(kill, note)

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
