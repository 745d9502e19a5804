"""Calls in processes of their own: a fault that spoils the device for its process spoils nothing else.

A process is forked from one that has imported PyTorch and has not touched the device: it starts at once, and CUDA
cannot be used in a process that is forked later than that.
"""

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

GRACE_S = 2.0
"""Time that a process has beyond its limit, to print its stacks."""

STACKS = signal.SIGQUIT
"""The signal at which a process prints the stacks of all threads to its log."""

_PR_SET_PDEATHSIG = 1


class CallError(RuntimeError):
    """A call in a process of its own has no result; the message says why in one line."""


class Call:
    """A call that runs in a forked process, beside this one, until `result` is asked for.

    work: what to call; its result must be plain data.  log: file that the process's output is appended to.  limit_s:
    seconds after which the process prints all stacks there and ends.
    """

    def __init__(self, work: Callable[[], Any], log: Path, limit_s: float) -> None:
        self._limit_s, self._ends = limit_s, time.monotonic() + limit_s
        self._answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed when the call is asked for its result
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():  # Python 3.12 warns where there are threads: none of them is needed below
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self._run(work, log, parent)
        self._ended = os.pidfd_open(self._pid)

    def _run(self, work: Callable[[], Any], log: Path, parent: int) -> NoReturn:
        """In the new process, which is a copy of its parent: nothing may return from here."""
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # it had died before it was to take this process along
            file = log.open("a", buffering=1)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            faulthandler.enable(file)
            faulthandler.register(STACKS, file)  # the timer of faulthandler does not survive a fork
            # PyTorch makes its pool of threads anew when it is first asked for after a fork. Where several threads of a
            # backward ask at once, some find none and abort the process. Only for PyTorch 2.11.
            torch.set_num_threads(torch.get_num_threads())
            answer = json.dumps({"value": work()})
        except BaseException as error:
            traceback.print_exc()
            answer = json.dumps({"failure": f"{type(error).__name__}: {error}".partition("\n")[0]})
        try:
            self._answer.write(answer)
            self._answer.flush()
        finally:
            os._exit(0)  # a device in a bad state can hang at exit

    def result(self) -> Any:
        """Wait for the call, and end all that its process has started.

        Raises:
            CallError: the call raised an error, its process was killed, or it took longer than its limit.
        """
        ended = self._has_ended(max(0.0, self._ends - time.monotonic()))
        if not ended:
            for pid in [self._pid, *_descendants(self._pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS)
            self._has_ended(GRACE_S)
        self._end()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._ended)
        with self._answer:
            self._answer.seek(0)
            written = self._answer.read()
        if not ended:
            raise CallError(f"took longer than {self._limit_s:.0f} s; the log has its stacks")
        if status:
            raise CallError(f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}")
        try:
            answer = json.loads(written)
        except ValueError:
            raise CallError("its result could not be written") from None
        if "failure" in answer:
            raise CallError(answer["failure"])
        return answer["value"]

    def _end(self) -> None:
        """Kill the process, its group, and all that they have started, in whatever group and session."""
        pids = list(_descendants(self._pid))
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _has_ended(self, wait_s: float) -> bool:
        return bool(select.select([self._ended], [], [], wait_s)[0])


def _descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that they have."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in map(int, tasks.read_text().split()):
                yield child
                yield from _descendants(child)


def call(work: Callable[[], Any], log: Path, limit_s: float) -> Any:
    """The result of one call; errors as `Call.result`."""
    return Call(work, log, limit_s).result()


def calls(
    works: Sequence[Callable[[], Any]], log: Path, limit_s: float, at_once: int
) -> Iterator[tuple[int, Any | CallError]]:
    """(index, result or error) of each call, in order; `at_once` of them run at a time."""
    running: list[Call] = []
    for index in range(len(works)):
        while len(running) < min(len(works), index + at_once):
            running.append(Call(works[len(running)], log, limit_s))
        try:
            yield index, running[index].result()
        except CallError as error:
            yield index, error
