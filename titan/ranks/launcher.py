"""Start the ranks of this node, monitor them, and return the exit code of the run."""

import importlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from titan.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_WRONG_INPUT, PreemptedError
from titan.machine import raise_descriptor_limit
from titan.ranks.meeting import launch_env, rendezvous, slurm
from titan.ranks.meeting.launch_env import LaunchEnv
from titan.ranks.meeting.same_job import Statement
from titan.ranks.rank_processes import Ended, Entry, RankProcesses
from titan.terminal import say


def place_asked_for() -> LaunchEnv | None:
    """Where NPROC or NNODES ask for ranks to be started; None where this process is a rank, or all there is to be. For
    commands that use one process unless they are told otherwise. ConfigError: the environment does not say clearly."""
    mine = launch_env.rank_environment(os.environ)
    if mine is not None:
        os.environ.update(mine)
        return None
    launch_env.drop_rank_variables(os.environ)
    if not (launch_env.ranks_asked_for(os.environ) or os.environ.get("NNODES")):
        return None
    place = launch_env.find_place(os.environ)
    return place if place.world_size > 1 else None


def start(
    entry: Entry,
    words: list[str],
    place: LaunchEnv,
    statement: Statement,
    restarts: int = 0,
    logs: Path | None = None,
    fork_with: Sequence[str] = (),
    limit_s: float = rendezvous.JOIN_S,
) -> int:
    """Run `sys.exit(entry(words))` as each rank of this node; the exit code of the run.

    statement: of the job, which all nodes must have.  limit_s: longest wait for the other nodes.
    logs: where ranks write theirs.  fork_with: modules that ranks need. Forked ranks find them imported; spawned ranks
    inherit no module, so this process imports none for them.

    TitanError: the nodes of the run do not find together, or a signal came before they did.
    """
    raise_descriptor_limit()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, launch_env.cores() // place.ranks)))
    forkable = sys.platform == "linux" and launch_env.gpus() == 0
    if forkable:
        torch.optim.SGD([torch.zeros(())])  # the first optimizer of a process imports the compiler
        for module in fork_with:
            importlib.import_module(module)
    try:
        with rendezvous.meet(place, statement, limit_s) as others:
            children = RankProcesses(entry, words, place, forkable, others)
            return children.follow() if place.node else _lead(children, restarts, logs)
    except PreemptedError as error:
        if place.node:  # node 0 has done so before it told the others
            rendezvous.leave(place, error)
        return error.exit_code


def _lead(children: RankProcesses, restarts: int, logs: Path | None) -> int:
    """On node 0: all ranks of the run, again and again while they fail and may; the exit code of the run."""
    with children.hearing():
        for attempt in range(1 + restarts):
            if attempt:
                say(f"restart {attempt} of {restarts}: all ranks resume from the newest checkpoint")
            ended = children.lead()
            code = verdict(ended, children.heard, children.missed, logs, children.explained)
            if code == EXIT_FAILED and children.stopped and not children.missed:
                code = EXIT_PREEMPTED
            if code == EXIT_FAILED and children.expendable.lost:
                say("error: the run ends with its workers: it lost them while all met, or a rank failed that it needs")
            if children.stuck:
                code = EXIT_FAILED
            if code != EXIT_FAILED or children.heard or children.lost or children.stuck:
                break
        again_by_slurm(code, children.heard, first=True)
        children.nodes.tell({"end": code})
    return code


def verdict(
    ended: Sequence[Ended], heard: set[int], lost: Sequence[int], logs: Path | None, explained: int | None = None
) -> int:
    """The exit code of the run, from how its ranks ended in order, what signals were heard, and which nodes are gone.

    Says which rank was the cause: one that was killed, as its peers may be seen to fail before its own end is; else the
    first that failed. Peers may abort for want of a connection. Says nothing of rank 0, which has said so itself, nor
    of a rank whose error has been printed (`explained`): its log says no more.
    """
    for node in lost:
        say(f"error: the launcher of node {node} no longer responds")
    failed = [end for end in ended if end.failed]
    if not failed:
        return EXIT_FAILED if lost else max((end.code for end in ended), default=EXIT_FAILED)
    killed = [end for end in failed if end.code < 0 and end.code != -signal.SIGABRT]
    cause = (killed or failed)[0]
    if (cause.rank not in (0, explained) or cause.code < 0) and signal.SIGINT not in heard:
        where = "" if logs is None else f"; its log: {logs / f'rank-{cause.rank}.log'}"
        say(f"error: {cause}{where}")
    return EXIT_WRONG_INPUT if cause.code == EXIT_WRONG_INPUT else EXIT_FAILED


def again_by_slurm(code: int, heard: Collection[int], first: bool) -> int:
    """After all else, on one process of a run: have Slurm run the job again if it was preempted. heard: its signals."""
    if code == EXIT_PREEMPTED and first:
        slurm.requeue(os.environ, heard)
    return code
