"""Reports the failure of a rank: each error is printed once, and all ranks learn which rank failed first. Some failures
do not end the run: those of workers that are `Expendable`.

The ranks agree by a store. Functions that take one (`store`) take that of the process group, on a rank, or as the
launcher serves it. They raise RuntimeError if the process that served the store is gone.
"""

import contextlib
import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from titan import log, terminal
from titan.errors import PreemptedError, RankFailedError, TitanError
from titan.ranks.meeting.launch_env import launched_world_size
from titan.ranks.meeting.store import in_time, open_store, serves_store, shared_store
from titan.terminal import say

T = TypeVar("T")

ANSWER_S = 5.0  # longest wait for the store when a rank has failed
HEAD_START_S = 0.25  # so much sooner rank 0 prints an error that all ranks have; the others follow within the same time
LOOK_S = 0.05  # between two looks of a rank whether its error has been printed

FOLLOWS, DECIDED, STOPPED = "follows", "decided", "stopped"
"""Kinds of a foreseen failure: of a rank that misses another one; of one that the run is to end with; and of one that
was asked to stop where it cannot go on, so that the run ends as a preempted one."""

_FIRST = "first to fail"


def report(error: TitanError, rank: int) -> None:
    """Print an error that ends this rank, once among all ranks that raise the same; each has it in its log. Rank 0
    prints if it has the error in time, else the first rank that asks the store. A rank without an answer prints."""
    tell(error, rank)
    log.log.debug(f"error: {error}")
    digest = hashlib.sha256(str(error).encode(errors="replace")).hexdigest()
    if not _ask(lambda facts: _printed_by_another(facts, digest, rank), not terminal.is_shown()):
        terminal.report(error, rank)
        if terminal.is_shown():
            _ask(lambda facts: facts.set(f"printed {digest}", ""), None)
    _ask(lambda facts: facts.set(f"explained {rank}", ""), None)


def _printed_by_another(facts: Store, digest: str, rank: int) -> bool:
    ranks = launched_world_size()
    if rank:
        time.sleep(HEAD_START_S * (1 + rank / ranks))
    if terminal.is_shown() and _first_to(facts, f"printer {digest}", rank) == rank:
        return False
    patience = time.monotonic() + ANSWER_S / 2  # the rank that was to print may be dead, or its terminal closed
    while not facts.check([f"printed {digest}"]):
        if time.monotonic() > patience:
            return False
        time.sleep(max(LOOK_S, ranks / 5000))  # a store answers some ten thousand requests per second
    return True


def tell(error: Exception, rank: int) -> None:
    """Show the stack trace of what ends this rank, once, on the terminal and in its log. To be called before anything
    is closed: other ranks fail as soon as a connection to this one is, and name the rank that failed first. A
    TitanError is for `report`; that this rank failed is known to the others all the same."""
    if error is _Told.error:
        return
    _Told.error = error
    earliest = _ask(lambda facts: _first_to(facts, _FIRST, rank), rank)
    if isinstance(error, TitanError):
        _ask(lambda facts: facts.set(f"kind {rank}", _kind(error)), None)
        return
    trace = "".join(traceback.format_exception(error))
    log.log.debug(trace)
    if earliest != rank and (kept := log.file()) is not None:
        trace = f"rank {rank} cannot continue without rank {earliest}; its own stack trace is in {kept}\n"
    elif dist.is_initialized() and dist.get_world_size() > 1:
        trace = f"rank {rank} failed:\n{trace}"
    say(trace.rstrip("\n"))


def _kind(error: TitanError) -> str:
    return FOLLOWS if isinstance(error, RankFailedError) else STOPPED if isinstance(error, PreemptedError) else DECIDED


def let_others_ask() -> None:
    """Before this process leaves the process group: tell the store if this rank has failed. A rank 0 that serves the
    store and has failed lets the others ask it first, for `ANSWER_S` at most."""
    if _Told.error is not None:
        _ask(lambda facts: facts.add("finished", 1), 0)  # it asks the store no more
        if os.environ.get("RANK") == "0" and serves_store():
            _ask(_stay, None)


def _stay(facts: Store) -> None:
    while facts.add("finished", 0) < launched_world_size():
        time.sleep(LOOK_S)


class _Told:
    error: Exception | None = None  # of this rank
    silent = False  # nobody answers at the store


def be_silent() -> None:
    """Tell no other rank of failures from now on: those at the store are of another run."""
    _Told.silent = True


def _ask(question: Callable[[Store], T], otherwise: T) -> T:
    """The answer of `_facts`; `otherwise` for a single rank, or where no answer comes within `ANSWER_S`."""
    if launched_world_size() == 1 or _Told.silent:
        return otherwise
    try:
        return in_time(lambda: question(_facts(_store())), ANSWER_S)  # a network that is down answers nothing
    except (TitanError, RuntimeError, OSError):  # whoever served the store is gone
        _Told.silent = True
        return otherwise


