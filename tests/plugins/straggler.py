"""Holds the second worker up in one step until the first has begun another, and checks that the first gets no further.

No clock is looked at: what is to happen before something else is waited for, and what must not is asserted.
"""

from dataclasses import dataclass

import torch.distributed as dist

from titan.contracts import BuildContext, ModelPart, Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    at: int = option(1, "step before which the second worker waits")
    until: int = option(0, "step that the first worker is then to begin; 0: for ever")
    bound: bool = option(True, "the first worker must not begin another step before the second has done its own")


@register
class Straggler(Technique):
    """Waits."""

    name = "straggler"
    Config = Config
    config: Config
    phase = "materialise"

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._mesh = context.mesh

    def before_step(self, step: int) -> None:
        self._step, store = step, dist.distributed_c10d._get_default_store()
        worker, config = self._mesh.at("worker"), self.config
        if worker == 1 and step == config.at:
            store.wait(["begun"])
        if worker == 0 and step == config.until:
            store.set("begun", "")
        if worker == 0 and config.bound and config.until and step == config.until + 1:
            assert store.check(["done"]), f"the first worker begins step {step}, beyond the bound"

    def after_backward(self) -> None:
        if self._mesh.at("worker") == 1 and self._step == self.config.at:
            dist.distributed_c10d._get_default_store().set("done", "")
