"""A parallel technique from outside, with a mesh axis of its own: data parallelism by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan.config import Job
from titan.contracts import Axis, Costs, Part, Technique, World, register
from titan.cost import Traffic


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Crew(Technique):
    """Sums gradients over `mesh.crew` after each step's backward."""

    name = "crew"
    Config = Config
    phase = "shard"
    axes = (Axis(name="crew", role="batch", depth=5, doc="ranks that see different samples"),)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[Part] = []
        self._world: World | None = None
        self.sums = 0

    def cost(self, costs: Costs, job: Job) -> Costs:
        summed = Traffic(
            axes=("crew",), collective="all_reduce", where="step", when="update", numbers=1, bytes=4, per_parameter=True
        )
        return replace(costs, traffic=(*costs.traffic, summed))

    def apply(self, part: Part, world: World) -> None:
        self._parts.append(part)
        self._world = world

    def after_backward(self) -> None:
        assert self._world is not None
        if self._world.mesh.layout.degree("crew") == 1:
            return
        for gradient in self._gradients(self._parts):
            dist.all_reduce(gradient, group=self._world.mesh.group("crew"))
        self.sums += 1

    def _gradients(self, parts: Sequence[Part]) -> list[Any]:
        found = [p.grad for part in parts for _, p in part.parameters() if p.grad is not None]
        return [g.to_local() if isinstance(g, DTensor) else g for g in found]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state.get("sums", 0)
