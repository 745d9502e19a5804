"""Linear warm-up, then a straight line down.

    factor(s) = s / warmup                            for s <= warmup
    factor(s) = min + (1 - min) * (1 - progress)      progress = (s - warmup) / decay, at most 1

Down to zero by default, which beats a tenth of the peak (Bergsma et al., arXiv 2502.15938).

Cost: none. Limits: the curve depends on the length of training, so a longer run differs from its first step on,
unless `decay_steps` is set.
"""

from dataclasses import dataclass

from titan.contracts import LrSchedule, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[lr_schedule]` with `name = "linear"`."""

    warmup_steps: int = option(0, "steps of linear warm-up; the last one has the peak rate", unit="steps", at_least=0)
    decay_steps: int = option(
        0, "steps from the peak to the lowest rate; 0: all remaining steps", unit="steps", at_least=0
    )
    min_lr_factor: float = option(0.0, "lowest rate as a fraction of the peak rate", at_least=0, at_most=1)


@register
class Linear(LrSchedule):
    """Linear warm-up, then a straight line down to `min_lr_factor` of the peak."""

    name = "linear"
    Config = Config

    def factor(self, step: int, steps: int) -> float:
        peak: int = max(1, self.config.warmup_steps)
        if step <= peak:
            return step / peak
        progress = min(1.0, (step - peak) / (self.config.decay_steps or steps - peak))
        return float(self.config.min_lr_factor + (1 - self.config.min_lr_factor) * (1 - progress))
