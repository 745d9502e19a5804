"""A model from outside that measures: a Llama that tells how large its hidden states are."""

from typing import ClassVar

import torch

from titan.contracts import Measure, register
from titan.plugins.models.llama import Llama


def _watch(layer, arguments, output):
    if layer.training and torch.is_grad_enabled():
        squares = output.detach().double().square().mean(-1)
        layer.watched = layer.watched + torch.stack([squares.sum(), torch.ones_like(squares).sum()])


@register
class Watched(Llama):
    """A Llama that measures the mean square of its layers' outputs."""

    name = "watched"
    measures: ClassVar = {
        "hidden_square": Measure("mean square of hidden states after a layer, since the row before", "mean")
    }

    def build(self):
        module = super().build()
        for layer in module.layers.values():
            layer.watched = 0.0
            layer.register_forward_hook(_watch)
        return module

    def measure(self, module):
        layers = [layer for layer in module.layers.values() if isinstance(layer.watched, torch.Tensor)]
        found = torch.stack([layer.watched for layer in layers]).sum(0) if layers else None
        for layer in layers:
            layer.watched = 0.0
        return {"hidden_square": found}
