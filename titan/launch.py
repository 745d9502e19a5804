"""Start the ranks of this node, watch over them, and end with the exit code of the run.

`./run_train.sh` ends here. Started by Slurm or torchrun once per rank, this process is the rank; for a world of one
rank it trains in this very process; otherwise, or when ranks may have to start again, it is the parent of the node's.

`torchrun -m titan.train ...` works too, but its agent kills ranks 30 s after a signal, whether their checkpoint is
written or not, and forgets what they exited with.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan import nodes, preemption, slurm
from titan.children import Children, Ended, Entry
from titan.errors import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_WRONG_INPUT,
    ConfigError,
    Fault,
    TitanError,
    report,
    take_traceback_flag,
)
from titan.place import Place, cores, find_place, gpus, max_restarts, rank_environment

IMPORTED_BEFORE_FORKS = ("titan.train", "torch._dynamo")
"""So that ranks find them there; every optimizer imports dynamo."""


def let_threads_sleep() -> None:
    """Let OpenMP's threads give up their core soon when they wait. To be called before torch is imported.

    By default they spin, for long; on cores that others use too, a thread that spins keeps the one it waits for from
    running. A step of the quickstart on two cores, beside other work: 0.16 s, and up to 3.5 s with the default.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this node's ranks; the run's exit code. Arguments are those of `titan train`."""
    words = take_traceback_flag(sys.argv[1:] if argv is None else argv)
    let_threads_sleep()
    try:
        if {"-h", "--help"} & set(words):
            return _train(words)
        mine = rank_environment(os.environ)
        if mine is not None:
            os.environ.update(mine)
            return _again_by_slurm(_train(words), first=os.environ["RANK"] == "0")
        place, restarts = find_place(os.environ), max_restarts(os.environ)
        if place.world_size > 1 or restarts:
            return _launch(words, place, restarts)
        return _again_by_slurm(_train(words), first=True)
    except TitanError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_FAILED


def _train(words: list[str]) -> int:
    from titan.train import main as train

    return train(words)


def _again_by_slurm(code: int, first: bool) -> int:
    """Have Slurm run the job again if it was preempted; one process of a run asks, when all else is done."""
    if code == EXIT_PREEMPTED and first:
        slurm.requeue(os.environ)
    return code


def _launch(words: list[str], place: Place, restarts: int) -> int:
    os.environ[preemption.STARTED] = str(time.monotonic())
    from titan.config import load_job, split_arguments

    job = load_job(*split_arguments(words), place.world_size)
    if restarts and not job.checkpoint.goes_on:
        what = f'MAX_RESTARTS = {restarts}: needs [checkpoint] enabled = true and resume = "auto", to go on from'
        raise ConfigError([Fault("environment", what)])
    return start(_train, words, place, restarts, job.folder / "logs")


def place_asked_for() -> Place | None:
    """Where NPROC or NNODES ask for ranks to be started; None where this process is a rank, or all there is to be.

    For commands that use one process unless they are told otherwise.

    Raises:
        ConfigError: the environment does not say clearly.
    """
    mine = rank_environment(os.environ)
    if mine is not None or not (os.environ.get("NPROC") or os.environ.get("NNODES")):
        os.environ.update(mine or {})
        return None
    place = find_place(os.environ)
    return place if place.world_size > 1 else None


def start(entry: Entry, words: list[str], place: Place, restarts: int = 0, logs: Path | None = None) -> int:
    """Run `sys.exit(entry(words))` as each rank of this node; the exit code of the run. logs: where ranks write theirs.

    Raises:
        TitanError: the nodes of the run do not find together.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // place.ranks)))
    for module in IMPORTED_BEFORE_FORKS:
        importlib.import_module(module)
    forkable = sys.platform == "linux" and gpus() == 0
    with nodes.meet(place) as others:
        children = Children(entry, words, place, forkable, others)
        return children.follow() if place.node else _lead(children, restarts, logs)


def _lead(children: Children, restarts: int, logs: Path | None) -> int:
    """On node 0: all ranks of the run, again and again while they fail and may; the exit code of the run."""
    with children.hearing():
        for attempt in range(1 + restarts):
            if attempt:
                print(f"restart {attempt} of {restarts}: all ranks go on from the newest checkpoint", file=sys.stderr)
            ended = children.lead()
            code = verdict(ended, children.heard, children.lost, logs)
            if code != EXIT_FAILED or children.heard or children.lost:
                break
        _again_by_slurm(code, first=True)
        children.nodes.tell({"end": code})
    return code


def verdict(ended: Sequence[Ended], heard: set[int], lost: Sequence[int], logs: Path | None) -> int:
    """The exit code of the run, from how its ranks ended in order, what signals were heard, and which nodes are gone.

    Says which rank was the cause, unless that is rank 0 and it has said so itself: one that was killed, as its peers
    may be seen to fail before its own end is; else the first that failed. Peers may abort for want of a connection.
    """
    for node in lost:
        print(f"error: the launcher of node {node} is gone", file=sys.stderr)
    failed = [end for end in ended if end.failed]
    if not failed:
        return EXIT_FAILED if lost else max((end.code for end in ended), default=EXIT_FAILED)
    killed = [end for end in failed if end.code < 0 and end.code != -signal.SIGABRT]
    cause = (killed or failed)[0]
    if (cause.rank or cause.code < 0) and signal.SIGINT not in heard:
        where = "" if logs is None else f"; its log: {logs / f'rank-{cause.rank}.log'}"
        print(f"error: {cause}{where}", file=sys.stderr)
    return EXIT_WRONG_INPUT if cause.code == EXIT_WRONG_INPUT else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
