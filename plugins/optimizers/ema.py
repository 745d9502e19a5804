"""Exponential moving average of the weights: a second set, smoother than the last, that is often better to use.

    after step t:   a = d a + (1 - d) w,   d = min(decay, (1 + t) / (10 + t));   a stays where the update is skipped

a begins as the initial weights, which the smaller d of the first steps forgets soon, as in TensorFlow. At decay 0.999
it is about the mean of the last thousand steps. Averages of iterates of SGD: Polyak and Juditsky, SIAM J. Control
Optim. 30 (1992); of networks: arXiv 2411.18704.

The average changes nothing of the training. Checkpoints have it, at any layout; `titan eval`, `titan generate` and
`titan convert` use it with `--weights ema`. Switched on in a resumed run, it begins as the weights of that moment.
Buffers, such as the bias of a router, are used as they were trained. What a technique with a later table changes after
a step is averaged one step later.

Cost: 4 bytes per parameter on the rank that holds the parameter; one pass over weights and average per step (12 bytes
read and written per parameter); no communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import BuildContext, Costs, Job, ModelPart, Technique, option, register, shard_of
from titan.contracts.base.cost import PersistentState


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.ema]`."""

    decay: float = option(0.999, "share of the average that a step keeps, after the first steps", above=0, below=1)


@register
class WeightAverage(Technique):
    """Keeps an exponential moving average of the weights, for evaluation and use (EMA)."""

    name = "ema"
    Config = Config
    config: Config
    phase = "materialise"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._weights: dict[str, nn.Parameter] = {}
        self._averages: dict[str, Tensor] = {}

    def cost(self, costs: Costs, job: Job) -> Costs:
        """A float32 number per parameter, whatever the weight's dtype; both are read, and the average is written."""
        state = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 8 + costs.store_itemsize)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        for name, parameter in part.parameters():
            self._weights[name] = parameter
            self._averages[name] = torch.empty_like(parameter.detach(), dtype=torch.float32)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The saved averages; the weights of this moment where there are none."""
        saved: Mapping[str, Tensor] = state.get("weights", {})
        for name, average in self._averages.items():
            average.copy_(saved.get(name, self._weights[name]))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._averages)}

    @torch.no_grad()
    def after_step(self, step: int, updated: Tensor) -> None:
        """Move the averages towards the weights, unless these have not moved."""
        share = torch.where(updated, 1 - min(self.config.decay, (1 + step) / (10 + step)), 0.0)
        averages, weights = _local(self._averages), _local(self._weights)
        shares = {device: share.to(device) for device in {average.device for average in averages}}
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.float(), shares[average.device])  # one copy in float32 at a time


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What this rank has of each."""
    return [shard_of(tensor) for tensor in tensors.values()]
