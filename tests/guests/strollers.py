"""Workers that keep their own pace, from outside: they meet where all ranks do, and take the mean of their weights."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan.contracts import Axis, Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""

    head_start: int = option(0, "steps that the first worker is to have begun before any other begins its first")


@register
class Strollers(Technique):
    """Averages the weights of `mesh.stroller` at each meeting."""

    name = "strollers"
    Config = Config
    phase = "materialise"
    axes = (Axis(name="stroller", data="dealt", weights="own", topology_order=-1, doc="workers that stroll"),)
    preserves_numerics = False

    def __init__(self, config):
        super().__init__(config)
        self._weights, self._done = [], 0

    def facts(self):
        return {"own_pace": "[plugins.strollers] lets workers stroll; disable it"}

    def apply(self, part, context):
        self._context = context
        self._weights += [parameter for _, parameter in part.parameters()]

    def before_step(self, step):
        store = dist.distributed_c10d._get_default_store()
        if self._context.mesh.at("stroller") == 0 and step == self.config.head_start:
            store.set("ahead", "")
        elif self._context.mesh.at("stroller") and step == 1 and self.config.head_start:
            store.wait(["ahead"])

    def after_step(self, step, updated):
        self._done = step

    def state_dict(self):
        """What must be the same on all ranks, or a save is refused."""
        return {"done": self._done}

    @torch.no_grad()
    def meet(self, step):
        assert step == self._done
        mesh = self._context.mesh
        for parameter in self._weights:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            dist.all_reduce(local, group=mesh.group("stroller"))
            local /= mesh.layout.degree("stroller")
