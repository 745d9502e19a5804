"""A constant learning rate after a linear warm-up.

    factor(s) = s / warmup   for s <= warmup, then 1

Cost: none. Limits: without a decay the loss stays noisy to the end; use a decaying schedule if the final loss matters.
"""

from dataclasses import dataclass

from titan.contracts import LrSchedule, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[lr_schedule]` with `name = "constant"`."""

    warmup_steps: int = option(0, "steps of linear warm-up; the last one has the peak rate", unit="steps", at_least=0)


@register
class Constant(LrSchedule):
    """Linear warm-up, then the peak rate to the end."""

    name = "constant"
    Config = Config

    def factor(self, step: int, steps: int) -> float:
        warmup: int = max(1, self.config.warmup_steps)
        return min(1.0, step / warmup)
