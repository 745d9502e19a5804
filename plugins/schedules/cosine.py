"""Linear warm-up, then half a cosine down (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    factor(s) = s / warmup                                            for s <= warmup
    factor(s) = min + (1 - min) * (1 + cos(pi * progress)) / 2        progress = (s - warmup) / decay, at most 1

Cost: none. Limits: the curve depends on the length of training, so a longer run differs from its first step on,
unless `decay_steps` is set.
"""

import math
from dataclasses import dataclass

from titan.contracts import LrSchedule, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[lr_schedule]` with `name = "cosine"`."""

    warmup_steps: int = option(0, "steps of linear warm-up; the last one has the peak rate", unit="steps", at_least=0)
    decay_steps: int = option(
        0, "steps from the peak to the lowest rate; 0: all remaining steps", unit="steps", at_least=0
    )
    min_lr_factor: float = option(0.1, "lowest rate as a fraction of the peak rate", at_least=0, at_most=1)


@register
class Cosine(LrSchedule):
    """Linear warm-up, then half a cosine down to `min_lr_factor` of the peak."""

    name = "cosine"
    Config = Config
    default = True

    def factor(self, step: int, steps: int) -> float:
        peak: int = max(1, self.config.warmup_steps)
        if step <= peak:
            return step / peak
        progress = min(1.0, (step - peak) / (self.config.decay_steps or steps - peak))
        height = (1 + math.cos(math.pi * progress)) / 2
        return float(self.config.min_lr_factor + (1 - self.config.min_lr_factor) * height)
