"""Loss, optimizer and learning-rate schedule."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan.contracts.base.cost import Costs
from titan.contracts.base.spec import ParameterKind
from titan.contracts.job import Job
from titan.contracts.plugin.options import as_table
from titan.contracts.plugin.registry import Plugin
from titan.contracts.tracker import Measure


@dataclass(frozen=True)
class Projection:
    """The projection as a function: hidden states [B, s, D] -> logits [B, s, V], as `Loss.compute` takes them.

    module: whose `forward` it is, with parameters as they are during it: gathered, or a rank's slice.  words: V.
    factor: by which the objective will be multiplied before its backward, a loss scale included; None: not known. A
        loss that makes gradients in the forward rounds them as a backward would, if it makes them with this factor.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    words: int
    factor: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of some of the positions."""
        return self.forward(hidden)

    def parameters(self) -> list[Tensor]:
        """What the forward computes with now: plain tensors, or DTensors that hold a rank's slice."""
        return list(self.module.parameters())

    @property
    def weight(self) -> Tensor | None:
        """W [V, D], plain, where logits are hidden states times its transpose and nothing else; None elsewhere."""
        linear, own = getattr(self.forward, "__func__", None) is nn.Linear.forward, self.parameters()
        alone = linear and len(own) == 1 and own[0] is self.module.weight
        return own[0] if alone and type(own[0]) in (nn.Parameter, Tensor) else None

    @contextmanager
    def computing_with(self, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Let the forward compute with other tensors in place of its parameters while the context is open."""
        held = [own for module in self.module.modules() for own in [module._parameters] if own]
        before = [dict(own) for own in held]
        for own in held:
            own.update({name: stand_ins.get(p, p) for name, p in own.items() if p is not None})  # type: ignore[misc]
        try:
            yield
        finally:
            for own, parameters in zip(held, before, strict=True):
                own.update(parameters)


class Loss(Plugin, ABC):
    """The training objective, a sum over tokens; the trainer divides it by the step's global number of valid tokens."""

    kind = "loss"
    section = "loss"
    measures: ClassVar[Mapping[str, Measure]] = {}
    """Numbers that `measure` adds to rows of training, by name."""

    @abstractmethod
    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, reported): sums over the valid tokens of a micro batch, float32 scalars, plain tensors.

        logits: [B, S, V] in the compute dtype, on the device; a DTensor split over V where loss parallelism is on.
        labels: [B, S] int64, the next token or IGNORE. With no valid token, both sums are 0.

        `objective` is differentiated. `reported` has no graph and is the cross-entropy in nats that the logs show. Both
        are equal on all ranks that split V. Called by `of_hidden`, and in evaluation, on ranks that have the last
        pipeline stage. Collectives are allowed only over the ranks that split V. Draws no random numbers.
        """

    def of_hidden(self, hidden: Tensor, labels: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
        """The same sums from the hidden states [B, S, D] that the projection to logits is about to be applied to.

        Called in training, and in validation without gradients, inside of the forward of the last stage, in place of
        the projection's own.
        project: may be called several times, on parts of the positions, so that a loss need not make all logits at
            once. It also has the parameters, for a loss that makes their gradients itself.
        """
        return self.compute(project(hidden), labels)

    def measure(self) -> Mapping[str, Tensor | None]:
        """What this rank adds to a row, as `Technique.measure`: each name in `measures` -> a value, or None.

        None on ranks without the last pipeline stage. `compute` is called in validation too, under `torch.no_grad`.
        """
        return {}

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The cost of a step with this loss's operations at the end of `costs.head`: a changed copy for planners."""
        return costs


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter.

    name: canonical name, the same at every layout.
    parameter: as the optimizer updates it: plain, or a DTensor with this rank's shard.
    kind: see `ParameterKind`.  decays: whether usual practice decays it (`ModelSpec.decays`).
    """

    name: str
    parameter: nn.Parameter
    kind: ParameterKind
    decays: bool


class Optimizer(Plugin, ABC):
    """Turns gradients into an update of the weights."""

    kind = "optimizer"
    section = "optimizer"
    preserves_numerics: ClassVar[bool] = True
    """Whether float32 training has the same curve at any layout, within the tolerances of docs/correctness.md.

    The contract suite tests it. False where state is rounded, which may fall the other way at another layout.
    """
    separable: ClassVar[bool] = False
    """Whether the update of a parameter depends on its own gradient and state alone, and needs no collective.

    Techniques that hold state or gradients of a few parameters at a time then update these first (`update_some`).
    """
    takes_grad_scale: ClassVar[bool] = False
    """Whether the host may leave it to `step()` to clip gradients and to skip an update.

    As PyTorch's fused optimizers, what `build` returns then has `_step_supports_amp_scaling = True`. Its `step()`
    divides gradients by its attribute `grad_scale` and does nothing where `found_inf` is 1: float32 scalars on the
    device, absent before they are first set.
    """
    rounds: ClassVar[bool] = False
    """Whether one kernel updates weights in bf16 in place, with fp32 arithmetic, on devices that run Triton.

    What `build` returns then has `step_rounded(streams, compensation)`. It updates parameters that have gradients, as
    `step()` does, with weights, gradients and state of a parameter's shape in bf16. All that it stores is rounded
    stochastically by the bits of `streams(parameter)` (`titan.layers.rounding`): weights by the bits themselves, and
    the n-th slot of state, in order of names from 1, by the bits times `factor_of(n)`. compensation: not empty: the
    slot of what rounding has lost. It is added to the weight before the update; the weight is rounded to nearest, and
    what that lost as weights are otherwise.
    """

    @abstractmethod
    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """An optimizer over these parameters, plain or DTensors. Each group's `lr` is the peak rate.

        Called once on every rank with the parameters of its parts, materialized, before a checkpoint is loaded. In each
        step the trainer sets `lr`, calls `step()` with clipped gradients (or see `takes_grad_scale`), unless loss or
        norm are not finite, then `zero_grad()`. `step()` may use collectives.

        State tensors have the shape and placement of their parameter, or are scalars, so that a checkpoint loads at any
        layout. A tensor of another shape is plain, whole and the same on all ranks that hold the parameter.

        An optimizer that trains other weights than those to use defines `eval()` and `train()`: the first puts the
        weights to use into the parameters, the second those to train, to the bit. The host calls them around
        validation and saves and before the end, and `train()` after a checkpoint is loaded; no collectives.
        """

    def check(self, job: Job) -> Iterable[str]:
        """Sentences about what cannot work in this job, as `Technique.check`."""
        return ()

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The cost of a step with this optimizer's `PersistentState` and `update_bytes`: called after the loss's."""
        return costs

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """One line for the start of the run; empty for none. Called once on every rank, as `build`; no collectives."""
        millions = sum(named.parameter.numel() for named in parameters) / 1e6
        options = "".join(f", {key} = {json.dumps(value)}" for key, value in as_table(self.config).items())
        return f"{self.name}: {millions:.3g} M parameters in {len(parameters)} tensors{options}"


