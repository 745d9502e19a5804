"""Linear warmup, then the inverse square root: min(step / warmup, sqrt(warmup / step)) (arXiv 1706.03762)."""

import math
from dataclasses import dataclass

from titan.contracts import LrSchedule, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[lr_schedule]` with `name = "example"`."""

    warmup_steps: int = option(10, "steps until the peak", unit="steps", at_least=1)


@register
class Example(LrSchedule):
    """Inverse square root of the step."""

    name = "example"
    Config = Config

    def factor(self, step: int, steps: int) -> float:
        """Of the peak learning rate, in the update of this step; needs no total number of steps."""
        warmup: int = self.config.warmup_steps
        return min(step / warmup, math.sqrt(warmup / step))
