"""Warm-up, stable, decay: the peak rate is held, and decays only at the end (MiniCPM, arXiv 2404.06395, section 4).

    factor(s) = s / warmup                                for s <= warmup
    factor(s) = 1                                         until `decay` steps before the end
    factor(s) = min + (1 - min) * (1 - progress)          linear; for `decay_type = "sqrt"`, (1 - sqrt(progress))

The square-root decay falls fast first, and reaches a lower loss (Hägele et al., arXiv 2405.18392).

Cost: none. A run can be extended from a checkpoint taken before the decay, without a break in the curve.
"""

import math
from dataclasses import dataclass
from typing import Literal

from titan.contracts import LrSchedule, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[lr_schedule]` with `name = "wsd"`."""

    warmup_steps: int = option(0, "steps of linear warm-up; the last one has the peak rate", unit="steps", at_least=0)
    decay_steps: int = option(0, "steps of the decay at the end; 0: a tenth of training", unit="steps", at_least=0)
    min_lr_factor: float = option(0.0, "rate at the last step as a fraction of the peak rate", at_least=0, at_most=1)
    decay_type: Literal["linear", "sqrt"] = option("linear", "decay curve: a straight line, or 1 - sqrt(progress)")


@register
class Wsd(LrSchedule):
    """Linear warm-up, the peak rate, and a fall to `min_lr_factor` of it over the last steps."""

    name = "wsd"
    Config = Config

    def factor(self, step: int, steps: int) -> float:
        peak: int = max(1, self.config.warmup_steps)
        if step <= peak:
            return step / peak
        decay = min(self.config.decay_steps or max(1, steps // 10), steps - peak)
        progress = max(0, step - (steps - decay)) / decay
        fallen = math.sqrt(progress) if self.config.decay_type == "sqrt" else progress
        return float(self.config.min_lr_factor + (1 - self.config.min_lr_factor) * (1 - fallen))