def _store() -> Store:
    """The store of the process group; before this rank has joined, the one where the ranks are to meet."""
    if dist.is_initialized():
        return shared_store()
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise RuntimeError("there is no store")
    return open_store(ANSWER_S)


def attempt() -> str:
    """The key prefix of this start of the ranks: torchrun restarts them with the same store, full of dead addresses."""
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def first(store: Store) -> int | None:
    """The rank that failed first; None where none has."""
    rank = _get(store, _FIRST)
    return int(rank) if rank else None


def begin(store: Store, workers: Sequence[Sequence[int]]) -> None:
    """Tell that all ranks have begun to train: from now on the run may lose these workers, given by their ranks."""
    _facts(store).set("begun", json.dumps(workers))


def cause(store: Store) -> tuple[int | None, int | None, bool]:
    """The rank that failed first, the same again if its error has been printed, and whether it was asked to stop. None
    where there is none, or the store does not answer."""
    with contextlib.suppress(RuntimeError):
        if (rank := first(store)) is not None:
            explained = _facts(store).check([f"explained {rank}"])
            return rank, rank if explained else None, _get(store, f"kind {rank}") == STOPPED
    return None, None, False


def _first_to(facts: Store, act: str, rank: int) -> int:
    """The rank that was the first to act; this one, if there was none."""
    return int(facts.compare_set(act, "", str(rank)))


def _get(store: Store, fact: str) -> str:
    store = _facts(store)
    return store.get(fact).decode() if store.check([fact]) else ""


def _facts(store: Store) -> Store:
    """Where the ranks of this attempt tell of failures, whichever part of the store this is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(attempt(), store)


class Expendable:
    """The ranks of each worker that may die without ending the run, once all ranks have begun to train.

    A worker is lost whole: the ranks of one need each other in every step. It is lost by a signal, or by an error that
    nobody has foreseen, such as one of a device. What ends a run on purpose, such as a loss that is not finite, ends it
    on any rank.

    lost: the ranks of workers that are gone.
    """

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self._store: Store | None = None
        self._reach: Callable[[float], Store] | None = None
        self._worker_of: dict[int, frozenset[int]] = {}

    def __contains__(self, rank: int) -> bool:
        self._look()
        return rank in self._worker_of

    def start(self, store: Store | None, reach: Callable[[float], Store] | None = None) -> None:
        """All ranks start, again perhaps.

        store: where ranks tell that they have begun, and how they fail; None: another node serves it.
        reach: connects to it within so many seconds; see `connect`.
        """
        self._store, self._reach = store, reach
        self._worker_of.clear()
        self.lost.clear()

    def connect(self) -> None:
        """A rank here has ended: connect to a store that another node serves, to know whom the run may lose. Without an
        answer the run loses nobody."""
        if self._store is None and self._reach is not None:
            try:
                self._store = in_time(partial(self._reach, ANSWER_S / 2), ANSWER_S)
            except (RuntimeError, OSError) as error:
                log.log.debug(f"the store of node 0 does not answer: {error}")
            self._reach = None

    def stop(self) -> None:
        """Nobody serves the store any more. Who may be lost is remembered: other nodes may tell of losses later."""
        self._look()
        self._store = self._reach = None

    def lose(self, ranks: Iterable[int], cause: object) -> bool:
        """Whether the run goes on without these ranks, which died for a `cause`; says so once of each worker."""
        ranks = set(ranks) - self.lost
        if not ranks:
            return True
        self._look()
        kinds = {self._ask(partial(_get, fact=f"kind {rank}"), "") for rank in ranks}
        if not ranks <= self._worker_of.keys() or {DECIDED, STOPPED} & kinds:
            return False
        for worker in {self._worker_of[rank] for rank in ranks}:
            self.lost |= worker
            if FOLLOWS not in kinds:
                named = f"rank{'s' if len(worker) > 1 else ''} {', '.join(map(str, sorted(worker)))}"
                say(f"warning: {cause}; the run goes on without its worker, {named}")
        if self._ask(first, None) in self.lost:  # what fails now is not for want of them
            self._ask(lambda store: _facts(store).delete_key(_FIRST), False)
        return True

    def _look(self) -> None:
        """Who may be lost, as soon as all ranks have begun."""
        if not self._worker_of:
            workers = map(frozenset, json.loads(self._ask(partial(_get, fact="begun"), "") or "[]"))
            self._worker_of = {rank: worker for worker in workers for rank in worker}

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        """The store's answer; `otherwise` where there is none in time: a node without power would answer never."""
        if self._store is None:
            return otherwise
        try:
            return in_time(partial(question, self._store), ANSWER_S)
        except (RuntimeError, OSError):
            self._store = None
            return otherwise
