"""What a step counts as tokens, and that clipping only ever makes gradients smaller."""

import pytest
import torch
from torch import nn

from titan.contracts import IGNORE, Batch, ModelPart
from titan.training.engine import valid_tokens
from titan.training.gradients import clip


def test_ignored_labels_are_not_counted() -> None:
    labels = torch.tensor([[1, IGNORE, 3], [IGNORE, IGNORE, IGNORE]])
    batches = [Batch(torch.zeros_like(labels), labels), Batch(torch.zeros_like(labels), labels.abs())]
    assert valid_tokens(batches).item() == 2 + 6


@pytest.mark.parametrize(("limit", "clipped"), [(1.0, 1.0), (5.0, 5.0), (100.0, 5.0)])
def test_gradients_below_the_limit_are_not_clipped(limit: float, clipped: float) -> None:
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    clip([ModelPart(module)], torch.tensor(5.0), limit)
    assert module.weight.grad.norm().item() == pytest.approx(clipped, rel=1e-6)
