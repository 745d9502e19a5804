"""Lion, evolved sign momentum (Chen et al., arXiv 2302.06675).

    u = sign(b1 m + (1 - b1) g);   w = w - lr * (u + weight_decay * w);   m = b2 m + (1 - b2) g

Every number of an update has the same size, so its norm is larger than AdamW's: the paper advises a rate 3 to 10 times
smaller, and a decay as many times larger. Weight decay leaves out norms, biases and embeddings unless `decay_all` is
set.

Cost: 4 bytes per parameter of fp32 state on the rank that holds the parameter; 20 bytes read and written per parameter
of state, weights and gradient, and 12 of what is computed between; no communication.
Limits: small batches make the sign noisy; the paper sees gains from batches of 64 sequences on. The host waits for the
device once per step, to know whether the update is to be skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register, shard_of
from titan.contracts.base.cost import PersistentState, UpdateScratch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "lion"`."""

    lr: float = option(1e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = option(
        (0.9, 0.99), "share of the momentum in the update, and the share of it that a step keeps", at_least=0, below=1
    )
    weight_decay: float = option(0.3, "weight decay coefficient, times the learning rate", at_least=0)
    decay_all: bool = option(False, "apply weight decay to norms, biases and embeddings too")


class _Lion(torch.optim.Optimizer):
    """Lion, parameter after parameter, so that it needs no more memory than one update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            keep_update, keep_momentum = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                held = (parameter.data, state["momentum"], parameter.grad)
                weight, momentum, gradient = map(shard_of, held)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                # Not named, so that it is freed before the next one is made.
                weight.add_(gradient.lerp(momentum, keep_update).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - keep_momentum)


@register
class Lion(Optimizer):
    """The sign of a momentum as the update, with decoupled weight decay."""

    name = "lion"
    Config = Config
    config: Config
    separable = True

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        decayed = [named.parameter for named in parameters if named.decays or self.config.decay_all]
        rest = [named.parameter for named in parameters if not (named.decays or self.config.decay_all)]
        groups = [{"params": decayed, "weight_decay": self.config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return _Lion([group for group in groups if group["params"]], {"lr": self.config.lr, "betas": self.config.betas})

    def cost(self, costs: Costs, job: Job) -> Costs:
        """A float32 momentum a parameter; it and the weight are read and written, the gradient is read twice."""
        size = costs.store_itemsize
        state = PersistentState(component="optimizer", bytes_per_param=size, axes=costs.updated_over)
        at_once = UpdateScratch(bytes_per_param=size)  # the sign
        return replace(
            costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 8 * size, update_scratch=at_once
        )
