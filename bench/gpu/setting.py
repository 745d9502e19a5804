"""Where measurements are taken, and how pieces of work are timed there."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
AHEAD_CYCLES = 40_000_000
"""Clock cycles, some 20 ms, for which a device waits while the host queues the calls that are timed."""


@dataclass(frozen=True)
class Setting:
    """folder: scratch, for runs, tokens and checkpoints.  reference: the folder of the CPU's curves.

    log: file for what measurements print.  rehearse: take every measurement on the CPU, in tiny sizes; the figures
    mean nothing.
    """

    folder: Path
    reference: Path
    log: Path
    rehearse: bool

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    def size(self, measured: T, rehearsed: T) -> T:
        """A size, as it is on a GPU or in a rehearsal."""
        return rehearsed if self.rehearse else measured

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of one call, the device waited for before and after."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def each(self, work: Callable[[], object], calls: int, *, ahead: bool = False) -> list[float]:
        """Seconds of consecutive calls, queued one after the other, between events that the device records.

        ahead: let the device wait until the host has queued them all, so that the host's time does not count.
        """
        if self.rehearse:
            return [self.timed(work) for _ in range(calls)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        self.synchronize()
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]

    def median(self, work: Callable[[], object], calls: int = 10, warm_up: int = 3) -> float:
        """Median seconds of a call on the device, without the host's time."""
        calls, warm_up = self.size((calls, warm_up), (2, 1))
        for _ in range(warm_up):
            work()
        return statistics.median(self.each(work, calls, ahead=True))

    def peak_gib(self, work: Callable[[], object]) -> float | None:
        """Most memory that a call has allocated beyond what was there; None on a CPU."""
        if self.rehearse:
            work()
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def free(self) -> None:
        """Give back what the last job has left."""
        torch.compiler.reset()
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()


@contextmanager
def no_garbage() -> Iterator[None]:
    """Without automatic collections of garbage, as in a run and in torchtitan's."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
