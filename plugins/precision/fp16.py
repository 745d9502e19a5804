"""float16 mixed precision: fp32 master weights, fp16 forward and backward, and a loss scale that adapts itself.

fp16 has more digits than bf16, 11 bits to 8, but ends at 65,504 and has no digits left below 6e-8, where many gradients
lie. So the loss is multiplied by a scale s before it is differentiated, and the fp32 gradients are divided by it before
anything else sees them (arXiv 1710.03740, section 3.2). Grad norms, clipping and updates are those of the loss itself.
s is a power of 2, so scaling rounds nothing. It begins as `init_scale` and follows the gradients, as PyTorch's
GradScaler does:

    some gradient, or the loss, is inf or NaN on some rank:   the update is skipped;  s = max(s / 2, 1)
    after `growth_interval` updates since s last changed:     s = 2 s

Skipped updates are expected, and counted in `skipped_updates`. At s = 1, the least, one ends the run like any other
step that is not finite (`train.non_finite`): a smaller scale would take digits from gradients that have too few. A run
whose weights or losses are NaN gets there in log2(s) steps. All ranks that share weights have one scale; workers with
weights of their own each have theirs. `loss_scale` in rows of metrics is that of the next step, the mean over workers.

Parameters are cast once when a unit is gathered, activations follow; a micro batch's gradient is fp16, with the scale
in it, and is added up over micro batches and ranks in fp32. The optimizer, the loss and norms' statistics stay fp32.

Cost: 2 bytes instead of 4 per gathered parameter and activation; the master copy stays. Dividing reads and writes fp32
gradients once more per step, 8 bytes per parameter; no communication, and the host never waits for the scale. The
technique that gathers parameters casts them, so one is enabled if none is.

Limits: activations above 65,504 make the loss NaN at any scale; models trained in bf16 may have some. The matrices of
a stack of experts are multiplied one after the other, and the host waits for their counts. On a CPU without fp16
instructions, matrix products took 15 to 100 times as long as in fp32.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan.contracts import (
    BuildContext,
    Costs,
    Fact,
    Job,
    Measure,
    ModelPart,
    ModelSpec,
    Precision,
    Technique,
    option,
    register,
    shard_of,
)

LEAST, MOST = 1.0, 2.0**32
"""Bounds of the scale. Megatron-LM begins with the upper one, and falls."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.fp16]`."""

    init_scale: float = option(
        65536.0, "loss scale of the first step, a power of 2", at_least=LEAST, at_most=MOST, initial=True
    )
    growth_interval: int = option(2000, "updates at one scale before it is doubled", at_least=1, at_most=2**24)


@register
class Float16(Technique):
    """Computes in float16 with fp32 master weights, fp32 gradient sums, and a dynamic loss scale."""

    name = "fp16"
    Config = Config
    config: Config
    phase = "materialise"
    requires = ("mixed_precision",)
    provides = ("compute_dtype",)
    conflicts: ClassVar = {"compute_dtype": "both set the dtype of forward and backward"}
    preserves_numerics = False
    measures: ClassVar = {"loss_scale": Measure("number that the loss of the next step is multiplied by", "mean")}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []
        self._scale = self._updates = torch.empty(0)

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """A scale that is no power of 2 would round."""
        scale = self.config.init_scale
        if scale != _power_of_2(scale):
            yield f"init_scale = {scale:g}: must be a power of 2; nearest below: {_power_of_2(scale):.0f}"

    def facts(self) -> dict[Fact, str]:
        """Gradients are scaled until `after_backward`."""
        return {"scales_loss": f"[plugins.fp16] scales the loss, by {LEAST:g} at the least; switch fp16 off"}

    def precision(self, precision: Precision) -> Precision:
        """Parameters and activations in float16, sums of gradients in float32."""
        return Precision(param_dtype=torch.float16, reduce_dtype=torch.float32)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Gradients are read and written once more."""
        return replace(costs, update_bytes=costs.update_bytes + 8)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Note the part whose gradients are divided, and make the scale."""
        self._parts.append(part)
        self._scale = torch.full((), self.config.init_scale, dtype=torch.float32, device=context.device)
        self._updates = torch.zeros((), device=context.device)

    # --- a step -----------------------------------------------------------------------------------------------------

    def loss_scale(self) -> Tensor:
        """The scale, which is halved and doubled in place."""
        return self._scale

    @torch.no_grad()
    def after_backward(self) -> None:
        """Divide the gradients by the scale; what is not finite stays so."""
        gradients = [p.grad for part in self._parts for _, p in part.parameters() if p.grad is not None]
        if gradients:
            own = [shard_of(gradient) for gradient in gradients]
            # Gradients may be in the host's memory, where the scale is not.
            torch._foreach_mul_(own, (1 / self._scale).to(own[0].device))

    @torch.no_grad()
    def after_step(self, step: int, updated: Tensor) -> None:
        """Halve the scale after a skipped update, double it after many that were made."""
        updates = self._updates + 1
        grows = updated & (updates >= self.config.growth_interval)
        factor = torch.where(updated, torch.where(grows, 2.0, 1.0), 0.5)
        self._updates.copy_(torch.where(updated & ~grows, updates, 0.0))
        self._scale.mul_(factor).clamp_(LEAST, MOST)

    def measure(self) -> Mapping[str, Tensor | None]:
        """The scale of the next step, and 1, for the mean over ranks."""
        return {"loss_scale": torch.stack([self._scale, torch.ones_like(self._scale)])}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how many updates it has seen; each worker's own."""
        return {"scale": self._scale, "updates": self._updates}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The saved scale. That of another number of workers may be a mean: the power of 2 below it."""
        if "scale" in state:
            self._scale.fill_(_power_of_2(float(state["scale"])))
            self._updates.fill_(math.floor(state["updates"]))


def _power_of_2(scale: float) -> float:
    """The largest that is not above a scale."""
    return math.ldexp(0.5, math.frexp(scale)[1])
