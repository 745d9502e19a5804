"""Stochastic gradient descent, with the momentum of PyTorch's SGD.

    g = g + weight_decay * w;   m = momentum * m + g;   w = w - lr * m

Weight decay leaves out norms, biases and embeddings. It is linear in the gradient: ranks that average their weights
after a step each have made the step of the averaged gradient, which is what methods that exchange weights are held to.

Cost: 4 bytes per parameter of state with momentum, none without; 12 to 20 bytes read and written per parameter.
Limits: language models need many times the steps of AdamW. The host waits for the device once per step, to know
whether the update is to be skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register
from titan.contracts.base.cost import PersistentState


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "sgd"`."""

    lr: float = option(0.1, "peak learning rate", above=0)
    momentum: float = option(0.0, "share of the running sum of gradients that a step keeps", at_least=0, below=1)
    weight_decay: float = option(0.0, "times the weight, added to the gradient of what is decayed", at_least=0)


@register
class SGD(Optimizer):
    """SGD, with momentum or without."""

    name = "sgd"
    Config = Config
    separable = True
    config: Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        decayed = [named.parameter for named in parameters if named.decays]
        rest = [named.parameter for named in parameters if not named.decays]
        groups = [{"params": decayed, "weight_decay": self.config.weight_decay}, {"params": rest}]
        # Not fused: after a first update that is skipped, that kernel reads uninitialised sums (PyTorch 2.13).
        return torch.optim.SGD(
            [group for group in groups if group["params"]], lr=self.config.lr, momentum=self.config.momentum
        )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The running sum, if there is one; weight and gradient read, the weight written."""
        size = costs.store_itemsize
        if not self.config.momentum:
            return replace(costs, update_bytes=costs.update_bytes + 3 * size)
        state = PersistentState(component="optimizer", bytes_per_param=size, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 5 * size)
