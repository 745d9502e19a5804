"""Exponential moving average of the weights, after each update: average = decay * average + (1 - decay) * weight.

Cost: one more copy of the parameters per rank, sharded as they are; no communication.
Limits: nothing reads the average during training; checkpoints contain it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import BuildContext, Costs, Job, ModelPart, Technique, option, register
from titan.contracts.base.cost import PersistentState


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.example]`."""

    decay: float = option(0.999, "share of the average kept per step", above=0, below=1)


@register
class Example(Technique):
    """Keeps an exponential moving average of the weights."""

    name = "example"
    Config = Config
    phase = "materialise"  # parameters have storage, and are the shards that this rank keeps

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._weights: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Once for each part of the model that this rank has."""
        weights = dict(part.parameters())  # canonical name -> parameter, a DTensor where FSDP or TP shards it
        self._weights |= weights
        self._average |= {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def after_step(self, step: int, updated: Tensor) -> None:
        """The weights are updated; after NaN they are not, and the average stays too, without a wait of the host."""
        share = torch.where(updated, 1 - self.config.decay, 0.0)
        for name, weight in self._weights.items():
            average = self._average[name]
            if isinstance(weight, DTensor) and isinstance(average, DTensor):
                average, weight = average.to_local(), weight.to_local()
            average.lerp_(weight, share)

    def state_dict(self) -> dict[str, Any]:
        """Under names that are the same at every layout. `titan eval --weights example` reads a table `weights`."""
        return {"weights": self._average}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Empty on a new run, whose weights may come from checkpoint.init_from."""
        saved = state.get("weights", {})
        for name, weight in self._weights.items():
            self._average[name].copy_(saved.get(name, weight))

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Four bytes per parameter, read and written in each update; the weight is read once more."""
        average = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, average), update_bytes=costs.update_bytes + 12)
