"""What plugins measure: how values become numbers of a row, and which ones are refused."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from titan.contracts import Axis, Measure, Mesh, ModelPart, Technique
from titan.contracts.base.layout import Layout
from titan.contracts.plugin import conformance
from titan.errors import PluginError
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.testing.ranks import run_ranks
from titan.training.metrics import Measures

DECLARED = {
    "mean": Measure("a mean", "mean"),
    "most": Measure("a maximum", "max"),
    "seen": Measure("a sum", "sum", over=("dealt",)),
}
AXES = (
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc=""),
    Axis(name="dp", data="dealt", weights="copies", topology_order=1, doc=""),
)
ONE = Mesh(Layout((), {}), torch.device("cpu"), 0)


class Guest(Technique):
    """Returns what it is given."""

    name = "guest"
    measures: Mapping[str, Measure] = DECLARED

    def __init__(self, found: Any) -> None:
        super().__init__(None)
        self.found = found

    def measure(self) -> Mapping[str, Tensor | None]:
        return self.found() if callable(self.found) else self.found


def _measures(*techniques: Technique, mesh: Mesh = ONE, parts: int = 1) -> Measures:
    model = Llama(LlamaConfig(**Llama.presets["tiny"]))
    job = SimpleNamespace(model=model, loss=CrossEntropy(Config()), techniques=techniques)
    return Measures(job, [ModelPart(nn.Identity()) for _ in range(parts)], mesh)  # type: ignore[arg-type]


def _row(found: Any, mesh: Mesh = ONE) -> dict[str, float | int | None]:
    measures = _measures(Guest(found), mesh=mesh)
    return dict(measures.row(measures.joined().tolist()))


def values(mean: Any = None, most: Any = None, seen: Any = None) -> dict[str, Tensor | None]:
    given = {"mean": mean, "most": most, "seen": seen}
    return {name: None if value is None else torch.tensor(value) for name, value in given.items()}


def test_one_rank() -> None:
    assert _row(values([6.0, 4.0], -2.5, 2**40 + 1)) == {"mean": 1.5, "most": -2.5, "seen": 2**40 + 1}


def test_a_row_leaves_out_what_no_rank_has_a_value_of() -> None:
    assert _row(values()) == {}
    assert _row(values([0.0, 0.0], seen=0)) == {"seen": 0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    found = _row(values([value, 2.0], value, value))
    assert found.keys() == DECLARED.keys()
    assert all(number == value or (math.isnan(value) and math.isnan(number)) for number in found.values())


def test_parts_of_a_rank_are_joined_as_ranks_are() -> None:
    found = iter([torch.tensor([2.0, 1.0]), torch.tensor([4.0, 2.0]), None])
    measures = {"hidden": Measure("a mean", "mean")}
    with (
        patch.object(Llama, "measures", measures),
        patch.object(Llama, "measure", lambda self, module: {"hidden": next(found)}),
    ):
        joined = _measures(parts=3)
        assert joined.row(joined.joined().tolist()) == {"hidden": 2.0}


def test_graphs_are_let_go_of() -> None:
    value = torch.ones((), requires_grad=True)
    found = _measures(Guest(values() | {"most": value * 2})).joined()
    assert not found.requires_grad


def _joined_by_four() -> list[Any]:
    """Ranks pp x dp: values of each rank's own, of one stage alone, and how many all-reduces there were."""
    rank = dist.get_rank()
    mesh = Mesh(Layout(AXES, {"pp": 2, "dp": 2}), torch.device("cpu"), rank)
    stage, replica = divmod(rank, 2)
    own = values([float(rank), 2.0], float(rank), 10 + replica)
    late = values([1.0 + replica, 4.0], math.nan if rank == 3 else 0.0) if stage else values()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        found = [_row(each, mesh=mesh) for each in (own, late, values())]
        calls = reduced.call_count
        nothing = _measures(mesh=mesh)  # the loss's alone
        nothing.joined()
        calls = (calls, reduced.call_count - calls)
        with pytest.raises(PluginError, match=r"the sum 'seen' takes the first rank along pp \(\"layers\"\) for all"):
            _row(values(seen=1) if stage else values(), mesh=mesh)
    shards = distribute_tensor(torch.ones(4), mesh["dp"])
    with pytest.raises(PluginError, match="a DTensor; a max needs a plain tensor"):
        _measures(Guest(values() | {"most": shards.sum()}), mesh=mesh).joined()
    return [found, calls]


