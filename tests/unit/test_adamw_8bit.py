"""AdamW with 8-bit state: the codes, the update beside float32 AdamW, what is planned, what a checkpoint holds."""

import pytest
import torch
from torch import nn

from tests.jobs import mesh
from tests.planned import CLUSTER, job_of
from titan.contracts import NamedParameter
from titan.planner.dryrun import dry_run
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.plugins.optimizers import adamw, adamw_8bit
from titan.plugins.optimizers.adamw_8bit import codes
from titan.plugins.optimizers.adamw_8bit.codes import Codes

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def coded(numbers: torch.Tensor, signed: bool) -> Codes:
    made = Codes.zeros(numbers, signed)
    made.write(0, numbers.numel(), numbers.reshape(-1))
    return made


def plain(coded: Codes) -> torch.Tensor:
    return torch.empty(coded.shape).copy_(coded)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_numbers_that_come_from_codes_are_the_same(signed: bool) -> None:
    numbers = torch.randn(70, 99, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 99)
    first = coded(numbers if signed else numbers.square(), signed)
    again = coded(plain(first), signed)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_value_of_its_block(signed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(1000, generator=generator) if signed else torch.rand(1000, generator=generator)
    values = torch.tensor(codes._map(signed))
    for begin in range(0, 1000, 256):
        block = numbers[begin : begin + 256]
        scale = block.abs().max()
        nearest = values[(block[:, None] / scale - values).abs().argmin(1)] * scale
        torch.testing.assert_close(plain(coded(numbers, signed))[begin : begin + 256], nearest, rtol=1e-6, atol=0)


def test_the_largest_of_a_block_is_exact_and_nothing_positive_becomes_0() -> None:
    numbers = torch.tensor([-7.0, 3.0, 0.0, 1e-9, *[0.1] * 252, 2.5, -1.0])
    found = plain(coded(numbers, True))
    assert (found[0], found[2], found[256]) == (-7.0, 0.0, 2.5)
    squares = plain(coded(numbers.square(), False))
    assert (squares > 0).tolist() == (numbers != 0).tolist()


def _trained(plugin: object, config: object, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """A regression with a layer that is coded and a bias that is not: its losses, and its last weights."""
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = (torch.randn(256, size, generator=generator) for size in (96, 64))
    weight, bias = (nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in ((64, 96), (64,)))
    named = [NamedParameter("w", weight, "matrix", True), NamedParameter("b", bias, "vector", False)]
    optimizer, losses = plugin(config).build(named), []
    for _ in range(steps):
        loss = (inputs @ weight.T + bias - wanted).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.detach(), bias.detach()]


def test_a_hundred_steps_beside_float32() -> None:
    """Measured: the loss of each step within 0.35 %, weights within 6 % of their norm."""
    exact, theirs = _trained(adamw.AdamW, adamw.Config(lr=3e-3), 100)
    found, ours = _trained(adamw_8bit.AdamW8Bit, adamw_8bit.Config(lr=3e-3), 100)
    assert found == pytest.approx(exact, rel=5e-3) and found != exact and exact[-1] < 0.7 * exact[0]
    assert all((one - other).norm() < 0.08 * other.norm() for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_small_parameters_are_those_of_float32_adamw(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(60, 50, generator=generator), torch.randn(5, 60, 50, generator=generator)
    start = start.t().contiguous().t() if transposed else start
    found = []
    for plugin, config in ((adamw.AdamW, adamw.Config()), (adamw_8bit.AdamW8Bit, adamw_8bit.Config())):
        weight = nn.Parameter(start.clone())
        optimizer = plugin(config).build([NamedParameter("w", weight, "matrix", True)])
        for gradient in gradients:
            weight.grad = torch.empty_like(weight).copy_(gradient)  # with its strides, as autograd makes it
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_pieces_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _trained(adamw_8bit.AdamW8Bit, adamw_8bit.Config(), 5)
    monkeypatch.setattr(codes, "PIECE", 512)
    pieces = _trained(adamw_8bit.AdamW8Bit, adamw_8bit.Config(), 5)
    assert whole[0] == pieces[0] and all(torch.equal(a, b) for a, b in zip(whole[1], pieces[1], strict=True))


def test_the_plan_counts_one_pass_on_a_gpu_and_those_of_pytorch_on_the_host() -> None:
    words = ("--optimizer.name", "adamw_8bit", "--train.grad_clip", "0")
    hosted = ("--plugins.fsdp.enabled", "true", "--plugins.offload.optimizer", "false", "--plugins.offload.parameters")
    here, there = costs_of(job_of(*words)), costs_of(job_of(*words, *hosted, "true"))
    assert here.update_bytes == 4 + 12 + 2 * 2 * (1 + 4 / 256) and there.update_bytes == 4 + 130


LAYOUTS = {"one rank": [], "dp 2": mesh(dp_shard=2), "tp 2": mesh(tp=2), "pp 2": mesh(pp=2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_is_the_dry_run(layout: str) -> None:
    sizes = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "256")
    batch = ("--train.global_batch_size", "16", "--train.micro_batch_size", "2", "--plugins.bf16.enabled", "true")
    job = job_of(*sizes, *batch, "--optimizer.name", "adamw_8bit", *LAYOUTS[layout])
    exact = dry_run(job, 0)
    planned = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()[0]
    assert planned.optimizer == pytest.approx(exact.at_peak["optimizer"], rel=0.03)
    assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)
    assert exact.at_peak["optimizer"] == pytest.approx(2.03 * exact.parameters, rel=0.01)
