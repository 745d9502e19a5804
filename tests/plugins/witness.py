"""A technique without axes that looks at gradients: what tp ranks hold alike must have the same gradient on them."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan.contracts import BuildContext, ModelPart, Technique, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Witness(Technique):
    """Fails a step whose gradients are still a rank's own summands when techniques without axes see them."""

    name = "witness"
    Config = Config
    phase = "shard"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._parts.append(part)
        self._group = context.mesh.group("tp")

    def after_backward(self) -> None:
        for part in self._parts:
            for name, parameter in part.parameters():
                gradient = parameter.grad
                if isinstance(gradient, DTensor) and gradient.placements[-1].is_replicate():
                    first = gradient.to_local().clone()
                    dist.broadcast(first, group_src=0, group=self._group)
                    assert first.equal(gradient.to_local()), f"{name}: a partial sum"
