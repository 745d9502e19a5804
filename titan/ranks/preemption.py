"""Preemption: when a scheduler or a time limit asks any rank to stop, all ranks stop after the same step.

A handler only records SIGTERM and SIGUSR1; the step or save in progress continues. With each step the ranks agree on
the most severe signal that any of them has recorded: an all-reduce of one integer over gloo, from host memory, begun
before the step and read after it, so that no device is waited for and all ranks read the same. A signal that comes
during step n is therefore acted upon after step n + 1 at the latest; one that comes before the first step, after the
first. A run that is asked to stop always does a step first, so that it makes progress.

Cost: an all-reduce of 8 bytes per step, overlapped with the step.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STARTED = "TITAN_STARTED"
"""Environment variable by which ranks know when the command was started, in seconds of the monotonic clock."""

_REASONS = ("", "run.max_minutes", "SIGUSR1", "SIGTERM")
"""What asks a run to stop, the gravest last: it is the one that counts. After SIGTERM nobody wants the run to go on."""

_noted: set[int] = set()
_imported = time.monotonic()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Note `SIGNALS` instead of dying of them; outside of the main thread, where none can be caught, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _note not in before.values():  # else somebody further up listens, too
            _noted.clear()


def _note(number: int, _: FrameType | None) -> None:
    _noted.add(number)


def heard() -> frozenset[int]:
    """The signals that this rank, or by the agreement of all ranks another one, was sent while this one listens."""
    return frozenset(_noted)


class Preemption:
    """What asks the run to stop, agreed on by all ranks in the process group of all; `ask` and `due` around each step.

    max_minutes: since the command was started, on whichever rank's clock comes first; 0 for no limit.
    """

    def __init__(self, world_size: int, max_minutes: float) -> None:
        self._ends = float(os.environ.get(STARTED, _imported)) + 60 * max_minutes if max_minutes else float("inf")
        self._alone = world_size == 1
        self._gravest = torch.zeros((), dtype=torch.int64)
        self._asked: dist.Work | None = None

    def ask(self) -> None:
        """Before a step: begin to ask all ranks."""
        self._gravest.fill_(self._mine())
        if not self._alone:
            self._asked = dist.all_reduce(self._gravest, dist.ReduceOp.MAX, async_op=True)

    def due(self) -> str:
        """After the step: the name of what asks the run to stop, the same on all ranks; empty to go on."""
        if self._asked is not None:
            self._asked.wait()
        reason = _REASONS[int(self._gravest)]
        if reason in signal.Signals.__members__:
            _noted.add(signal.Signals[reason])
        return reason

    def _mine(self) -> int:
        if _noted:
            return max(_REASONS.index(signal.Signals(number).name) for number in _noted)
        return _REASONS.index("run.max_minutes" if time.monotonic() > self._ends else "")
