"""Seconds of a process by kind of work: each moment counts for the innermost kind alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

REST = "rest"


class Clock:
    """Wall and CPU seconds by kind; the CPU seconds are those of all threads, the kinds those of the thread it is for.

    spent: kind -> [wall seconds, CPU seconds].
    """

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._kinds = [REST]
        self._last = time.monotonic(), time.process_time()

    def take(self) -> dict[str, list[float]]:
        """What was spent since the last call, by kind."""
        self._switch()
        spent, self.spent = self.spent, {}
        return spent

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the block as `kind`."""
        self._switch()
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._switch()
            self._kinds.pop()

    def _switch(self) -> None:
        now = time.monotonic(), time.process_time()
        spent = self.spent.setdefault(self._kinds[-1], [0.0, 0.0])
        for at in (0, 1):
            spent[at] += now[at] - self._last[at]
        self._last = now

    def wrap(self, holder: Any, name: str, kind: str) -> None:
        """Count each call of an attribute of a module or class as `kind`."""
        setattr(holder, name, self.wrapped(getattr(holder, name), kind))

    def wrapped(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The function, each call of which counts as `kind`."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.counting(kind):
                return function(*args, **kwargs)

        return counted
