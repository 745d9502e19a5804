"""Pure bf16: how numbers are rounded, what that keeps of small updates, and what is refused and planned."""

import pytest
import torch
from torch import Tensor, nn

from tests.planned import job_of
from titan.contracts import NamedParameter, Optimizer
from titan.contracts.base.cost import Costs
from titan.errors import ConfigError
from titan.planner.step.layout import costs_of
from titan.plugins.optimizers.adamw import AdamW
from titan.plugins.optimizers.adamw_8bit import AdamW8Bit
from titan.plugins.optimizers.sgd import SGD
from titan.plugins.precision.bf16 import BFloat16, Config, rounded
from titan.plugins.precision.bf16.bits import random_bits, rounded_stochastically
from titan.testing.contract import make_plugin

MUON = ("--optimizer.name", "muon", "--plugins.path", "tests/guests/muon.py")
EXCHANGES = {"worker": ("local_steps", "gossip", "parameter_server"), "dp_replicate": ("compressed_gradients",)}
PURE = ("--plugins.bf16.pure", "true")
DRAWS = 4096


def test_the_mean_of_roundings_is_the_number() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, generator=generator)
    near = numbers.bfloat16().float()
    draws = (rounded_stochastically(numbers, random_bits(numbers, "w", 0, step)) for step in range(DRAWS))
    drawn = torch.stack([each.float() for each in draws])
    steps = (drawn.amax(0) - drawn.amin(0)).clamp(min=1e-30)
    # A mean of so many two-sided draws is off by at most half a step / 64, as a standard deviation; 5 of them.
    assert ((drawn.mean(0) - numbers).abs() < 5 * steps / 128 + 1e-9).all()
    assert ((near - numbers).abs() > 10 * steps / 128).any(), "nearest would pass as well"
    assert (drawn.unique(dim=0).shape[0]) > DRAWS // 2


