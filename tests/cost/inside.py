"""A pytest plugin that writes what each test cost, in its own process and in its ranks, to $TITAN_TEST_COST.

A line of JSON per test: {"test", "wall", "spent": {kind: [wall, CPU]}, "commands_cpu"}; the same per rank, with its
number, and per command, without "wall". Times are in seconds. The kinds are those of `KINDS`. What a rank waits for
others is wall without CPU.
"""

import builtins
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.cost.clock import Clock
from titan.testing import ranks

FOLDER, TEST, ASKED = "TITAN_TEST_COST", "PYTEST_CURRENT_TEST", "TITAN_TEST_COST_ASKED"
KINDS = ("start of ranks", "imports", "build", "compile", "steps", "saves", "waiting for ranks", "commands", "rest")

_clock = Clock()
_environment, _rank_main = ranks._environment, ranks._rank_main


def pytest_configure() -> None:
    """Count the work of this process, and that of the ranks it starts."""
    ranks._environment = _told  # type: ignore[assignment]
    ranks._rank_main = counted_rank  # type: ignore[assignment]
    _clock.wrap(ranks, "_collect", "waiting for ranks")
    _clock.wrap(commands, "run_titan", "commands")
    _clock.wrap(commands, "launch", "commands")
    _clock.wrap(commands.Launched, "end", "commands")
    commands.fork = _fork_counted  # type: ignore[assignment]
    _clock.wrap(subprocess.Popen, "communicate", "commands")
    _clock.wrap(subprocess.Popen, "wait", "commands")
    _count_work()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write what the test has cost, with its fixtures."""
    before = _children_cpu()
    _clock.take()
    result = yield
    spent = _clock.take()
    wall = sum(wall for wall, _ in spent.values())
    _write(
        {"test": item.nodeid, "wall": wall, "spent": spent, "commands_cpu": _children_cpu() - before},
        os.environ[FOLDER],
    )
    return result


def counted_rank(task: Any, outbox: Connection) -> None:
    """What a rank runs: `_rank_main` of titan.testing, with its work counted."""
    asked = float(task.environment[ASKED])
    forked = time.monotonic()
    clock = _count_work()
    clock.take()
    try:
        _rank_main(task, outbox)
    finally:
        spent = clock.take()
        spent["start of ranks"] = [forked - asked, 0.0]
        test, folder = task.environment[TEST], task.environment[FOLDER]
        _write(
            {"test": test, "rank": task.environment["RANK"], "spent": spent, "commands_cpu": _children_cpu()}, folder
        )


def counted_command(test: str, folder: str, main: Callable[..., None], *args: Any) -> None:
    """What a command of `tests.commands` runs: itself, with its CPU time and that of its processes written."""
    try:
        main(*args)
    finally:
        _write({"test": test, "spent": {}, "commands_cpu": time.process_time() + _children_cpu()}, folder)


def _fork_counted(main: Callable[..., None], *args: Any) -> BaseProcess:
    return ranks.fork(counted_command, _test(), os.environ[FOLDER], main, *args)


def _test() -> str:
    return os.environ.get(TEST, "").rpartition(" (")[0]


def _told(*args: Any) -> dict[str, str]:
    return {**_environment(*args), FOLDER: os.environ[FOLDER], TEST: _test(), ASKED: str(time.monotonic())}


def _count_work() -> Clock:
    """Count imports, builds, compilations, steps and saves of this process from now on."""
    from torch._dynamo import convert_frame

    from titan.checkpoint.checkpointer import Checkpointer
    from titan.training import build, trainer

    _clock.wrap(build, "build", "build")
    _clock.wrap(trainer, "train", "steps")
    _clock.wrap(convert_frame, "_compile", "compile")
    _clock.wrap(Checkpointer, "save", "saves")
    _clock.wrap(Checkpointer, "wait", "saves")
    _count_imports()
    return _clock


def _count_imports() -> None:
    really, main = builtins.__import__, threading.main_thread()

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in sys.modules or threading.current_thread() is not main:
            return really(name, *args, **kwargs)
        with _clock.counting("imports"):
            return really(name, *args, **kwargs)

    builtins.__import__ = counted


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write(line: dict[str, Any], folder: str) -> None:
    with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
