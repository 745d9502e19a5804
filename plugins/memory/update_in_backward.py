"""The optimizer's update within the backward pass: each parameter is updated when its gradient is there.

The gradients of all parameters never exist together: a unit's are freed when it is updated. The numbers are those of an
update after the backward pass, bit by bit, since each parameter's update depends on its own gradient alone (LOMO, arXiv
2306.09782, does so with SGD; here it is the job's optimizer). Rows have the same gradient norm.

Cost: saves 4 bytes per parameter of the rank, or 2 in pure bf16, all but those of the largest shard unit. One call of
the optimizer per parameter instead of one per group: on GPUs a few launches each, which hide behind the backward pass
of large layers.

Limits, which `check` states: the norm is known when the updates are done, so gradients cannot be clipped, and the
update of a step that is not finite cannot be skipped; it ends the run. One micro batch per step. No technique may
change gradients after the backward pass, as those that own slices or stages do. The optimizer must be separable.
Where gradients are also summed over replicas (`mesh.dp_replicate` above 1), PyTorch keeps the float32 sums of all units
until the backward pass ends. Nothing is saved then in mixed precision, and in pure bf16 the 2 bytes alone; a run says
so.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from titan.contracts import (
    BuildContext,
    Costs,
    Fact,
    Job,
    ModelPart,
    ModelSpec,
    NamedParameter,
    Technique,
    groups_of,
    register,
    shard_of,
    update_some,
)
from titan.contracts.objective import Group

_log = logging.getLogger("titan.update_in_backward")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.update_in_backward]`: there are none."""


@register
class UpdateInBackward(Technique):
    """Updates each parameter during backward and frees its gradient."""

    name = "update_in_backward"
    Config = Config
    phase = "materialise"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Nothing may need the gradients of all parameters."""
        if job.train.grad_clip:
            yield (
                f"train.grad_clip = {job.train.grad_clip:g} scales gradients by the norm of all of them, which is "
                "known after the updates; set train.grad_clip = 0"
            )
        if job.train.non_finite == "skip":
            yield 'train.non_finite = "skip" is decided after the updates; set train.non_finite = "stop"'
        if job.micro_batches > 1:
            yield (
                f"a step adds up {job.micro_batches} micro batches, and each would be an update of its own; set "
                f"train.micro_batch_size = {job.micro_batch * job.micro_batches}, or use more data-parallel ranks"
            )
        if not job.separable_updates:
            yield "the optimizer updates all parameters together, not each by itself; choose another one"
        for technique in job.techniques:
            if technique.axes and all(job.layout.degree(axis.name) == 1 for axis in technique.axes):
                continue  # nothing is split, so its hooks find nothing to do
            if type(technique).after_backward is not Technique.after_backward:
                yield f"[plugins.{technique.name}] changes gradients after the backward pass; switch either off"
            elif type(technique).before_update is not Technique.before_update:
                yield f"[plugins.{technique.name}] reads gradients before the update; switch either off"

    def facts(self) -> dict[Fact, str]:
        """A step is judged when its updates are made."""
        why = "[plugins.update_in_backward] updates weights before a step is known to be finite; switch it off"
        return {"updates_in_backward": why}

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Gradients of one shard unit at a time, but for those that are parts of buffers kept to the end."""
        if costs.gather and costs.gather.sums_replicas and costs.reduce_itemsize == costs.store_itemsize:
            return costs
        state = (
            replace(held, axes=costs.updated_over, gathered_units=1) if held.component == "gradients" else held
            for held in costs.state
        )
        return replace(costs, state=tuple(state))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Keep the part, for the names of its parameters; say once where nothing is saved."""
        replicas, precision = context.job.layout.degree("dp_replicate"), context.precision
        if replicas > 1 and not self._parts and precision.reduce_dtype == precision.store_dtype:
            _log.warning(
                f"update_in_backward saves no memory with mesh.dp_replicate = {replicas}: PyTorch keeps gradients that "
                "are summed over replicas until the backward pass ends; set mesh.dp_replicate = 1, or switch it off"
            )
        self._parts.append(part)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
    ) -> torch.optim.Optimizer:
        """Updates come from hooks of the parameters; the step at the end finds no gradient that is left."""
        groups = groups_of(optimizer)
        for part in self._parts:
            for name, parameter in part.parameters():
                parameter.register_post_accumulate_grad_hook(_Update(optimizer, groups, part, name))
        return optimizer

    def before_step(self, step: int) -> None:
        for part in self._parts:
            part.used_gradients.clear()


class _Update:
    """Updates one parameter, keeps the norm of its gradient, and frees it; called by autograd, and by FSDP2."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Mapping[nn.Parameter, Group], part: ModelPart, name: str
    ) -> None:
        self._optimizer, self._groups, self._part, self._name = optimizer, groups, part, name

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None, f"{self._name} has no gradient to be updated by"
        local = shard_of(gradient)
        self._part.used_gradients[self._name] = torch.linalg.vector_norm(local, dtype=torch.float32)
        update_some(self._optimizer, [parameter], self._groups)
        parameter.grad = None
