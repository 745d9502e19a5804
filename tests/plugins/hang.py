"""A rank that hangs outside of every collective, as in a driver that never answers."""

import os
import threading
from dataclasses import dataclass

from titan.contracts import Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    step: int = option(3, "before which step it hangs")
    rank: int = option(1, "the rank that hangs")


@register
class Hang(Technique):
    """Waits for nobody, for ever."""

    name = "hang"
    Config = Config
    phase = "shard"

    def before_step(self, step: int) -> None:
        if step == self.config.step and int(os.environ.get("RANK", "0")) == self.config.rank:
            self._wait_for_nobody()

    def _wait_for_nobody(self) -> None:
        threading.Event().wait()
