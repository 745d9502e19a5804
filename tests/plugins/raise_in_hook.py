"""Raises in a hook of one rank, and leaves the others alone with it as it closes."""

import os
from dataclasses import dataclass

import torch.distributed as dist

from titan.contracts import Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    step: int = option(2, "before which step it raises")
    rank: int = option(1, "the rank it raises on")


@register
class RaiseInHook(Technique):
    """Raises what titan does not know."""

    name = "raise_in_hook"
    Config = Config
    phase = "shard"

    def before_step(self, step: int) -> None:
        if step == self.config.step and self._here():
            raise ValueError("thrown in a hook")

    def close(self) -> None:
        if self._here() and dist.is_initialized():
            dist.destroy_process_group()

    def _here(self) -> bool:
        return int(os.environ.get("RANK", "0")) == self.config.rank
