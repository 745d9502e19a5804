"""Gradient descent with Nesterov's momentum, and weight decay of matrices (an addition to their gradients).

Cost: one float32 number of state per parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register
from titan.contracts.base.cost import PersistentState


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "nesterov"`."""

    lr: float = option(0.05, "peak learning rate", above=0)
    momentum: float = option(0.9, "share of the momentum kept per step", above=0, below=1)
    weight_decay: float = option(0.0, "added to the gradient of what decays: this times the weight", at_least=0)


@register
class Nesterov(Optimizer):
    """SGD with Nesterov's momentum."""

    name = "nesterov"
    Config = Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """Two groups: matrices and the head decay, norms, biases and embeddings do not."""
        c = self.config
        groups = [
            {"params": [named.parameter for named in parameters if named.decays is decays], "weight_decay": decay}
            for decays, decay in ((True, c.weight_decay), (False, 0.0))
        ]
        return torch.optim.SGD([group for group in groups if group["params"]], c.lr, c.momentum, nesterov=True)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Weight, gradient and momentum are read, weight and momentum written."""
        momentum = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, momentum), update_bytes=costs.update_bytes + 20)
