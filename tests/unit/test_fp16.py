"""The loss scale of fp16: how it moves, what it does to gradients, and what a plan says of it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.planned import job_of
from titan.contracts import ModelPart
from titan.layers.experts import SideLoss
from titan.planner.machine import cluster
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.plugins.losses.cross_entropy import Config as LossConfig
from titan.plugins.losses.cross_entropy import CrossEntropy
from titan.plugins.precision.fp16 import Config, Float16
from titan.training.engine import StepLoss

MADE, SKIPPED = torch.tensor(True), torch.tensor(False)
ON = "--plugins.fp16.enabled=true"


def made(*gradients: Tensor | None, **options: Any) -> tuple[Float16, list[nn.Parameter]]:
    """The technique on parameters with these gradients."""
    weights = (torch.zeros(2) if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
    technique, module = Float16(Config(**options)), nn.ParameterList(weights)
    for parameter, gradient in zip(module, gradients, strict=True):
        parameter.grad = gradient
    technique.apply(ModelPart(module), SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    return technique, list(module)


def scale(technique: Float16) -> float:
    return technique.loss_scale().item()


def after(technique: Float16, *steps: Tensor) -> list[float]:
    """The scale after each step."""
    found = []
    for number, updated in enumerate(steps, 1):
        technique.after_step(number, updated)
        found.append(scale(technique))
    return found


def test_it_doubles_after_an_interval_of_updates_and_halves_after_a_skipped_one() -> None:
    technique, _ = made(init_scale=8, growth_interval=2)
    steps = (MADE, MADE, MADE, SKIPPED, MADE, MADE, SKIPPED, SKIPPED, MADE)
    assert after(technique, *steps) == [8, 16, 16, 8, 8, 16, 8, 4, 4]


def test_it_never_falls_below_1_where_overflow_is_a_fault() -> None:
    technique, _ = made(init_scale=4)
    assert after(technique, SKIPPED) == [2]
    assert after(technique, SKIPPED, SKIPPED) == [1, 1]


def test_it_has_a_largest_value() -> None:
    technique, _ = made(init_scale=2.0**31, growth_interval=1)
    assert after(technique, MADE, MADE) == [2.0**32] * 2


def test_gradients_lose_the_scale_and_no_digit() -> None:
    gradients = torch.tensor([1 / 3, 1e-30]), torch.tensor([math.inf, 7.0])
    technique, (small, missing, large) = made(gradients[0] * 2**20, None, gradients[1] * 2**20, init_scale=2.0**20)
    technique.after_backward()
    assert missing.grad is None and small.grad is not None and large.grad is not None
    assert torch.equal(small.grad, gradients[0]) and torch.equal(large.grad, gradients[1])


def test_the_factor_is_where_the_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in the host's memory that is not where the scale is: an accelerator refuses a factor of its own."""
    technique, _ = made(torch.zeros(2, device="meta"))
    devices = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda these, by: devices.append((these[0].device, by.device)))
    technique.after_backward()
    assert devices == [(torch.device("meta"), torch.device("meta"))]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side, self.weight = SideLoss(), nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.side(x * self.weight, self.weight.square().sum())
        return found


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by PyTorch's own tracing of a Function
def test_a_compiled_block_follows_the_scale_in_one_graph() -> None:
    technique, block = made(init_scale=8)[0], _Block()
    loss = StepLoss(CrossEntropy(LossConfig()), torch.device("cpu"), [technique])
    block.side.share, block.side.scaled = 0.5, loss.scaled
    compiler = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(block, backend=compiler, fullgraph=True)
    for updated in (MADE, SKIPPED, MADE):
        block.weight.grad = None
        compiled(torch.ones(2)).sum().backward()
        assert torch.equal(block.weight.grad, 1 + scale(technique) * 0.5 * 2 * block.weight.detach())
        technique.after_step(1, updated)
    assert scale(technique) == 4 and compiler.frame_count == 1


@pytest.mark.parametrize(("saved", "loaded"), [(1024.0, 1024), (1280.0, 1024), (1.0, 1)])
def test_a_mean_of_scales_is_loaded_as_a_power_of_2(saved: float, loaded: int) -> None:
    technique, _ = made(growth_interval=3)
    technique.load_state_dict({"scale": torch.tensor(saved), "updates": torch.tensor(1.5)})
    assert after(technique, MADE, MADE) == [loaded, 2 * loaded]


def test_a_plan_has_two_bytes_a_number_and_one_more_pass_over_gradients() -> None:
    costs, plain = costs_of(job_of(ON)), costs_of(job_of())
    assert (costs.itemsize, costs.dtype, costs.wide_dtype, costs.reduce_itemsize) == (2, "float16", "float16", 4)
    assert costs.update_bytes == plain.update_bytes + 8


def test_a_plan_takes_the_rates_of_float16() -> None:
    (of_half, of_whole), a100 = (job_of(ON), job_of()), cluster.load("a100-80gb")
    half, whole = (Planner(a100).predict(costs_of(job), job.layout) for job in (of_half, of_whole))
    assert half.step_time_s < whole.step_time_s
