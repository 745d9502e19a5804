"""Holds the first rank up while its state is taken for a save, and checks that no other worker begins its next step.

The wait ends when another has begun, which is the fault looked for, or after a second.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from titan.contracts import BuildContext, ModelPart, Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    at: int = option(2, "the step that is saved")


@register
class SlowCopy(Technique):
    """Waits."""

    name = "slow_copy"
    Config = Config
    config: Config
    phase = "materialise"
    _step = 0

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._mesh = context.mesh

    def before_step(self, step: int) -> None:
        self._step = step
        if self._mesh.at("worker"):
            dist.distributed_c10d._get_default_store().set(f"begun {step}", "")

    def state_dict(self) -> dict[str, Any]:
        if self._step == self.config.at and self._mesh.rank == 0:
            try:
                key = f"begun {self._step + 1}"
                dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=1))
            except dist.DistStoreError:
                return {}
            raise AssertionError(f"a worker has begun step {self._step + 1} while a rank copies step {self._step}")
        return {}
