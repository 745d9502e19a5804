"""Tests with many ranks, in milliseconds: fresh processes, forked from a server that has torch warm (`warm.py`).

    def _sum(value: float) -> float: ...        # at module level: the ranks import it by name

    assert run_ranks(_sum, 4, 1.0) == [4.0] * 4

Every call has ranks, a store and ports of its own; nothing of one call is seen by the next. A script, unlike a test,
makes its calls below `if __name__ == "__main__":`, because ranks import it.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import titan
from titan.ranks.process import complete_in_order

HOST = "127.0.0.1"
ROOT = Path(titan.__file__).parents[1]
"""Where the package titan lies, which the server imports too: a checkout, or site-packages."""
WARM = "titan.testing.warm"
DYING = 10.0
"""Seconds a rank has to write its stacks and die, once told to."""


class RankError(AssertionError):
    """A rank raised, died or hung; says which, with its traceback or stacks and what it printed."""


@dataclass(frozen=True)
class _Task:
    """What a rank is sent. The call is pickled here, in plain bytes: multiprocessing would share tensors over files."""

    call: bytes
    environment: Mapping[str, str]
    output: Path
    folder: Path
    init: bool
    timeout: float


@dataclass(frozen=True)
class _Answer:
    """What a rank sends home: its result as bytes, or its traceback and when it was raised."""

    result: bytes = b""
    traceback: str = ""
    raised_at: float = 0.0


@dataclass(frozen=True)
class _Rank:
    number: int
    process: BaseProcess
    inbox: Connection
    output: Path

    def answer(self) -> _Answer | None:
        """Its answer if there is one; None when the process ended without."""
        try:
            return self.inbox.recv() if self.inbox.poll() else None
        except EOFError:
            return None


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    /,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on each of `world_size` gloo ranks; results by rank.

    The function must be importable by name; arguments are pickled, results go through `torch.save`, so tensors and
    views of them are fine. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set as torchrun sets them; with
    `init=False` the function calls `init_process_group` itself. What ranks print is printed here, rank by rank.

    Raises:
        RankError: a rank raised (the first one counts, the others are ended at once), died, or had not answered after
            `timeout` seconds; then it holds the stacks of all threads of all ranks that were still there.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-") as outputs:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                environment = _environment(number, world_size, store.port)
                output = Path(outputs, f"rank-{number}.txt")
                ranks.append(_start(number, _Task(call, environment, output, Path.cwd(), init, timeout)))
            answers = _collect(ranks, timeout)
        finally:
            _end(ranks)
    return [torch.load(io.BytesIO(answer.result), weights_only=False) for answer in answers]


# --- in the test's process ----------------------------------------------------------------------------------------


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    # The store lives in the test's process, as a torchrun agent's does: no port is chosen before it is bound.
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def start_server() -> ForkServerContext:
    """Start the warm server that processes are forked from, if no server runs yet: a process has one at most."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    # The server imports before it learns this process's sys.path, and OpenMP reads its variable once.
    with patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def fork(main: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `main(*args)` in a process forked from the warm server."""
    process = start_server().Process(target=main, args=args)
    process.start()
    return process


def _start(number: int, task: _Task) -> _Rank:
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    process = fork(_rank_main, task, outbox)
    outbox.close()
    return _Rank(number, process, inbox, task.output)


def _collect(ranks: Sequence[_Rank], timeout: float) -> list[_Answer]:
    # Counted from here: the first start of a session waits for the fork server.
    deadline = time.monotonic() + timeout
    answers: dict[int, _Answer] = {}
    while len(answers) < len(ranks):
        missing = [rank for rank in ranks if rank.number not in answers]
        handles: dict[Any, _Rank] = {h: rank for rank in missing for h in (rank.inbox, rank.process.sentinel)}
        ready = {handles[handle].number for handle in wait(list(handles), max(0.0, deadline - time.monotonic()))}
        if not ready and not _failures(answers):
            raise RankError(_stacks(missing, timeout))
        for rank in (ranks[number] for number in sorted(ready)):
            answer = rank.answer()
            if answer is None:
                raise RankError(_death(rank, len(ranks)))
            answers[rank.number] = answer
        if failures := _failures(answers):
            # News of a death come later than the complaint of a peer whose connection it closed.
            deadline = min(deadline, time.monotonic() + DYING)
            if not ready or not all(_left_alone(answer) for answer in failures.values()):
                break
    _raise_first(_failures(answers), len(ranks))
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    lingering = [rank for rank in ranks if rank.process.is_alive()]
    if lingering:
        raise RankError(_stacks(lingering, timeout))
    return [answers[rank.number] for rank in ranks]


def _failures(answers: Mapping[int, _Answer]) -> dict[int, _Answer]:
    return {number: answer for number, answer in answers.items() if answer.traceback}


def _left_alone(answer: _Answer) -> bool:
    return any(words in answer.traceback for words in ("by peer", "Socket closed"))


def _raise_first(failures: Mapping[int, _Answer], world_size: int) -> None:
    if failures:
        # Peers fail with a rank that leaves them alone in a collective: the earliest is the cause.
        number, first = min(failures.items(), key=lambda item: item[1].raised_at)
        raise RankError(f"rank {number} of {world_size} raised\n{first.traceback}")


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.inbox.close()
        if text := _read(rank):
            print(f"--- rank {rank.number}\n{text}", end="" if text.endswith("\n") else "\n")


def _death(rank: _Rank, world_size: int) -> str:
    rank.process.join()
    return f"rank {rank.number} of {world_size} ended with exit code {rank.process.exitcode}\n{_read(rank)}"


def _stacks(ranks: Sequence[_Rank], timeout: float) -> str:
    # A rank told to abort writes the stacks of all its threads and dies; its death says that they are complete.
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGABRT)
    end = time.monotonic() + DYING
    for rank in ranks:
        rank.process.join(max(0.0, end - time.monotonic()))
    numbers = ", ".join(str(rank.number) for rank in ranks)
    stacks = "\n".join(f"--- rank {rank.number}\n{_read(rank)}" for rank in ranks)
    return f"rank {numbers} did not end within {timeout:g} s\n{stacks}"


def _read(rank: _Rank) -> str:
    return rank.output.read_text(errors="replace") if rank.output.exists() else ""


# --- in a rank ----------------------------------------------------------------------------------------------------


def _rank_main(task: _Task, outbox: Connection) -> None:
    live_no_longer_than_the_test()
    _write_to(task.output)
    try:
        assert WARM in sys.modules, f"the fork server could not import {WARM}"
        os.chdir(task.folder)
        os.environ.update(task.environment)
        torch.set_num_threads(1)
        function, args, kwargs = pickle.loads(task.call)
        if task.init:
            complete_in_order()  # as titan does
            dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout))
            dist.barrier()  # one that returns at once must not hang up on peers that are still connecting
        result = io.BytesIO()
        torch.save(function(*args, **kwargs), result)
        if dist.is_initialized():
            dist.destroy_process_group()
        outbox.send(_Answer(result=result.getvalue()))
    except BaseException:
        outbox.send(_Answer(raised_at=time.monotonic(), traceback=traceback.format_exc()))


def live_no_longer_than_the_test() -> None:
    """End when the test's process is gone, however it went: nobody is left to kill this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    # Signals are for the main thread: one that it blocks is not to end the process by way of this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=watch, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_to(output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
