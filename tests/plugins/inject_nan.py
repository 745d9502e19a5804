"""Spoils gradients or the loss at chosen steps, on one rank: what a broken device or a bad sample does."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from titan.contracts import BuildContext, ModelPart, Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: tuple[int, ...] = option((), "steps that are spoilt")
    what: Literal["gradient", "loss"] = option("gradient", "what becomes NaN, or inf")
    rank: int = option(0, "the rank it happens on")


@register
class InjectNan(Technique):
    """Makes a NaN in one gradient, or an infinite loss with good gradients, on one rank."""

    name = "inject_nan"
    Config = Config
    phase = "recompute"
    preserves_numerics = False

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._part, self._loss, self._step = part, context.job.loss, 0
        of_hidden = self._loss.of_hidden

        def spoilt(*given):
            objective, reported = of_hidden(*given)
            return objective, reported + torch.inf if self._now("loss") else reported

        self._loss.of_hidden = spoilt

    def _now(self, what: str) -> bool:
        return self.config.what == what and self._step in self.config.steps and dist.get_rank() == self.config.rank

    def before_step(self, step: int) -> None:
        self._step = step

    def after_backward(self) -> None:
        if self._now("gradient"):
            gradient = next(p.grad for _, p in self._part.parameters() if p.grad is not None)
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[:1] = torch.nan
