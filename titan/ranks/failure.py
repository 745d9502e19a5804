"""Reports the failure of a rank: each error is printed once, and all ranks learn which rank failed first. Some failures
do not end the run: those of workers that are `Expendable`.

The ranks agree by a store. Functions that take one (`store`) take that of the process group, on a rank, or as the
launcher serves it. They raise RuntimeError if the process that served the store is gone.
"""

import contextlib
import hashlib
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from titan import log, terminal
from titan.errors import PreemptedError, RankFailedError, TitanError
from titan.ranks.meeting.launch_env import launched_world_size
from titan.ranks.meeting.store import in_time, open_store, serves_store
from titan.terminal import say

T = TypeVar("T")

ANSWER_S = 5.0
"""Longest wait for the store when a rank has failed."""

HEAD_START_S = 0.25
"""By so much rank 0 is the first to print an error that all ranks have; the others follow within the same time."""

LOOK_S = 0.05
"""Between two looks of a rank whether its error has been printed."""


def report(error: TitanError, rank: int) -> None:
    """Print an error that ends this rank, once among all ranks that raise the same; each has it in its log.

    Rank 0 prints if it has the error in time, else the first rank that asks the store. A rank without an answer prints.
    """
    tell(error, rank)
    text = str(error)
    log.log.debug(f"error: {text}")
    if not _ask(lambda store: _printed_by_another(store, text, rank), not terminal.is_shown()):
        terminal.report(error, rank)
        if terminal.is_shown():
            _ask(lambda store: _confirm(store, text), None)
    _ask(lambda store: _explain(store, rank), None)


def _printed_by_another(store: Store, text: str, rank: int) -> bool:
    ranks = launched_world_size()
    if rank:
        time.sleep(HEAD_START_S * (1 + rank / ranks))
    if terminal.is_shown() and _claim(store, text, rank):
        return False
    patience = time.monotonic() + ANSWER_S / 2  # the rank that was to print may be dead, or its terminal closed
    while not _confirmed(store, text):
        if time.monotonic() > patience:
            return False
        time.sleep(max(LOOK_S, ranks / 5000))  # a store answers some ten thousand requests per second
    return True


def tell(error: Exception, rank: int) -> None:
    """Show the stack trace of what ends this rank, once, on the terminal and in its log.

    To be called before anything is closed: other ranks fail as soon as a connection to this one is. What they say of
    that goes to their logs; on the terminal they name the rank that failed first. A TitanError is for `report`; that
    this rank failed is known to the others all the same.
    """
    if error is _Told.error:
        return
    _Told.error = error
    earliest = _ask(lambda store: _register(store, rank), rank)
    if isinstance(error, TitanError):
        _ask(lambda store: _whole(store).set(_key(f"kind {rank}"), _kind(error)), None)
    if isinstance(error, TitanError):
        return
    trace = "".join(traceback.format_exception(error))
    log.log.debug(trace)
    if earliest != rank and (kept := log.file()) is not None:
        trace = f"rank {rank} cannot continue without rank {earliest}; its own stack trace is in {kept}\n"
    elif dist.is_initialized() and dist.get_world_size() > 1:
        trace = f"rank {rank} failed:\n{trace}"
    say(trace.rstrip("\n"))


def let_others_ask() -> None:
    """Before this process leaves the process group: tell the store if this rank has failed.

    A rank 0 that serves the store and has failed lets the others ask it first, for `ANSWER_S` at most.
    """
    if _Told.error is not None:
        _ask(_finish, 0)
        if os.environ.get("RANK") == "0" and serves_store():
            _ask(_stay, None)


def _stay(store: Store) -> None:
    while _finished(store) < launched_world_size():
        time.sleep(LOOK_S)


class _Told:
    """What this rank has told.

    silent: nobody answers at the store.
    """

    error: Exception | None = None
    silent = False


def be_silent() -> None:
    """Tell no other rank of failures from now on: those at the store are of another run."""
    _Told.silent = True


def _ask(question: Callable[[Store], T], otherwise: T) -> T:
    """The store's answer; `otherwise` for a single rank, or where no answer comes within `ANSWER_S`."""
    if launched_world_size() == 1 or _Told.silent:
        return otherwise
    try:
        return in_time(lambda: question(_store()), ANSWER_S)  # a network that is down answers nothing
    except (TitanError, RuntimeError, OSError):  # whoever served the store is gone
        _Told.silent = True
        return otherwise


def _store() -> Store:
    """The store of the process group; before this rank has joined, the one where the ranks are to meet.

    Raises:
        TitanError, RuntimeError, OSError: nobody serves it.
    """
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise RuntimeError("there is no store")
    return open_store(ANSWER_S)


# --- the store ------------------------------------------------------------------------------------------------------


def attempt() -> str:
    """The key prefix of this start of the ranks.

    torchrun restarts ranks with the store of the former ones, where Gloo would find the addresses of dead ranks.
    """
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _register(store: Store, rank: int) -> int:
    """Register the failure of a rank; returns the rank that registered first."""
    return int(_whole(store).compare_set(_key("first to fail"), "", str(rank)))


def first(store: Store) -> int | None:
    """The rank that failed first; None where none has."""
    store, key = _whole(store), _key("first to fail")
    return int(store.get(key)) if store.check([key]) else None


