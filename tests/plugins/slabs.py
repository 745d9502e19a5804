"""An optimizer that works on each rank's own shard and keeps its state as plain tensors: what no layout can load."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from titan.contracts import NamedParameter, Optimizer, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    lr: float = option(0.05, "peak learning rate", above=0)


class _Slabs(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        for group in self.param_groups:
            for parameter in group["params"]:
                values, gradient = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(gradient))
                values.sub_(mean.lerp_(gradient, 0.1), alpha=group["lr"])


@register
class Slabs(Optimizer):
    """Descent along a running mean of the gradient, shard by shard."""

    name = "slabs"
    Config = Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        return _Slabs([p.parameter for p in parameters], {"lr": self.config.lr})
