"""Gradient descent with momentum: velocity = momentum * velocity + gradient; weight -= lr * velocity (Polyak, 1964).

Cost: one float32 number of state per parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register
from titan.contracts.base.cost import PersistentState


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "example"`."""

    lr: float = option(0.05, "peak learning rate", above=0)
    momentum: float = option(0.9, "share of the velocity kept per step", at_least=0, below=1)


class _Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in (p for p in group["params"] if p.grad is not None):
                state = self.state[weight]
                if not state:
                    state["velocity"] = torch.zeros_like(weight)  # sharded as the weight is: it loads at any layout
                state["velocity"].mul_(group["momentum"]).add_(weight.grad)
                weight.add_(state["velocity"], alpha=-group["lr"])


@register
class Example(Optimizer):
    """Gradient descent with momentum."""

    name = "example"
    Config = Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """One group: no parameter is treated in another way."""
        weights = [parameter.parameter for parameter in parameters]
        return _Momentum(weights, {"lr": self.config.lr, "momentum": self.config.momentum})

    def cost(self, costs: Costs, job: Job) -> Costs:
        """A float32 number of state per parameter; the update reads weight, gradient, velocity and writes two."""
        velocity = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, velocity), update_bytes=costs.update_bytes + 20)
