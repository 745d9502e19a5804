"""Work that one rank does before the others, such as tokenizing, without a time limit for the waiting ranks."""

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from titan.errors import PreemptedError, RankFailedError, TitanError
from titan.ranks import watchdog
from titan.ranks.failure import tell
from titan.ranks.meeting import signals
from titan.ranks.meeting.store import shared_store
from titan.ranks.process import LOOKS_PER_S, Rank

T = TypeVar("T")

BEAT_S = 10.0  # between two signs of life of a rank at work, and at most between two looks of one that waits for it
LOOK_S = 0.5  # between two looks of a waiting rank for a signal
LOST_S = 300.0  # without a sign of life: nobody is at work. Where a launcher watches the ranks, it ends them sooner
FAREWELL_S = BEAT_S + 5.0  # how long rank 0, which may serve the store, waits for others to read there what has failed

_turns = itertools.count()


def together(work: Callable[[], T], rank: Rank, limit_s: float) -> T:
    """Run `work` on rank 0, then on the first rank of each node, then on all, so that what one writes the next finds.

    Those whose turn it is not wait as long as one at work lives: no timeout of a collective runs meanwhile. The last
    turn, in which all find what is there, may take `limit_s`; a rank that takes longer ends, with its stacks shown.

    Raises:
        TitanError: the first one that the work raised on any rank, on all of them, so that nobody waits for ever.
        RankFailedError: the work raised something else, which that rank has told in full; on all of them.
    """
    if rank.world_size == 1:
        return work()
    result: list[T] = []
    last = watchdog.limit(limit_s, "comm.init_timeout_s", "opening what other ranks have prepared")
    for mine, limit in ((rank.number == 0, nullcontext()), (rank.local == 0, nullcontext()), (True, last)):
        _take_turn(work if mine and not result else None, result, rank, limit)
    return result[0]


def from_first(work: Callable[[], T], rank: Rank) -> T:
    """Run `work` on rank 0 alone; what it returns is pickled, and sent to all ranks by one broadcast between CPUs. The
    others wait for rank 0, and errors reach all of them, as in `together`."""
    if rank.world_size == 1:
        return work()
    result: list[T] = []
    _take_turn(work if rank.number == 0 else None, result, rank, nullcontext())
    sent: list[T | None] = [result[0] if result else None]
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    return cast(T, sent[0])


def _take_turn(work: Callable[[], T] | None, result: list[T], rank: Rank, limit: AbstractContextManager[None]) -> None:
    """Do the work of a turn, if it is this rank's, and wait until all ranks have done theirs. The first TitanError that
    the work raised on any rank is raised on all of them."""
    turn = _Turn(rank)
    error: TitanError | None = None
    if work is not None:
        with turn.at_work(), limit:
            try:
                result.append(work())
            except TitanError as raised:
                error = raised
            except Exception as raised:  # nobody expected it: told here, before any other rank speaks of it
                tell(raised, rank.number)
                error = RankFailedError(f"rank {rank.number} failed: {type(raised).__name__}: {raised}")
    try:
        error = turn.over(error)
    except PreemptedError as stop:  # a signal came while this rank waited; the others hear of it, if they do not know
        error = turn.over(stop)
    if error is not None:
        raise error


def _carried(error: TitanError) -> bytes:
    """An error as other ranks can read it. A plugin's own may not survive that; its words and exit code do."""
    try:
        carried = pickle.dumps(error)
        pickle.loads(carried)
        return carried
    except Exception:
        nearest = next(kind for kind in type(error).__mro__ if kind.__module__ == TitanError.__module__)
        return pickle.dumps(nearest(str(error)))


class _Turn:
    """Work that some ranks do and all wait for, told over the store. All ranks make their turns in the same order."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store = PrefixStore(f"turn {next(_turns)}", shared_store())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count up in the store every BEAT_S seconds, so that waiting ranks see this one is alive."""
        done = Event()

        def beat() -> None:
            while not done.wait(BEAT_S):
                self._store.add("beats", 1)

        thread = Thread(target=beat, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(BEAT_S)  # the store may be gone, and its answer with it

    def over(self, error: TitanError | None) -> TitanError | None:
        """This rank is done, or has failed: wait for the others; the error of the first that failed, on all ranks."""
        if error is not None:
            self._store.compare_set("over", "", _carried(error).hex())
        elif self._store.add("done", 1) == self._rank.world_size:
            self._store.compare_set("over", "", pickle.dumps(None).hex())
        self._wait()
        found: TitanError | None = pickle.loads(bytes.fromhex(self._store.get("over").decode()))
        if found is not None:
            self._part()
        return found

    def _wait(self) -> None:
        # Looks, as Store.wait with a time limit warns on stderr each time it is up, and lets no signal through. They
        # become rarer the longer the wait is: after 100 s those of 2,048 ranks are 205 per second.
        beats, began = 0, time.monotonic()
        heard = now = began
        while not self._store.check(["over"]):
            until = now + min(BEAT_S, max(self._rank.world_size / LOOKS_PER_S, (now - began) / 10))
            while now < until:
                signals.check()
                time.sleep(min(LOOK_S, until - now))
                now = time.monotonic()
            if now - heard > BEAT_S and (told := self._store.add("beats", 0)) != beats:
                beats, heard = told, now
            elif now - heard > LOST_S:
                raise RankFailedError(f"no rank that prepares data has responded for {LOST_S:g} s")

    def _part(self) -> None:
        """Leave, but not before all have read what has failed: the store may end with rank 0."""
        if self._store.add("read", 1) == self._rank.world_size:
            self._store.set("all have read", "")
        elif self._rank.number == 0:
            with suppress(dist.DistStoreError):
                self._store.wait(["all have read"], timedelta(seconds=FAREWELL_S))
