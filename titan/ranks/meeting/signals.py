"""The signals that ask a run to stop: noted until somebody asks.

This file imports no torch: a command hears signals before it imports what takes seconds.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from titan.errors import EXIT_FAILED, PreemptedError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_noted: set[int] = set()


class _Raising:
    """What `check` interrupts, for the message; empty: nothing."""

    activity = ""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Note `SIGNALS`, which whoever started this process may have blocked until now, instead of dying of them; outside
    of the main thread, where none can be caught, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:  # else this process hears no more
                signal.signal(number, handler)
        if note not in before.values():  # else somebody further up listens, too
            _noted.clear()


@contextlib.contextmanager
def raised(activity: str) -> Iterator[None]:
    """In the body, `check` raises `PreemptedError` when a signal has come: nothing in it has to be finished. activity:
    ends the message, as in "while waiting for node 0". What fails after a signal is taken to fail for it: other
    processes have ended by theirs. Wrong input is told all the same."""
    _Raising.activity = activity
    try:
        yield
    except Exception as error:
        if not _noted or getattr(error, "exit_code", EXIT_FAILED) != EXIT_FAILED:
            raise
        raise _preempted(activity) from error
    finally:
        _Raising.activity = ""


def check() -> None:
    """Raise `PreemptedError` if a signal has come, in the body of `raised`; once, so that its own way out is free. To
    be called where a process waits, or between two pieces of long work; costs nothing. A handler that raised could do
    so anywhere, also where an exception means that a file is damaged."""
    if _noted and _Raising.activity:
        activity, _Raising.activity = _Raising.activity, ""
        raise _preempted(activity)


def _preempted(activity: str) -> PreemptedError:
    return PreemptedError(f"preempted by {gravest()} {activity}; to go on, run the same command")


def note(number: int, _: FrameType | None = None) -> None:
    """Note a signal; also one that another rank was sent, once all have agreed on its effect."""
    _noted.add(number)


def gravest() -> str:
    """The name of the gravest signal noted: after SIGTERM nobody wants the run to go on. Empty where there is none."""
    return next((number.name for number in SIGNALS if number in _noted), "")


def heard() -> frozenset[int]:
    """The signals that this rank, or by the agreement of all ranks another one, was sent while this one listens."""
    return frozenset(_noted)


def hear_no_more() -> None:
    """Before a process that was asked to stop ends: one more signal must not turn its exit code into that of a kill.
    Ignored, not blocked: a thread blocks signals for itself, and gloo has threads."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
