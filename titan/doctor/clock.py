"""Times pieces of work on all ranks at once.

Ranks of a node share its cores, its memory bus and its power, so what a rank reaches depends on the others: every rank
does the same work in the same while. A time is that of many calls in a row, so that it holds what a rank waits for its
core; the device is waited for at the end of them alone.
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
    """Seconds of a call: the median of the repeats, and (longest - shortest) / median among them."""

    seconds: float
    spread: float


class Clock:
    """Measures for about `slot` seconds a time."""

    def __init__(self, me: Rank, slot: float) -> None:
        self.me, self.slot = me, slot

    def agree(self, value: float) -> float:
        """The largest of all ranks' values; nobody goes on before all are here."""
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    def each(self, work: Work) -> Time:
        """Of work that ranks do beside each other, each as often as it can."""
        self._run(work, WARM_UP)
        calls = self._calls(lambda calls: self._run(work, calls))
        self.agree(0.0)
        until, seconds = time.perf_counter() + self.slot, list[float]()
        while (
            len(seconds) < REPEATS or time.perf_counter() < until
        ):  # all stop at the same time: who is left would have more
            seconds.append(self._run(work, calls) / calls)
        return _summed(seconds)

    def together(self, work: Work) -> Time:
        """Of work in which ranks wait for each other: all do it equally often."""
        self._run(work, WARM_UP)
        calls = self._calls(lambda calls: self.agree(self._run(work, calls)))
        seconds = []
        for _ in range(REPEATS):
            self.agree(0.0)
            seconds.append(self._run(work, calls) / calls)
        return _summed(seconds)

    def _calls(self, run: Callable[[int], float]) -> int:
        """So many that a repeat is long beside the time slices in which ranks share a core; found by doubling."""
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
