"""What is minimised, and how: loss, optimizer, learning-rate schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan.contracts.base.cost import Costs
from titan.contracts.base.registry import Plugin
from titan.contracts.job import Job


class Loss(Plugin, ABC):
    """What is minimised, as a sum over tokens; the trainer divides once, by the step's global number of valid ones."""

    kind = "loss"
    section = "loss"

    @abstractmethod
    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, reported): sums over the valid tokens, fp32 scalars, plain tensors.

        logits [B, S, V], maybe a DTensor split over V; labels [B, S]. `objective` is differentiated; `reported`,
        without a graph, is the cross-entropy in nats that the logs show (the same where there is no extra term). Both
        are equal on all ranks that split V.
        """

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The job's costs with this loss at the end of the head."""
        return costs


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter with its canonical name, and whether usual practice decays it."""

    name: str
    parameter: nn.Parameter
    decays: bool


class Optimizer(Plugin, ABC):
    """Turns gradients into an update."""

    kind = "optimizer"
    section = "optimizer"

    @abstractmethod
    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """An optimizer over these (plain or DTensor). Each group's `lr` is the peak rate; the schedule scales it.

        Its state holds tensors shaped like the parameter or scalars, so that any layout can load it.
        """

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The job's costs with this optimizer's state and the bytes of its update."""
        return costs

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """One line for the start of the run: which parameters are decayed, and how many."""
        return ""


class LrSchedule(Plugin, ABC):
    """The learning rate over the run, as a factor of the peak. A function of the step alone: nothing to save."""

    kind = "lr_schedule"
    section = "lr_schedule"

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Factor for the update that ends step `step` (1 is the first) of `steps`."""