Group = dict[str, Any]  # of `param_groups`: "params" and their options
Groups = Mapping[nn.Parameter, Group]


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """The group of each parameter, as `update_some` finds it."""
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def update_some(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], groups: Groups | None = None
) -> None:
    """Step a separable optimizer for these of its parameters alone; the others, and their state, stay as they are.

    Called with each parameter once, it does what one `optimizer.step()` does. The step's own `optimizer.step()`
    follows, by which state that goes to the host has arrived.  groups: `groups_of(optimizer)`; None: made anew.
    """
    with only(optimizer, parameters, groups):
        optimizer.step()


@contextmanager
def only(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], groups: Groups | None = None
) -> Iterator[None]:
    """A separable optimizer has these of its parameters alone while the context is open; arguments: `update_some`."""
    found = groups_of(optimizer) if groups is None else groups
    everything = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        for parameter in dict.fromkeys(parameters):
            if parameter in found:
                found[parameter]["params"].append(parameter)
        yield
    finally:
        for group, all_of_it in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = all_of_it


class LrSchedule(Plugin, ABC):
    """The learning rate over the run, as a factor of the peak. A function of the step alone, so it has no state."""

    kind = "lr_schedule"
    section = "lr_schedule"

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor, from 0 to 1, for the update of step `step`, from 1 to `steps`; arithmetic, equal on all ranks."""
