"""Sends a signal at a chosen step, from one rank, and goes on when it has come: what a scheduler or a user does."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from titan.contracts import Technique, option, register
from titan.ranks.meeting import signals


@dataclass(frozen=True, kw_only=True)
class Config:
    step: int = option(4, "before which step it rings")
    rank: int = option(0, "the rank it rings on")
    signal: str = option("SIGTERM", "what is sent")
    to: Literal["rank", "group", "launcher", "nobody"] = option(
        "rank", "who gets it: the rank, its whole group, the launcher; nobody: somebody else sends it, or has sent it"
    )
    when: Literal["before", "after"] = option("before", "the step, or the step after which it rings")
    times: int = option(1, "how often, one after the other")
    once: str = option("", "file that is made when it rings, and keeps it from ringing again; empty: no such")


@register
class SendSignal(Technique):
    """Rings."""

    name = "send_signal"
    Config = Config
    phase = "recompute"
    preserves_numerics = True

    def before_step(self, step: int) -> None:
        if self.config.when == "before":
            self._at(step)

    def after_step(self, step: int, updated: Tensor) -> None:
        if self.config.when == "after":
            self._at(step)

    def _at(self, step: int) -> None:
        config = self.config
        if step != config.step or int(os.environ.get("RANK", "0")) != config.rank:
            return
        if config.once and Path(config.once).exists():
            return
        if config.once:
            Path(config.once).touch()
        for _ in range(config.times):
            self._ring()

    def _ring(self) -> None:
        heard, wake = os.pipe()
        os.set_blocking(wake, False)
        before = signal.set_wakeup_fd(wake)
        whom = {"rank": os.getpid(), "group": -os.getpgrp(), "launcher": os.getppid()}
        if self.config.to != "nobody":
            os.kill(whom[self.config.to], signal.Signals[self.config.signal])
        if self.config.to != "nobody" or not signals.heard():
            os.read(heard, 1)
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(wake)
