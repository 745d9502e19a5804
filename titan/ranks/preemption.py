"""Preemption: when a scheduler or a time limit asks any rank to stop, all ranks stop after the same step.

A handler only records SIGTERM and SIGUSR1 (`meeting.signals`); the step or save in progress continues. The ranks
agree on the most severe signal that any of them has recorded: an all-reduce over gloo, from host memory, begun before a
step and read after it, so that no device is waited for and all ranks read the same.

The same all-reduce agrees on the length of a step, that of the slowest rank, and so on the number of steps until the
next one: as many as fit into `INTERVAL_S`, at most `MOST_STEPS`, and at most twice as many as before. Each of the first
`FIRST_STEPS` steps asks, because compilation and warm-up say nothing about later steps. So does a step that ends with
a validation or a save, and the step after such a step. Steps of a second or longer all ask.

A signal that comes during step n is therefore acted upon after step n + 1 at the latest, or within about two seconds,
whichever is later, while steps keep their length. A run that is asked to stop while it trains always does a step
first, so that it makes progress. A signal that comes before training begins ends the run at once (`signals.raised`).

Cost: an all-reduce of 16 bytes per second or per step, whichever is rarer, overlapped with the step.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import STARTED

_REASONS = ("", "run.max_minutes", "SIGUSR1", "SIGTERM")
"""What asks a run to stop, the gravest last: it is the one that counts. After SIGTERM nobody wants the run to go on."""

INTERVAL_S = 1.0
"""Between two questions, where steps are shorter. The answer is read a step later."""

FIRST_STEPS = 10  # steps of a process that all ask

MOST_STEPS = 25
"""Between two questions, in case steps become much longer than they were when the ranks agreed on the next one."""

_imported = time.monotonic()


class Preemption:
    """What asks the run to stop, agreed on by all ranks in the process group of all; `ask` and `due` around each step.

    max_minutes: since the command was started, on whichever rank's clock comes first; 0 for no limit.
    group: the ranks that are to agree, in place of all.
    """

    def __init__(self, world_size: int, max_minutes: float, group: dist.ProcessGroup | None = None) -> None:
        self._ends = float(os.environ.get(STARTED, _imported)) + 60 * max_minutes if max_minutes else float("inf")
        self._alone, self._group = world_size == 1, group
        self._shared = torch.zeros(2, dtype=torch.int64)  # the gravest reason, and the longest step in us
        self._asked: dist.Work | None = None
        self._asked_at = time.monotonic()
        self._steps = 0  # all that have begun
        self._asked_in = 0  # the last of them that asked
        self._every = 1

    def ask(self, *, now: bool = False) -> None:
        """Before a step: begin to ask all ranks, if it is time. now: in any case; the same on all ranks."""
        self._steps += 1
        if self._alone:
            self._shared[0] = self._mine()
        elif now or self._steps - self._asked_in >= self._every:
            self._shared[0], self._shared[1] = self._mine(), self._lap_us()
            self._share()

    def _share(self) -> None:
        self._asked = dist.all_reduce(self._shared, dist.ReduceOp.MAX, self._group, async_op=True)

    def due(self) -> str:
        """After the step: the name of what asks the run to stop, the same on all ranks; empty to go on."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            if self._steps >= FIRST_STEPS:  # steps until the next question, from what all ranks know alone
                fit = int(1e6 * INTERVAL_S) // max(1, int(self._shared[1]))
                self._every = max(1, min(fit, MOST_STEPS, 2 * self._every))
        return self.reason(int(self._shared[0]))

    def _lap_us(self) -> int:
        """Mean length of the steps since this rank asked last, with all that came between them; begins the next lap."""
        now = time.monotonic()
        length = (now - self._asked_at) / (self._steps - self._asked_in)
        self._asked_at, self._asked_in = now, self._steps
        return round(1e6 * length)

    def _mine(self) -> int:
        return _REASONS.index(signals.gravest() or ("run.max_minutes" if time.monotonic() > self._ends else ""))

    def reason(self, number: int) -> str:
        """The name of a reason to stop. That of a signal counts as heard by this rank, too."""
        name = _REASONS[number]
        if name in signal.Signals.__members__:
            signals.note(signal.Signals[name])
        return name
