"""Where measurements are taken, and how pieces of work are timed there."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """folder: for runs, tokens and checkpoints.  reference: the folder of the CPU's curves.

    rehearse: take every measurement on the CPU, in tiny sizes; the figures mean nothing.
    """

    folder: Path
    reference: Path
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

    def median(self, work: Callable[[], object], calls: int = 10, warm_up: int = 3) -> float:
        """Median seconds of a call."""
        calls, warm_up = self.size((calls, warm_up), (2, 1))
        for _ in range(warm_up):
            work()
        return statistics.median(self.timed(work) for _ in range(calls))

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
        """Give back what the last measurement has left."""
        torch.compiler.reset()
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
