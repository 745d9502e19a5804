"""Loss, optimizer and learning-rate schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from titan.contracts.base.cost import Costs
from titan.contracts.base.registry import Plugin
from titan.contracts.base.spec import ParameterKind
from titan.contracts.job import Job
from titan.contracts.tracker import Measure


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
        are equal on all ranks that split V.

        Called by `of_hidden`, and in validation and evaluation, on ranks that have the last pipeline stage.
        Collectives are allowed only over the ranks that split V. Draws no random numbers.
        """

    def of_hidden(self, hidden: Tensor, labels: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The same sums from the hidden states [B, S, D] that the projection to logits is about to be applied to.

        project: hidden states [B, s, D] -> logits [B, s, V], as `compute` takes them. May be called several times, on
            parts of the positions. So a loss need not make all logits at once.

        Called in training, inside of the forward of the last stage, in place of the projection's own.
        """
        return self.compute(project(hidden), labels)

    def measure(self) -> Mapping[str, Tensor | None]:
        """What this rank adds to a row of training: each name in `measures` -> a value, or None.

        As `Technique.measure`: called on every rank when a row is due. Ranks without the last pipeline stage have
        computed no loss, so they give None. `compute` is called in validation too, under `torch.no_grad`.
        """
        return {}

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The cost of a step with this loss's operations at the end of `costs.head`; a changed copy.

        Called by the planner alone, after the techniques that do not split the model into stages and before the
        optimizer.
        """
        return costs


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter.

    name: canonical name, the same at every layout.
    parameter: as the optimizer updates it: plain, or a DTensor with this rank's shard.
    kind: see `ParameterKind`. A method for matrices leaves tables, the head and vectors to another.
    decays: whether usual practice decays it: matrices and the head, but for globs of `ModelSpec.no_decay`.
    """

    name: str
    parameter: nn.Parameter
    kind: ParameterKind
    decays: bool


class Optimizer(Plugin, ABC):
    """Turns gradients into an update of the weights."""

    kind = "optimizer"
    section = "optimizer"

    @abstractmethod
    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """An optimizer over these parameters, plain or DTensors. Each group's `lr` is the peak rate.

        Called once on every rank with the parameters of its parts, materialized, before a checkpoint is loaded. In each
        step the trainer sets `lr` to peak times the schedule's factor, calls `step()` with clipped gradients, then
        `zero_grad()`. `step()` is skipped where loss or gradient norm are not finite. Collectives are allowed in
        `step()`.

        State tensors have the shape and placement of their parameter, or are scalars, so that a checkpoint loads at any
        layout.
        """

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The cost of a step with this optimizer's state and update; a changed copy.

        Called by the planner alone, after the loss. Add a `PersistentState` and the bytes that the update moves per
        parameter.
        """
        return costs

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """One line for the start of the run, such as which parameters decay and how many; empty for none.

        Called once on every rank with the same parameters as `build`; no collectives.
        """
        return ""


class LrSchedule(Plugin, ABC):
    """The learning rate over the run, as a factor of the peak. A function of the step alone, so it has no state."""

    kind = "lr_schedule"
    section = "lr_schedule"

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor for the update at the end of step `step`, from 0 to 1; `step` counts from 1 to `steps`.

        Called once per step on every rank: pure arithmetic on the host, equal on all ranks.
        """
