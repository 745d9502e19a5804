"""Muon, Lion, schedule-free AdamW and Adafactor against their formulas, written out in float64; what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan.config import load_job
from titan.contracts import NamedParameter, Optimizer
from titan.contracts.base.spec import ParameterKind
from titan.errors import ConfigError
from titan.plugins.optimizers.adafactor import Adafactor
from titan.plugins.optimizers.lion import Lion
from titan.plugins.optimizers.muon import Muon
from titan.plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from titan.testing.jobs import JOB

SHAPES = {"wide": (6, 9), "tall": (9, 4), "stack": (3, 5, 4), "norm": (7,), "table": (8, 3)}


def _parameters() -> list[NamedParameter]:
    generator = torch.Generator().manual_seed(0)
    kinds: dict[str, ParameterKind] = {"norm": "vector", "table": "table"}
    weights = ((name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items())
    return [NamedParameter(name, weight, kinds.get(name, "matrix"), name not in kinds) for name, weight in weights]


Reference = Callable[[str, Tensor, Tensor, dict[str, Tensor], int], Tensor]
"""(name, weight, gradient, state, number of the update) -> the weight after it."""


def _held(plugin: Optimizer, reference: Reference) -> tuple[Any, list[NamedParameter]]:
    """An optimizer and its parameters after three updates, which are those of the reference."""
    named = _parameters()
    optimizer = plugin.build(named)
    expected = {n.name: n.parameter.detach().double() for n in named}
    states: dict[str, dict[str, Tensor]] = {n.name: {} for n in named}
    for t in (1, 2, 3):
        for n in named:
            n.parameter.grad = torch.cos(n.parameter.detach() * t)
        optimizer.step()
        for n in named:
            assert n.parameter.grad is not None
            weight = expected[n.name]
            expected[n.name] = reference(n.name, weight, n.parameter.grad.double(), states[n.name], t)
    for n in named:
        torch.testing.assert_close(n.parameter.detach().double(), expected[n.name], rtol=2e-5, atol=2e-6)
    return optimizer, named


def _adamw(weight: Tensor, g: Tensor, state: dict[str, Tensor], t: int, lr: float, decay: float) -> Tensor:
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(g)) + 0.1 * g
    v = state["v"] = 0.95 * state.get("v", torch.zeros_like(g)) + 0.05 * g.square()
    return weight - lr * (m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8) + decay * weight)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_iterates_on_each_matrix_and_adamw_has_the_rest(nesterov: bool, adjust: str) -> None:
    config = Muon.Config(lr=0.02, weight_decay=0.3, adamw_lr=0.01, nesterov=nesterov, adjust_lr=adjust)  # type: ignore[arg-type]

    def orthogonal(matrix: Tensor) -> Tensor:
        x = matrix / matrix.norm()
        for _ in range(5):
            square = x @ x.mT
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x

    def reference(name: str, weight: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        if name in ("norm", "table"):
            return _adamw(weight, g, state, t, 0.01, 0.0)
        b = state["b"] = 0.95 * state.get("b", torch.zeros_like(g)) + 0.05 * g
        u = 0.05 * g + 0.95 * b if nesterov else b
        u = torch.stack([orthogonal(one) for one in u]) if u.ndim == 3 else orthogonal(u)
        rows, columns = g.shape[-2:]
        scale = 0.2 * math.sqrt(max(rows, columns)) if adjust != "original" else math.sqrt(max(1, rows / columns))
        return weight - 0.02 * (scale * u + 0.3 * weight)

    optimizer, _ = _held(Muon(config), reference)
    assert type(optimizer).__name__ == "Muon"


def test_singular_values_of_an_update_are_near_one() -> None:
    named = [NamedParameter("w", nn.Parameter(torch.zeros(64, 32)), "matrix", True)]
    named[0].parameter.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    Muon(Muon.Config(lr=1.0, adjust_lr="original", weight_decay=0.0)).build(named).step()
    values = torch.linalg.svdvals(named[0].parameter.detach()) / math.sqrt(2)
    assert values.min() > 0.5 and values.max() < 1.3


def test_lion_moves_each_number_by_the_rate() -> None:
    def reference(name: str, weight: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        m = state.get("m", torch.zeros_like(g))
        decay = 0.3 if name not in ("norm", "table") else 0.0
        state["m"] = 0.99 * m + 0.01 * g
        return weight - 0.02 * (torch.sign(0.9 * m + 0.1 * g) + decay * weight)

    _held(Lion(Lion.Config(lr=0.02)), reference)


def _schedule_free(decay: float, averages: dict[str, Tensor]) -> Reference:
    def reference(name: str, weight: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        z, x = state.get("z", weight), state.get("x", weight)
        v = state["v"] = 0.95 * state.get("v", torch.zeros_like(g)) + 0.05 * g.square()
        decayed = decay if name not in ("norm", "table") else 0.0
        z = state["z"] = z - 0.02 * (g / ((v / (1 - 0.95**t)).sqrt() + 1e-8) + decayed * weight)
        averages[name] = state["x"] = (1 - 1 / t) * x + z / t
        return 0.1 * z + 0.9 * state["x"]

    return reference


def test_schedule_free_takes_gradients_between_two_points_and_offers_their_mean() -> None:
    averages = dict[str, Tensor]()
    config = ScheduleFreeAdamW.Config(lr=0.02, weight_decay=0.3)
    optimizer, named = _held(ScheduleFreeAdamW(config), _schedule_free(0.3, averages))
    trained = [n.parameter.detach().clone() for n in named]
    optimizer.eval()
    for n in named:
        torch.testing.assert_close(n.parameter.detach().double(), averages[n.name], rtol=2e-5, atol=2e-6)
        assert not torch.allclose(n.parameter, optimizer.state[n.parameter]["y"], rtol=0, atol=1e-4)
    optimizer.train()
    assert all(torch.equal(n.parameter, y) for n, y in zip(named, trained, strict=True))
    assert all("y" not in optimizer.state[n.parameter] for n in named)


@pytest.mark.parametrize("scaled", [True, False])
def test_adafactor_divides_by_the_product_of_rows_and_columns(scaled: bool) -> None:
    def reference(name: str, weight: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        new, squares = t**-0.8, g.square() + 1e-30

        def moved(key: str, value: Tensor) -> Tensor:
            state[key] = value if t == 1 else (1 - new) * state[key] + new * value
            return state[key]

        if g.ndim < 2:
            v = moved("v", squares)
        else:
            rows, columns = moved("r", squares.mean(-1)), moved("c", squares.mean(-2))
            v = rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.mean(-1)[..., None, None]
        u = g / v.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item() / 0.7)
        size = max(1e-3, weight.square().mean().sqrt().item()) if scaled else 1.0
        decay = 0.3 if name not in ("norm", "table") else 0.0
        return weight - 0.02 * (size * u + decay * weight)

    config = Adafactor.Config(lr=0.02, clip=0.7, weight_decay=0.3, scale_parameter=scaled)
    optimizer, _ = _held(Adafactor(config), reference)
    numbers = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    assert numbers == (6 + 9) + (9 + 4) + 3 * (5 + 4) + 7 + (8 + 3)


def test_adafactor_adds_up_squares_of_bf16_in_float32() -> None:
    """A row of 1 and 4,095 times 1 / 256: in bf16 a sum above 2 takes no 1 / 256. The update is rounded once."""
    gradient = torch.full((2, 4096), 1 / 16)
    gradient[0, 0] = 1.0
    parameter = nn.Parameter(torch.zeros(2, 4096, dtype=torch.bfloat16))
    config = Adafactor.Config(lr=1.0, clip=0.7, scale_parameter=False)
    optimizer = Adafactor(config).build([NamedParameter("matrix", parameter, "matrix", True)])
    parameter.grad = gradient.bfloat16()
    optimizer.step()
    squares = gradient.double().square()
    rows, columns = (optimizer.state[parameter][slot] for slot in ("rows", "columns"))
    assert rows.dtype == columns.dtype == torch.float32
    torch.testing.assert_close(rows.double(), squares.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(columns.double(), squares.mean(-2), rtol=1e-6, atol=0)
    u = gradient / (squares.mean(-1, keepdim=True) * squares.mean(-2, keepdim=True) / squares.mean()).sqrt()
    expected = -u / (u.square().mean().sqrt() / 0.7).clamp(min=1.0)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=2**-8, atol=0)


def test_adafactor_keeps_the_mean_square_of_bf16_vectors_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Adafactor(Adafactor.Config()).build([NamedParameter("vector", parameter, "vector", False)])
    gradients = [torch.full((4,), value, dtype=torch.bfloat16) for value in (1.0078125, 0.3)]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    first, second = (gradient.double().square() for gradient in gradients)
    found, new = optimizer.state[parameter]["mean_square"], 2**-0.8
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), first + (second - first) * new, rtol=1e-6, atol=0)
    optimizer.state[parameter]["mean_square"] = found.bfloat16()  # as a checkpoint of float32 weights gives it
    optimizer.step()
    assert optimizer.state[parameter]["mean_square"].dtype == torch.float32


SCHEDULE_FREE = ("--optimizer.name", "schedule_free_adamw", "--data.path", ".", "--train.global_batch_size", "8")


def test_what_is_refused_with_schedule_free() -> None:
    constant = (*SCHEDULE_FREE, "--lr_schedule.name", "constant")
    with pytest.raises(ConfigError, match=r"lr_schedule\] name = 'cosine' ends at .* of its peak; set \[lr_schedule\]"):
        load_job(JOB, [*SCHEDULE_FREE, "--lr_schedule.name", "cosine"])
    load_job(JOB, [*constant, "--lr_schedule.warmup_steps", "3"])
    with pytest.raises(ConfigError, match=r"do not exchange, but mesh\.worker = 2; set mesh\.worker = 1"):
        load_job(JOB, [*constant, "--mesh.worker", "2", "--mesh.dp_shard", "1"])


def test_only_updates_of_one_parameter_at_a_time_are_said_to_be_separable() -> None:
    assert [kind.separable for kind in (Lion, ScheduleFreeAdamW, Muon, Adafactor)] == [True, True, False, False]
