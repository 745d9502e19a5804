"""Data parallelism by hand, over a mesh axis of its own: ranks see other samples and sum their gradients in each step.

titan deals the samples over the axis, sums losses and token counts over it, and divides by the tokens of all ranks.
Gradients are left to sum. Cost: one all-reduce of all gradients per step; weights are whole on every rank.
"""

from dataclasses import dataclass, replace

import torch.distributed as dist

from titan.contracts import Axis, BuildContext, Costs, Job, ModelPart, Technique, register, shard_of
from titan.contracts.base.cost import CollectiveCost


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.crew]`: there are none; `mesh.crew` above 1 enables it."""


@register
class Crew(Technique):
    """Sums gradients over `mesh.crew`."""

    name = "crew"
    Config = Config
    phase = "shard"
    axes = (Axis(name="crew", data="dealt", weights="copies", topology_order=5, doc="ranks that see other samples"),)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Once for each part of the model that this rank has. Parameters are allocated later: do not keep them here."""
        if context.mesh.layout.degree("crew") > 1:
            self._parts.append(part)
            self._group = context.mesh.group("crew")

    def after_backward(self) -> None:
        """All micro batches are in the gradients. All ranks of the group have the same parameters, in one order."""
        parameters = [parameter for part in self._parts for _, parameter in part.parameters()]
        for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
            dist.all_reduce(shard_of(gradient), group=self._group)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """A float32 number per parameter, once per step."""
        summed = CollectiveCost(
            axes=("crew",),
            collective="all_reduce",
            where="step",
            when="update",
            numel=1,
            itemsize=4,
            per_parameter=True,
        )
        return replace(costs, collectives=(*costs.collectives, summed))
