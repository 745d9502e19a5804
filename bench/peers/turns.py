"""Trainers in processes of their own that take their steps in turns, so that a slow moment of the machine slows all.

Any training loop can be made to wait: `Waiting` stands in for its data, and gives out a batch only when it is told to.
A step lasts from one batch to the demand for the next, so it is all of the loop: forward, backward, update, and what
the trainer does besides.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from titan.ranks.meeting.rendezvous import listen

Batch = TypeVar("Batch")

ANSWERS = "BENCH_ANSWERS"
"""Environment variable: the file descriptor that a rank answers on. What its trainer prints goes to stderr."""


def share_cores(ranks: int) -> None:
    """Use all cores in the one rank of a trainer, or one core in each of several."""
    torch.set_num_threads(1 if ranks > 1 else os.cpu_count() or 1)


class Waiting:
    """An endless iterable of a trainer's batches, each of which waits for a line of stdin.

    Before it waits, it answers with the seconds since the batch before, 0 the first time. The process ends where stdin
    does: no trainer has to be told that it is over.
    """

    def __init__(self, batches: Iterable[Batch], ended: Callable[[], object] = lambda: os._exit(0)) -> None:
        self._batches, self._ended = iter(batches), ended
        self._answers = os.fdopen(int(os.environ[ANSWERS]), "w", buffering=1)

    def __iter__(self) -> Iterator[Batch]:
        began = time.perf_counter()
        taken = 0.0
        for batch in self._batches:
            self._answers.write(f"{taken}\n")
            if not sys.stdin.readline():
                self._ended()
                return
            began = time.perf_counter()
            yield batch
            taken = time.perf_counter() - began


class Trainer:
    """The ranks of one trainer, started and waiting for their first step."""

    def __init__(self, module: str, asked: Mapping[str, Any], ranks: int) -> None:
        with listen(0) as probe:
            port = probe.getsockname()[1]
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.name, self._ranks, self._answers = module, list[subprocess.Popen[str]](), list[Any]()
        for rank in range(ranks):
            # One rank alone is no distributed job: Hugging Face's Trainer would wrap its model for one.
            own = {**place, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            self._start([sys.executable, "-m", module, json.dumps(asked)], {key: str(own[key]) for key in own})

    def _start(self, command: Sequence[str], own: Mapping[str, str]) -> None:
        read, write = os.pipe()
        environment = {**os.environ, **own, ANSWERS: str(write)}
        self._ranks.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, pass_fds=(write,), text=True
            )
        )
        os.close(write)
        self._answers.append(os.fdopen(read))

    def go(self) -> None:
        """Give every rank a batch."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()

    def seconds(self) -> float:
        """Seconds of the step under way, of the rank that takes longest; waits for its end, or for the first demand.

        Raises:
            RuntimeError: a rank has ended.
        """
        lines = [answers.readline() for answers in self._answers]
        if not all(lines):
            raise RuntimeError(f"{self.name}: a rank ended with {self.close()}")
        return max(map(float, lines))

    def peak_gib(self) -> float:
        """The most memory that a rank has held at once since it began."""
        return max(_peak_gib(rank.pid) for rank in self._ranks)

    def close(self) -> list[int]:
        """End the ranks; returns their exit codes."""
        for rank in self._ranks:
            rank.kill()
        return [rank.wait() for rank in self._ranks]


def _peak_gib(process: int) -> float:
    with open(f"/proc/{process}/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
