"""Collectives of a checkpoint's save or load: a failure on one rank is raised on all, so that none hangs."""

import contextlib
import errno
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from titan.errors import EXIT_FAILED, CheckpointError, TitanError

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class RankFailure(CheckpointError):
    """What went wrong on some rank, raised on all.

    disk_full: a user can mend it by making room.  unreadable: it was an `UnreadableError`.  exit_code: of the error.
    """

    def __init__(self, message: str, disk_full: bool, unreadable: bool, exit_code: int) -> None:
        super().__init__(message)
        self.disk_full, self.unreadable, self.exit_code = disk_full, unreadable, exit_code


class Ranks:
    """All ranks, over a gloo group of their own: a save in the background must not meet training's collectives.

    Made by all ranks together; without a process group it is this process alone.  patience: seconds a rank waits.
    """

    def __init__(self, rank: int, size: int, patience: float = 1800.0) -> None:
        self.rank, self.size = rank, size
        self._wait = timedelta(seconds=patience)
        self._group = dist.new_group(backend="gloo", timeout=self._wait) if dist.is_initialized() else None
        self._left = False
        self._former: list[dist.ProcessGroup | None] = []

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of all of them; None: this rank is alone. Raises a RuntimeError where it has left."""
        if self._left:
            raise RuntimeError("this rank has left the group for checkpoints")
        return self._group

    def connect(self) -> None:
        """Exchange something with each rank that a save exchanges something with, so that all connections are there.

        Gloo connects two ranks when they first exchange data. One would then wait a minute and more for a rank that is
        gone or has left, as no connection is there that could be closed.
        """
        self.gather_first(None)
        self.first(lambda: None)

    def leave(self) -> None:
        """After a collective failed, as a rank is gone: close the connections, so that all others fail too.

        They would wait for this rank, as long as their patience lasts. Gloo closes all connections of a group where a
        receive is late; nobody sends what is waited for here. To destroy the group would close them too, but it waits,
        holding the GIL, for a thread that may need the GIL to end (2.13).
        """
        for neighbor in {(self.rank + 1) % self.size, (self.rank - 1) % self.size} - {self.rank}:
            with contextlib.suppress(RuntimeError):
                late = dist.irecv(torch.empty(1), group=self.group, group_src=neighbor, tag=1)
                assert late is not None
                late.wait(timedelta(milliseconds=1))
        self._left = True

    def go_on_with(self, ranks: Sequence[int]) -> None:
        """From now on only these, rank 0 among them, counted anew in this order; called by each of them."""
        self._former.append(self._group)  # see `leave`
        self._group = dist.new_group(list(ranks), self._wait, backend="gloo")
        self.rank, self.size, self._left = dist.get_rank(self._group), len(ranks), False
        self.connect()

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank, on all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_first(self, value: T) -> list[T]:
        """Everybody's value, by rank, on rank 0; nothing on others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: Sequence[T] | None) -> T:
        """What rank 0 gives for this rank; `values` has one per rank, and is None on others."""
        if self.group is None:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if values is None else list(values), src=0, group=self.group)
        return cast(T, received[0])

    def each(self, act: Callable[[], T]) -> T:
        """Act on every rank; returns what it returned on this one. A failure is raised on all, as a RankFailure."""
        value: T | None = None
        failure: Exception | None = None
        try:
            value = act()
        except Exception as error:
            failure = error
        failures = [each for each in self.gather(_described(failure, self.rank)) if each is not None]
        if failures:
            full = [each for each in failures if each[1]]
            raise RankFailure(*(full or failures)[0]) from failure
        return cast(T, value)

    def first(self, act: Callable[[], T]) -> T:
        """Act on rank 0 alone; returns what it returned, on all ranks. Raises as `each`."""
        values = [self.each(lambda: act() if self.rank == 0 else None)]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return cast(T, values[0])


def _described(error: Exception | None, rank: int) -> tuple[str, bool, bool, int] | None:
    """What the `RankFailure` of an error is made of, fit to be sent to other ranks."""
    if error is None:
        return None
    if isinstance(error, TitanError):
        return str(error), getattr(error, "disk_full", False), getattr(error, "unreadable", False), error.exit_code
    text = str(error).strip() or type(error).__name__
    full = isinstance(error, OSError) and error.errno in _FULL
    return f"rank {rank}: {text.splitlines()[0]}", full, False, EXIT_FAILED
