"""Start the ranks of this node, watch over them, and end with the exit code of the run.

`./run_train.sh` ends here. Started by Slurm or torchrun once per rank, this process is the rank; for a world of one
rank it trains in this very process; otherwise it is the parent of the node's ranks.

`torchrun -m titan.train ...` works too, but its agent kills ranks 30 s after a signal, whether their checkpoint is
written or not, and forgets what they exited with. Without GPUs the ranks here are forked from one process that has
imported everything: eight of them on two cores meet after 2.4 s instead of 11.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from titan.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_WRONG_INPUT, TitanError, report
from titan.place import LOCAL, Environment, Place, cores, find_place, gpus, rank_environment

GRACE_S = 10.0
"""After a rank failed the others cannot finish; this long they may say so before they are killed."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
IMPORTED_BEFORE_FORKS = ("titan.train", "torch._dynamo")
"""So that ranks find them there; every optimizer imports dynamo."""

Entry = Callable[[list[str]], int]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, or minus the number of the signal that killed it."""

    rank: int
    code: int

    @property
    def failed(self) -> bool:
        """Neither done nor preempted."""
        return self.code not in (EXIT_DONE, EXIT_PREEMPTED)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}"
        hint = " (out of memory?)" if -self.code == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}{hint}"


def run_ranks(entry: Entry, argv: list[str], place: Place, fork: bool) -> list[Ended]:
    """Run `sys.exit(entry(argv))` as each rank of this node; how they ended, in the order they did.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks. Those that outlive a failed one are killed after `GRACE_S`
    and are not listed.
    """
    context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
    processes: dict[int, BaseProcess] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_kill, processes)
        listening = stack.enter_context(socket.create_server((LOCAL, 0), backlog=128)) if place.port == 0 else None
        for local_rank in range(place.ranks):
            environment = place.environment(local_rank)
            if listening is not None:
                # What torchrun's agent tells its ranks: the store is served already, rank 0 is a client like all.
                environment["MASTER_PORT"] = str(listening.getsockname()[1])
                environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            process = context.Process(target=_be_rank, args=(entry, argv, environment, os.getpid()))
            process.start()
            processes[int(environment["RANK"])] = process
        stack.enter_context(_signals_passed_to(processes))
        if listening is not None:
            stack.enter_context(_store_served(listening))
        return _wait_for(processes)


def _be_rank(entry: Entry, argv: list[str], environment: Environment, parent: int) -> None:
    """The life of a rank's process."""
    _die_with(parent)
    # Ctrl-C reaches every process of a terminal's session, and the parent passes it on: out of the session, a rank
    # hears it once.
    os.setsid()
    os.environ.update(environment)
    sys.exit(entry(argv))


def _die_with(parent: int) -> None:
    """No orphans: a rank whose launcher was killed would go on writing to a run that somebody may have resumed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def _store_served(listening: socket.socket) -> Iterator[None]:
    """Serve the store where ranks meet, on a socket that listened before any rank started.

    So the port is never free for others, ranks that are early wait in the socket's queue, and the store's threads come
    after the forks: a process with threads should not fork.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listening.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    yield
    del store


@contextlib.contextmanager
def _signals_passed_to(processes: Mapping[int, BaseProcess]) -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        for process in processes.values():
            # It may end between the question and the kill.
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(processes: Mapping[int, BaseProcess]) -> None:
    for process in processes.values():
        process.kill()
        process.join()


def _wait_for(processes: Mapping[int, BaseProcess]) -> list[Ended]:
    running: dict[Any, int] = {process.sentinel: rank for rank, process in processes.items()}
    ended: list[Ended] = []
    deadline = None
    while running:
        ready = connection.wait(list(running), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for sentinel in ready:
            rank = running.pop(sentinel)
            processes[rank].join()
            ended.append(Ended(rank, processes[rank].exitcode or 0))
        if deadline is None and any(end.failed for end in ended):
            deadline = time.monotonic() + GRACE_S
    return ended


def let_threads_sleep() -> None:
    """Let OpenMP's threads give up their core soon when they wait. To be called before torch is imported.

    By default they spin, for long; on cores that others use too, a thread that spins keeps the one it waits for from
    running. A step of the quickstart on two cores, beside other work: 0.16 s, and up to 3.5 s with the default.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this node's ranks; the run's exit code. Arguments are those of `titan train`."""
    words = sys.argv[1:] if argv is None else list(argv)
    let_threads_sleep()
    try:
        mine = rank_environment(os.environ)
        if mine is not None or {"-h", "--help"} & set(words):
            os.environ.update(mine or {})
            return _train(words)
        place = find_place(os.environ)
        if place.world_size == 1:
            return _train(words)
        return _launch(words, place)
    except TitanError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_FAILED


def _train(words: list[str]) -> int:
    from titan.train import main as train

    return train(words)


def _launch(words: list[str], place: Place) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // place.ranks)))
    for module in IMPORTED_BEFORE_FORKS:
        importlib.import_module(module)
    from titan.config import load_job, split_arguments

    job = load_job(*split_arguments(words), place.world_size)
    if place.nodes > 1 and place.node == 0:
        print(f"meeting {place.nodes - 1} more nodes at {place.host}:{place.port}", file=sys.stderr)
    forkable = sys.platform == "linux" and gpus() == 0
    return verdict(run_ranks(_train, words, place, forkable), job.folder / "logs")


def verdict(ended: Sequence[Ended], logs: Path) -> int:
    """The exit code of the run, from how this node's ranks ended in order.

    Says which rank was the cause, unless that is rank 0 and it has said so itself: one that was killed, as its peers
    may be seen to fail before its own end is; else the first that failed. Peers may abort for want of a connection.
    """
    failed = [end for end in ended if end.failed]
    if not failed:
        return max((end.code for end in ended), default=EXIT_DONE)
    killed = [end for end in failed if end.code < 0 and end.code != -signal.SIGABRT]
    cause = (killed or failed)[0]
    if cause.rank or cause.code < 0:
        print(f"error: {cause}; its log: {logs / f'rank-{cause.rank}.log'}", file=sys.stderr)
    return EXIT_WRONG_INPUT if cause.code == EXIT_WRONG_INPUT else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
