"""Times work on all ranks at once.

Ranks of a node share its cores, memory bandwidth and power, so the speed of one rank depends on the others: all ranks
run the same work at the same time. A time is the mean over many consecutive calls, which includes waits for a core; the
device is synchronized only after the last call.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan.ranks.process import Rank

REPEATS = 5
WARM_UP = 2
MOST_CALLS = 10_000
Work = Callable[[], object]


class Time(NamedTuple):
    """Seconds per call: median of the repeats. spread: (longest - shortest) / median of the repeats."""

    seconds: float
    spread: float


class Clock:
    """Measures on rank `me`, with about `slot` seconds per measurement."""

    def __init__(self, me: Rank, slot: float) -> None:
        self.me, self.slot = me, slot

    def agree(self, value: float) -> float:
        """The largest of all ranks' values; a barrier, so all ranks must call it."""
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    def each(self, work: Work) -> Time:
        """Time of work that ranks do independently, each as often as it can; all ranks call it."""
        self._run(work, WARM_UP)
        calls = self._calls(lambda calls: self._run(work, calls))
        self.agree(0.0)
        until, seconds = time.perf_counter() + self.slot, list[float]()
        while (
            len(seconds) < REPEATS or time.perf_counter() < until
        ):  # all stop at the same time: a rank that goes on alone would be faster
            seconds.append(self._run(work, calls) / calls)
        return _summed(seconds)

    def together(self, work: Work) -> Time:
        """Time of work in which ranks wait for each other, so that all do it equally often; all ranks call it."""
        self._run(work, WARM_UP)
        calls = self._calls(lambda calls: self.agree(self._run(work, calls)))
        seconds = []
        for _ in range(REPEATS):
            self.agree(0.0)
            seconds.append(self._run(work, calls) / calls)
        return _summed(seconds)

    def _calls(self, run: Callable[[int], float]) -> int:
        """Calls per repeat, found by doubling: long against the time slices of ranks that share a core."""
        calls = 1
        while calls < MOST_CALLS and run(calls) < self.slot / REPEATS / 2:
            calls *= 2
        return calls

    def _run(self, work: Work, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if self.me.device.type != "cpu":
            torch.accelerator.synchronize(self.me.device)
        return time.perf_counter() - began


def _summed(seconds: list[float]) -> Time:
    middle = statistics.median(seconds)
    return Time(middle, (max(seconds) - min(seconds)) / middle)
