"""Ranks with weights of their own, from outside: they train alone, and are averaged with the run's last step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan.contracts import Axis, PerRank, Technique, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Colony(Technique):
    """Averages the weights of `mesh.colony` once, at the end; counts for each weight the steps of each rank."""

    name = "colony"
    Config = Config
    phase = "materialise"
    axes = (Axis(name="colony", data="dealt", weights="own", topology_order=-1, doc="ranks that train alone"),)
    preserves_numerics = False

    def __init__(self, config):
        super().__init__(config)
        self._weights, self._steps = {}, {}

    def apply(self, part, context):
        self._context = context
        for name, parameter in part.parameters():
            self._weights[name] = parameter
            self._steps[name] = torch.zeros_like(parameter.detach())

    def state_dict(self):
        return {"steps": PerRank(self._steps, axis="dp_replicate", join="sum")}

    def load_state_dict(self, state):
        for name, steps in state.get("steps", {}).items():
            self._steps[name].copy_(steps)

    @torch.no_grad()
    def after_step(self, step, updated):
        mesh = self._context.mesh
        for name, parameter in self._weights.items():
            self._steps[name] += mesh.at("dp_replicate") + 1
            if step == self._context.job.train.steps and mesh.layout.degree("colony") > 1:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                dist.all_reduce(local, group=mesh.group("colony"))
                local /= mesh.layout.degree("colony")