def test_what_bf16_holds_stays_and_so_do_nan_and_inf() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, float("inf"), -float("inf"), 3.0e38]).bfloat16()
    bits = torch.full((8,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(rounded_stochastically(held.float(), bits).view(torch.int16), held.view(torch.int16))
    full = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs whose bits would overflow
    assert rounded_stochastically(full, bits[:2]).isnan().all()
    assert rounded_stochastically(torch.tensor([-1.0 - 2**-9]), bits[:1]).item() == -1.0 - 2**-7  # away from 0


def test_bits_are_those_of_the_place_and_of_nothing_else() -> None:
    whole = random_bits(torch.empty(5, 21, 3), "w", 1, 2)
    assert whole.shape == (5, 21, 3) and whole.min() >= 0 and whole.max() < 2**16
    assert whole.unique().numel() > 310, "neighbors draw alike"
    for other in (("v", 1, 2), ("w", 2, 2), ("w", 1, 3), ("w", 1, 2 + 2**32)):
        assert (random_bits(torch.empty(5, 21, 3), *other) == whole).sum() < 5
    assert random_bits(torch.empty(()), "w", 1, 2).shape == ()


def trained(rounding: str, plugin: Optimizer, steps: int, start: Tensor, gradients: Tensor) -> tuple[Tensor, dict]:
    """(the weights, their state) after so many steps, with weights in bf16, or in fp32 where `rounding` is empty."""
    weight = nn.Parameter(start.bfloat16().to(torch.bfloat16 if rounding else torch.float32))
    named = [NamedParameter("w", weight, "matrix", True)]
    optimizer = plugin.build(named)
    technique = BFloat16(Config(pure=True, rounding=rounding or "nearest"))  # type: ignore[arg-type]
    optimizer = technique.optimizer(optimizer, named)
    for step in range(steps):
        technique.before_step(step + 1)
        weight.grad = gradients[step % len(gradients)].to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().float(), dict(optimizer.state[weight])


def test_kahan_and_stochastic_follow_fp32_where_nearest_stalls() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = 1 + torch.rand(64, 8, generator=generator), torch.ones(1, 64, 8)
    adamw = AdamW(AdamW.Config(lr=2e-4, weight_decay=0.0))  # an update of 2e-4: a tenth of half a step of bf16 at 1
    wanted, _ = trained("", adamw, 200, start, gradients)
    off = {}
    for rounding in ("nearest", "stochastic", "kahan"):
        weights, _ = trained(rounding, adamw, 200, start, gradients)
        off[rounding] = (weights - wanted).abs().mean().item(), (weights - wanted).mean().abs().item()
    moved = (wanted - start.bfloat16().float()).abs().mean().item()
    assert off["nearest"][0] > 0.99 * moved, "the updates are not small"
    assert off["kahan"][0] < 0.003  # half a step of the last rounding is 0.002 to 0.004
    assert off["stochastic"][1] < 0.002 and off["stochastic"][0] < 0.5 * moved


def test_kahan_keeps_16_bits_of_the_weight() -> None:
    """Weight and compensation together are the fp32 weight, but for the rounding of the compensation.

    A weight in [1, 2) has a compensation of at most 2^-8, in steps of at most 2^-16: a rounding is off by at most half
    a step, as a standard deviation, and 200 independent ones by 14 times that.
    """
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(32, 16, generator=generator), torch.randn(4, 32, 16, generator=generator).bfloat16()
    wanted, _ = trained("", SGD(SGD.Config(lr=1e-4)), 200, start, gradients.float())
    weights, state = trained("kahan", SGD(SGD.Config(lr=1e-4)), 200, start, gradients.float())
    assert set(state) == {"compensation"} and state["compensation"].dtype == torch.bfloat16
    both = weights + state["compensation"].float()
    off = ((both - wanted) / wanted.abs().log2().floor().exp2()).abs()
    assert off.mean() < 200**0.5 * 2**-17 and off.max() < 4 * 200**0.5 * 2**-17
    assert off.mean() < 0.1 * ((weights - wanted) / wanted.abs().log2().floor().exp2()).abs().mean()


@pytest.mark.parametrize(("rounding", "falls"), [("nearest", False), ("stochastic", True), ("kahan", True)])
def test_a_slow_mean_of_squares_falls_only_where_state_is_rounded_stochastically(rounding: str, falls: bool) -> None:
    """After one large gradient, v falls by a thousandth in each step: below half a step of bf16."""
    gradients = torch.cat([torch.ones(1, 64, 8), torch.full((200, 64, 8), 1e-3)])
    adamw = AdamW(AdamW.Config(lr=1e-6, betas=(0.9, 0.999)))
    _, first = trained(rounding, adamw, 1, torch.ones(64, 8), gradients)
    _, last = trained(rounding, adamw, 201, torch.ones(64, 8), gradients)
    assert last["exp_avg"].dtype == last["exp_avg_sq"].dtype == torch.bfloat16
    assert last["step"].item() == 201
    share = (last["exp_avg_sq"].float().mean() / first["exp_avg_sq"].float().mean()).item()
    assert share == pytest.approx(0.999**200, rel=0.02) if falls else share > 0.99


def test_pieces_do_what_one_update_of_all_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        drawn = [nn.Parameter(torch.randn(8, 4, generator=generator).bfloat16()) for _ in range(5)]
        named = [NamedParameter(f"w{i}", weight, "matrix", i > 1) for i, weight in enumerate(drawn)]
        technique = BFloat16(Config(pure=True))
        optimizer = technique.optimizer(AdamW(AdamW.Config(lr=0.1)).build(named), named)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        for _ in range(3):
            for each in named[:-1]:  # one has no gradient
                each.parameter.grad = torch.cos(each.parameter.detach())
            optimizer.step()
        assert [list(group["params"]) for group in optimizer.param_groups] == groups
        assert set(optimizer.state) == {each.parameter for each in named[:-1]}
        return [each.parameter.detach() for each in named]

    whole = weights()
    monkeypatch.setattr(rounded, "PIECE", 40)
    assert all(torch.equal(one, other) for one, other in zip(whole, weights(), strict=True))


def test_state_stays_in_its_tensors() -> None:
    weight = nn.Parameter(torch.ones(4, 4).bfloat16())
    named = [NamedParameter("w", weight, "matrix", True)]
    optimizer = BFloat16(Config(pure=True, rounding="kahan")).optimizer(AdamW(AdamW.Config()).build(named), named)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = {slot: id(value) for slot, value in optimizer.state[weight].items()}
    optimizer.step()
    assert {slot: id(value) for slot, value in optimizer.state[weight].items()} == before
    assert set(before) == {"step", "exp_avg", "exp_avg_sq", "compensation"}


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_state_in_8_bits_is_left_to_its_optimizer(rounding: str) -> None:
    generator = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(64, 64, generator=generator), torch.randn(3, 64, 64, generator=generator).bfloat16()
    optimizer = AdamW8Bit(AdamW8Bit.Config(lr=1e-3))
    wanted, theirs = trained("", optimizer, 10, start, gradients.float())
    weights, state = trained(rounding, optimizer, 10, start, gradients)
    for slot in ("exp_avg", "exp_avg_sq"):  # gradients are the same: so are codes, bit by bit
        assert torch.equal(state[slot].codes, theirs[slot].codes) and state[slot].codes.dtype == torch.uint8
        assert torch.equal(state[slot].scales, theirs[slot].scales)
    moved = (wanted - start.bfloat16().float()).norm().item()
    both = weights + state["compensation"].float() if rounding == "kahan" else weights
    assert (both - wanted).norm() < (0.01 if rounding == "kahan" else 1.0) * moved


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plugins.bf16.rounding", "kahan"), r'rounding = "kahan" needs pure = true'),
        ((*MUON, *PURE), r'"stochastic" needs an .* updates each parameter by itself, but optimizer.name = "muon"'),
        *(
            ((f"--plugins.{name}.enabled", "true", f"--mesh.{axis}", "2", *PURE), rf"plugins.{name}\]: .* pure = false")
            for axis, names in EXCHANGES.items()
            for name in names
        ),
    ],
)
def test_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job_of(*words)


def _bytes(costs: Costs, component: str) -> float:
    return sum(held.bytes_per_param for held in costs.state if held.component == component)


@pytest.mark.parametrize(("optimizer", "slots"), [("adamw", 2), ("sgd", 0)])
def test_the_plan_halves_weights_gradients_and_state(optimizer: str, slots: int) -> None:
    words = ("--optimizer.name", optimizer)
    precisions = ("--plugins.bf16.enabled", "true"), PURE, (*PURE, "--plugins.bf16.rounding", "kahan")
    mixed, pure, kahan = (costs_of(job_of(*words, *more)) for more in precisions)
    found = [tuple(_bytes(c, part) for part in ("parameters", "gradients", "optimizer")) for c in (mixed, pure, kahan)]
    assert found == [(4, 4, 4 * slots), (2, 2, 2 * slots), (2, 2, 2 * slots + 2)]
    assert mixed.itemsize == pure.itemsize == 2
    if optimizer == "adamw":  # three passes for norm and clipping; then one kernel reads 4 numbers and writes 3
        assert pure.update_bytes == 3 * 2 + 14 and kahan.update_bytes == pure.update_bytes + 4
    assert "narrow_weights" in make_plugin("bf16", pure=True).facts() and not make_plugin("bf16").facts()
    assert job_of(*MUON, *PURE, "--plugins.bf16.rounding", "nearest").precision.store_dtype == torch.bfloat16
