"""A loss from outside that never has the logits of more than two positions of a sequence, in backward neither."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from titan.contracts import IGNORE, Loss, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Frugal(Loss):
    """Cross-entropy, two positions at a time."""

    name = "frugal"
    Config = Config

    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.shape[1] <= 2 or not torch.is_grad_enabled(), "these are all the logits"
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        total = F.cross_entropy(whole.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return total, total.detach()

    def of_hidden(self, hidden: Tensor, labels: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        def few(states: Tensor, own: Tensor) -> Tensor:
            return self.compute(project(states), own)[0]

        pairs = zip(hidden.split(2, dim=1), labels.split(2, dim=1), strict=True)
        objective = torch.stack([checkpoint(few, *pair, use_reentrant=False) for pair in pairs]).sum()
        return objective, objective.detach()