def test_four_ranks() -> None:
    for found, calls in run_ranks(_joined_by_four, 4):
        own, late, nobody = found
        assert own == {"mean": 6 / 8, "most": 3.0, "seen": 21}
        assert late["mean"] == 3 / 8 and math.isnan(late["most"]) and late.keys() == {"mean", "most"}
        assert nobody == {}
        assert calls == (3 * 2 * 2, 2), "all-reduces do not depend on who has a value"


def test_nothing_declared_joins_nothing() -> None:
    job = SimpleNamespace(model=Technique(None), loss=Technique(None), techniques=())
    mesh = SimpleNamespace(device=torch.device("cpu"))  # which can neither sum nor find a maximum
    measures = Measures(job, [], mesh)  # type: ignore[arg-type]
    assert measures.names == () and measures.row(measures.joined().tolist()) == {}


MISFITS: list[tuple[Any, str]] = [
    (None, r"measure\(\) returned None; it must return a Mapping"),
    (lambda: 1 / 0, r"measure\(\) raised ZeroDivisionError"),
    (values() | {"sen": None}, r"returned 'sen', which its class does not declare in measures \(did you mean 'seen'"),
    ({"mean": None, "seen": None}, r"left out 'most'; return None where this rank has no value"),
    (
        values() | {"most": 1.0},
        r"returned for 'most' 1.0, of type float; a max needs a plain tensor of shape \[\] on cpu",
    ),
    (values(mean=1.0), r"for 'mean' a tensor of shape \[\] on cpu; a mean needs a plain tensor of shape \[2\] on cpu"),
    (values(most=[1.0]), r"a tensor of shape \[1\] on cpu; a max needs a plain tensor of shape \[\]"),
    (values() | {"seen": torch.ones((), device="meta")}, r"a tensor of shape \[\] on meta; a sum needs"),
]


@pytest.mark.parametrize(("found", "told"), MISFITS)
def test_values_that_do_not_fit(found: Any, told: str) -> None:
    with pytest.raises(PluginError, match=told) as refused:
        _measures(Guest(found)).joined()
    assert "technique 'guest' in " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        *((name, "rows of metrics have") for name in ("loss", "validation_loss", "skipped_updates")),
        ("z_loss", r"loss 'cross_entropy' in .* has"),
    ],
)
def test_a_name_that_others_have(name: str, owner: str) -> None:
    told = rf"technique 'guest' in .*: measures: {owner} the name '{name}' already; rename it"
    with patch.object(Guest, "measures", {name: Measure("a maximum", "max")}), pytest.raises(PluginError, match=told):
        _measures(Guest({}))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Measure("", "max"), "doc = '': must be one line"),
        (lambda: Measure("two\nlines", "max"), "must be one line"),
        (lambda: Measure("x", "median"), "join = 'median': must be one of 'mean', 'max', 'sum'"),  # type: ignore[arg-type]
        (lambda: Measure("x", "sum"), r"over = \(\) with join = 'sum': must be a tuple of facts"),
        (lambda: Measure("x", "max", over=("dealt",)), r"over = \('dealt',\) with join = 'max'"),
        (lambda: Measure("x", "sum", over=("dp",)), r"over = \('dp',\) with join = 'sum'"),  # type: ignore[arg-type]
    ],
)
def test_declarations_that_do_not_fit(make: Callable[[], Measure], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_measures_are_declared_as_such() -> None:
    facts = {"__doc__": "Loose.", "name": "loose", "Config": Config, "phase": "convert", "measures": {"x": "mean"}}
    with pytest.raises(PluginError, match=r"measures = .*: must be of type Measure"):
        conformance.check_class(type("Loose", (Guest,), facts), Technique)


def test_z_loss_is_the_mean_over_tokens_since_the_row_before() -> None:
    loss = CrossEntropy(Config(z_loss=0.5))
    generator = torch.Generator().manual_seed(0)
    squares = torch.tensor(0.0, dtype=torch.float64)
    for length in (3, 5):
        logits = torch.randn(2, length, 7, generator=generator, requires_grad=True)
        labels = torch.full((2, length), 3)
        labels[0, 0] = -100
        objective, reported = loss.compute(logits, labels)
        found = logits.double().logsumexp(-1).square().flatten()[1:].sum()
        torch.testing.assert_close((objective - reported).double(), 0.5 * found, rtol=1e-4, atol=0)
        squares += found.detach()
        with torch.no_grad():
            loss.compute(logits, labels)
    value = loss.measure()["z_loss"]
    assert value is not None and value[1] == 5 + 9
    torch.testing.assert_close(value[0], 0.5 * squares, rtol=1e-6, atol=0)
    assert loss.measure() == {"z_loss": None}
    assert CrossEntropy(Config()).measure() == {"z_loss": None}
