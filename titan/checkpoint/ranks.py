"""Collectives of a checkpoint's save or load: a failure on one rank is raised on all, so that none hangs."""

import errno
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from titan.errors import CheckpointError, UnreadableError

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class RankFailure(CheckpointError):
    """What went wrong on some rank, raised on all.

    disk_full: a user can mend it by making room.  unreadable: it was an `UnreadableError`.
    """

    def __init__(self, message: str, disk_full: bool, unreadable: bool) -> None:
        super().__init__(message)
        self.disk_full, self.unreadable = disk_full, unreadable


class Ranks:
    """All ranks, over a gloo group of their own: a save in the background must not meet training's collectives.

    Made by all ranks together; without a process group it is this process alone.
    patience: seconds a rank waits for another.
    """

    def __init__(self, rank: int, size: int, patience: float = 1800.0) -> None:
        self.rank, self.size = rank, size
        wait = timedelta(seconds=patience)
        self.group = dist.new_group(backend="gloo", timeout=wait) if dist.is_initialized() else None

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
        """Act on every rank; returns what it returned on this one.

        Raises:
            RankFailure: it failed on some rank, raised on all ranks.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = act()
        except Exception as error:
            failure = error
        troubles = [trouble for trouble in self.gather(_told(failure, self.rank)) if trouble is not None]
        if troubles:
            full = [trouble for trouble in troubles if trouble[1]]
            raise RankFailure(*(full or troubles)[0]) from failure
        return cast(T, value)

    def first(self, act: Callable[[], T]) -> T:
        """Act on rank 0 alone; returns what it returned, on all ranks. Raises as `each`."""
        values = [self.each(lambda: act() if self.rank == 0 else None)]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return cast(T, values[0])


def _told(error: Exception | None, rank: int) -> tuple[str, bool, bool] | None:
    """What the `RankFailure` of an error is made of, fit to be sent to other ranks."""
    if error is None:
        return None
    if isinstance(error, RankFailure):
        return str(error), error.disk_full, error.unreadable
    if isinstance(error, CheckpointError):
        return str(error), False, isinstance(error, UnreadableError)
    text = str(error).strip() or type(error).__name__
    return f"rank {rank}: {text.splitlines()[0]}", isinstance(error, OSError) and error.errno in _FULL, False