def begin(store: Store) -> None:
    """Tell that all ranks have begun to train: from now on the run may lose workers that are expendable."""
    _whole(store).set(_key("begun"), "")


def begun(store: Store) -> bool:
    """Whether all ranks have begun to train."""
    return bool(_whole(store).check([_key("begun")]))


def agreed(store: Store, meeting: int, rank: int, gone: Collection[int]) -> list[int]:
    """At a meeting: the workers that are gone, as rank 0 says, which hears of them; waits for rank 0.

    meeting: its number.
    """
    key = f"gone at meeting {meeting}"
    if rank == 0:
        store.set(key, " ".join(map(str, sorted(gone))))
    return [int(worker) for worker in store.get(key).split()]


def _claim(store: Store, text: str, rank: int) -> bool:
    """Whether this rank is to print an error, as the first that asks of all ranks with the same text."""
    return int(_whole(store).compare_set(_key("printer", text), "", str(rank))) == rank


def _confirm(store: Store, text: str) -> None:
    """Tell the other ranks that an error has been printed."""
    _whole(store).set(_key("printed", text), "")


def _confirmed(store: Store, text: str) -> bool:
    """Whether an error has been printed."""
    return bool(_whole(store).check([_key("printed", text)]))


def _explain(store: Store, rank: int) -> None:
    """Tell that the error of this rank has been printed, by this rank or by another one."""
    _whole(store).set(_key(f"explained {rank}"), "")


def explained(store: Store, rank: int) -> bool:
    """Whether the error of a rank has been printed as a message, so that its log says no more."""
    return bool(_whole(store).check([_key(f"explained {rank}")]))


def _finish(store: Store) -> int:
    """Tell that this rank has failed and asks the store no more; returns how many have told so."""
    return int(_whole(store).add(_key("finished"), 1))


def _finished(store: Store) -> int:
    """Number of ranks that have failed and ask the store no more."""
    return int(_whole(store).add(_key("finished"), 0))


def _whole(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _key(what: str, text: str = "") -> str:
    digest = f" {hashlib.sha256(text.encode(errors='replace')).hexdigest()}" if text else ""
    return f"{attempt()}/{what}{digest}"


# --- workers that a run can lose --------------------------------------------------------------------------------------


FOLLOWS, DECIDED, STOPPED = "follows", "decided", "stopped"
"""Kinds of a foreseen failure: of a rank that misses another one; of one that the run is to end with; and of one that
was asked to stop where it cannot go on, so that the run ends as a preempted one."""


def _kind(error: TitanError) -> str:
    return FOLLOWS if isinstance(error, RankFailedError) else STOPPED if isinstance(error, PreemptedError) else DECIDED


def kind_of(store: Store, rank: int) -> str:
    """The kind of a rank's failure; empty where it has told none."""
    store, key = _whole(store), _key(f"kind {rank}")
    return store.get(key).decode() if store.check([key]) else ""


class Expendable:
    """The ranks of each worker that may die without ending the run, once all ranks have begun to train.

    A worker is lost whole: the ranks of one need each other in every step. It is lost by a signal, or by an error that
    nobody has foreseen, such as one of a device. What ends a run on purpose, such as a loss that is not finite, ends it
    on any rank.

    store: where ranks tell that they have begun, and how they fail; None: nobody serves it.
    lost: the ranks of workers that are gone.
    """

    def __init__(self, workers: Sequence[frozenset[int]] = ()) -> None:
        self.store: Store | None = None
        self.lost: set[int] = set()
        self._worker_of = {rank: worker for worker in workers for rank in worker}
        self._begun = False

    def __bool__(self) -> bool:
        return bool(self._worker_of)

    def __contains__(self, rank: int) -> bool:
        return rank in self._worker_of

    def start(self, store: Store | None) -> None:
        """All ranks start, again perhaps."""
        self.store, self._begun = store, False
        self.lost.clear()

    def stop(self) -> None:
        """Nobody serves the store any more. That all had begun is remembered: other nodes may tell of losses later."""
        self._has_begun()
        self.store = None

    def lose(self, ranks: Iterable[int], cause: object) -> bool:
        """Whether the run goes on without these ranks, which have died; says so once of each worker.

        cause: how they died, for people.
        """
        ranks = set(ranks) - self.lost
        if not ranks:
            return True
        kinds = [self._kind_of(rank) for rank in sorted(ranks)]
        if not ranks <= self._worker_of.keys() or {DECIDED, STOPPED} & set(kinds) or not self._has_begun():
            return False
        for worker in {self._worker_of[rank] for rank in ranks}:
            self.lost |= worker
            if FOLLOWS not in kinds:
                say(f"warning: {cause}; the run goes on without its worker, {_named(sorted(worker))}")
        self._forget_first()
        return True

    def _has_begun(self) -> bool:
        if self.store is not None and not self._begun:
            with contextlib.suppress(RuntimeError):
                self._begun = begun(self.store)
        return self._begun

    def _kind_of(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            return "" if self.store is None else kind_of(self.store, rank)
        return ""

    def _forget_first(self) -> None:
        """A failure that comes now is not for want of these ranks."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None and first(self.store) in self.lost:
                _whole(self.store).delete_key(_key("first to fail"))


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
