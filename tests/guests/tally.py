"""A technique from outside that measures tokens, gradients and layers, each in another way."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed.tensor import DTensor

from titan.contracts import IGNORE, Measure, Technique, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Tally(Technique):
    """Counts tokens and layers, and looks for the largest gradient."""

    name = "tally"
    Config = Config
    phase = "materialise"  # the last: its batch() is given the positions that other techniques have left to this rank
    measures: ClassVar = {
        "learned_tokens": Measure("tokens with a label since the row before", "sum", over=("dealt", "sliced")),
        "largest_gradient": Measure("largest magnitude in a clipped gradient since the row before", "max"),
        "layers": Measure("layers of the model", "sum", over=("layers",)),
    }

    def __init__(self, config):
        super().__init__(config)
        self._parts, self._tokens, self._largest = [], None, None

    def apply(self, part, context):
        self._parts.append(part)
        self._spec, self._device = context.spec, context.device

    def batch(self, batch):
        if torch.is_grad_enabled():  # not in validation
            count = (batch.labels != IGNORE).sum()
            self._tokens = count if self._tokens is None else self._tokens + count
        return batch

    def before_update(self, grad_norm):
        gradients = [p.grad for part in self._parts for _, p in part.parameters()]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        largest = torch.stack([g.abs().max() for g in local if g.numel()]).max()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def measure(self):
        layers = torch.tensor(sum(len(part.layers(self._spec)) for part in self._parts), device=self._device)
        found = {"learned_tokens": self._tokens, "largest_gradient": self._largest, "layers": layers}
        self._tokens = self._largest = None
        return found
