"""A parallel technique from outside, with a mesh axis of its own: data parallelism by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan.contracts import Axis, BuildContext, Costs, Job, ModelPart, Technique, register
from titan.contracts.base.cost import CollectiveCost


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class ToyDP(Technique):
    """Sums gradients over `mesh.toy_dp` after each step's backward."""

    name = "toy_dp"
    Config = Config
    phase = "shard"
    axes = (
        Axis(name="toy_dp", data="dealt", weights="copies", topology_order=5, doc="ranks that see different samples"),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []
        self._context: BuildContext | None = None
        self.sums = 0

    def cost(self, costs: Costs, job: Job) -> Costs:
        summed = CollectiveCost(
            axes=("toy_dp",),
            collective="all_reduce",
            where="step",
            when="update",
            numel=1,
            itemsize=4,
            per_parameter=True,
        )
        return replace(costs, collectives=(*costs.collectives, summed))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._parts.append(part)
        self._context = context

    def after_backward(self) -> None:
        assert self._context is not None
        if self._context.mesh.layout.degree("toy_dp") == 1:
            return
        for gradient in self._gradients(self._parts):
            dist.all_reduce(gradient, group=self._context.mesh.group("toy_dp"))
        self.sums += 1

    def _gradients(self, parts: Sequence[ModelPart]) -> list[Any]:
        found = [p.grad for part in parts for _, p in part.parameters() if p.grad is not None]
        return [g.to_local() if isinstance(g, DTensor) else g for g in found]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state.get("sums", 0)
