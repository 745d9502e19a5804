"""Cross-entropy on whole logits: values, gradients, memory, refusals; what a step counts as tokens; clipping."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import IGNORE, Batch, ModelPart, Technique
from titan.errors import PluginError
from titan.layers.experts import SideLoss
from titan.plugins.losses import cross_entropy
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.training.engine import StepLoss, valid_tokens
from titan.training.gradients import clip, clip_divisor

BATCH, SEQ, VOCAB = 2, 9, 37


def _logits(dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    drawn = torch.randn(BATCH, SEQ, VOCAB, generator=torch.Generator().manual_seed(0))
    return (drawn * scale).to(dtype).requires_grad_()


def _labels() -> Tensor:
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    labels[0, 3], labels[1, :2] = IGNORE, IGNORE
    return labels


def _expected(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    flat, wanted = logits.double().flatten(0, 1), labels.flatten()
    log_z = flat.logsumexp(-1)[wanted != IGNORE]
    return F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORE) + z_loss * log_z.square().sum()


@pytest.fixture(params=[1, 5 * VOCAB, 1 << 20], ids=["a-token-a-chunk", "uneven-chunks", "one-chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scale", [3.0, 300.0])
def test_value_and_gradient_are_those_of_the_formula(z_loss: float, scale: float) -> None:
    logits, labels = _logits(scale=scale), _labels()
    objective, reported = CrossEntropy(Config(z_loss=z_loss)).compute(logits, labels)
    expected = _expected(logits, labels, z_loss)

    torch.testing.assert_close(objective.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(reported.double(), _expected(logits, labels), rtol=1e-6, atol=0)
    (wanted,) = torch.autograd.grad(expected * 0.25, logits)
    (gradient,) = torch.autograd.grad(objective * 0.25, logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6 * (1 + 2 * z_loss * scale))


def test_only_the_objective_has_a_graph_and_both_are_fp32_scalars() -> None:
    objective, reported = CrossEntropy(Config()).compute(_logits(torch.bfloat16), _labels())
    assert objective.requires_grad and not reported.requires_grad
    assert objective.shape == reported.shape == () and objective.dtype == reported.dtype == torch.float32
    assert objective.item() == reported.item()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, labels = _logits(torch.bfloat16), _labels()
    objective, _ = CrossEntropy(Config()).compute(logits, labels)
    torch.testing.assert_close(objective.double(), _expected(logits, labels), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(objective, logits)
    (wanted,) = torch.autograd.grad(_expected(logits, labels), logits)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=1e-7)


def test_no_valid_token_gives_zero_and_a_zero_gradient() -> None:
    logits = _logits()
    objective, reported = CrossEntropy(Config(z_loss=0.1)).compute(logits, torch.full((BATCH, SEQ), IGNORE))
    objective.backward()
    assert objective.item() == reported.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_logits_of_positions_not_learnt_from_do_not_matter() -> None:
    logits, labels = _logits().detach(), _labels()
    before, _ = CrossEntropy(Config()).compute(logits, labels)
    logits[0, 3] = torch.inf
    after, _ = CrossEntropy(Config()).compute(logits, labels)
    assert torch.equal(before, after)


@pytest.mark.parametrize("wrong", [-1, VOCAB + 1])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(wrong: int) -> None:
    labels = _labels()
    labels[0, 0] = wrong
    objective, reported = CrossEntropy(Config()).compute(_logits(), labels)
    assert objective.isnan() and reported.isnan()


def test_nothing_but_the_logits_themselves_is_kept_for_the_backward() -> None:
    logits, kept = _logits(torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        CrossEntropy(Config()).compute(logits, _labels())
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_works_without_gradients() -> None:
    with torch.no_grad():
        objective, reported = CrossEntropy(Config()).compute(_logits(), _labels())
    assert not objective.requires_grad and objective.item() == reported.item() > 0


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


def _scaling(scale: Any) -> Technique:
    """A technique with this scale."""
    made: Technique = type("Scaling", (Technique,), {"name": "scaling", "loss_scale": lambda self: scale})(None)
    return made


def test_techniques_scale_the_objective_and_that_of_side_losses_too() -> None:
    loss = StepLoss(
        CrossEntropy(Config()),
        torch.device("cpu"),
        [_scaling(torch.tensor(2.0)), Technique(None), _scaling(torch.tensor(3.0))],
    )
    weight = torch.tensor(2.0, requires_grad=True)
    assert loss.scaled(weight).item() == 12
    for wrong in (4.0, torch.tensor([4.0]), torch.tensor(4)):
        with pytest.raises(PluginError, match=r"loss_scale\(\) returned .*; required: a float32 scalar"):
            StepLoss(CrossEntropy(Config()), torch.device("cpu"), [_scaling(wrong)])
    side = SideLoss()
    side.share, side.scaled = 0.25, loss.scaled
    side(weight * 5, weight.square()).backward()
    assert weight.grad == 5 + 6 * 0.25 * 2 * 2
