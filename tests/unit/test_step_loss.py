"""What a step counts as tokens, and that clipping only ever makes gradients smaller."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titan.contracts import IGNORE, Batch, ModelPart, Technique
from titan.layers.experts import SideLoss
from titan.training.engine import objective_of, valid_tokens
from titan.training.gradients import clip, clip_divisor


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


def test_the_factor_of_a_fused_update_is_what_clipping_divides_by() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    weights = []
    for fused in (False, True):
        module = nn.Linear(1000, 1, bias=False)
        nn.init.ones_(module.weight)
        module.weight.grad = gradient[None].clone()
        optimizer = torch.optim.AdamW(module.parameters(), eps=1e-2, fused=True)
        if fused:
            optimizer.grad_scale = clip_divisor(gradient.norm(), 0.7)  # type: ignore[attr-defined]
        else:
            clip([ModelPart(module)], gradient.norm(), 0.7)
        optimizer.step()
        weights.append(module.weight.detach())
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones(1, 1000))


def _changing(objective: Callable[[Technique, Tensor], Tensor]) -> Technique:
    """A technique with this hook."""
    made: Technique = type("Changing", (Technique,), {"objective": objective})(None)
    return made


def test_techniques_change_the_objective_in_their_order_and_that_of_side_losses_too() -> None:
    plus, times = _changing(lambda self, loss: loss + 1), _changing(lambda self, loss: loss * 3)
    changed, weight = objective_of([plus, times]), torch.tensor(2.0, requires_grad=True)
    assert changed(weight).item() == 9
    side = SideLoss()
    side.share, side.changed = 0.25, changed
    side(weight * 5, weight.square()).backward()
    assert weight.grad == 5 + 3 * 0.25 * 2 * 2
