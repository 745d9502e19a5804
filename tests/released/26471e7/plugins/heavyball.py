"""An optimizer from outside: gradient descent with momentum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan.contracts import NamedParameter, Optimizer, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""

    lr: float = option(0.1, "peak learning rate", above=0)
    momentum: float = option(0.9, "share of the former update kept", at_least=0, below=1)


@register
class HeavyBall(Optimizer):
    """SGD with momentum."""

    name = "heavyball"
    Config = Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p.parameter for p in parameters], lr=self.config.lr, momentum=self.config.momentum)
