"""AdamW and SGD: the update, what is decayed, what is said, what the state holds."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from titan.contracts import ModelPart, NamedParameter, groups_of, update_some
from titan.plugins.models.llama import Llama
from titan.plugins.optimizers.adamw import AdamW, Config
from titan.plugins.optimizers.sgd import SGD
from titan.training.build import named_parameters


def _parameters() -> list[NamedParameter]:
    generator = torch.Generator().manual_seed(0)
    weight, norm = torch.randn(40, 25, generator=generator), torch.randn(25, generator=generator)
    return [
        NamedParameter("w.weight", nn.Parameter(weight), "matrix", True),
        NamedParameter("n.weight", nn.Parameter(norm), "vector", False),
    ]


@pytest.mark.parametrize("decay_all", [False, True])
def test_three_updates_follow_the_formula(decay_all: bool) -> None:
    lr, (b1, b2), eps, decay = 0.02, (0.8, 0.95), 1e-6, 0.3
    named = _parameters()
    config = Config(lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, decay_all=decay_all)
    optimizer = AdamW(config).build(named)
    expected = [n.parameter.detach().double() for n in named]
    m, v = ([torch.zeros_like(w) for w in expected] for _ in range(2))
    for t in (1, 2, 3):
        for i, n in enumerate(named):
            g = torch.cos(n.parameter.detach() * t)
            n.parameter.grad = g
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g.double().square()
            step = (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
            expected[i] = expected[i] - lr * (step + (decay if n.decays or decay_all else 0.0) * expected[i])
        optimizer.step()
    for n, w in zip(named, expected, strict=True):
        torch.testing.assert_close(n.parameter.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_every_group_has_the_peak_rate_and_every_parameter_one_group() -> None:
    named = _parameters()
    groups = AdamW(Config(lr=0.5)).build(named).param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.5]
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.1]
    assert {id(p) for group in groups for p in group["params"]} == {id(n.parameter) for n in named}
    assert sum(len(group["params"]) for group in groups) == 2


def test_kinds_that_are_absent_make_no_group() -> None:
    assert len(AdamW(Config()).build(_parameters()[:1]).param_groups) == 1
    assert len(AdamW(Config(decay_all=True)).build(_parameters()).param_groups) == 1


def test_state_is_shaped_like_the_parameter_or_scalar() -> None:
    named = _parameters()
    optimizer = AdamW(Config()).build(named)
    for n in named:
        n.parameter.grad = torch.ones_like(n.parameter)
    optimizer.step()
    for n in named:
        shapes = {key: value.shape for key, value in optimizer.state[n.parameter].items()}
        assert shapes == {"step": (), "exp_avg": n.parameter.shape, "exp_avg_sq": n.parameter.shape}


def test_the_line_says_what_is_decayed() -> None:
    named = _parameters()
    assert AdamW(Config()).describe(named) == (
        "adamw: 0.001 M parameters with weight decay 0.1 in 1 tensors; "
        "2.5e-05 M in 1 (norms, biases, embeddings) without"
    )
    assert AdamW(Config(decay_all=True)).describe(named).endswith("with weight decay 0.1 in 2 tensors")


def test_norms_and_embeddings_are_named_as_not_decayed() -> None:
    model = Llama(Llama.Config(**Llama.presets["tiny"]))
    part, context = ModelPart(model.build()), SimpleNamespace(spec=model.spec())
    names = {named.name for named in named_parameters([part], context) if not named.decays}  # type: ignore[arg-type]
    assert names == {name for name, _ in part.parameters() if "norm" in name or name == "embed.weight"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_follows_the_formula_and_decays_matrices_alone(momentum: float) -> None:
    named = _parameters()
    optimizer = SGD(SGD.Config(lr=0.02, momentum=momentum, weight_decay=0.3)).build(named)
    expected = [n.parameter.detach().double() for n in named]
    sums = [torch.zeros_like(w) for w in expected]
    for t in (1, 2, 3):
        for i, n in enumerate(named):
            n.parameter.grad = torch.cos(n.parameter.detach() * t)
            gradient = n.parameter.grad.double() + (0.3 if n.decays else 0.0) * expected[i]
            sums[i] = momentum * sums[i] + gradient
            expected[i] = expected[i] - 0.02 * sums[i]
        optimizer.step()
    for n, w in zip(named, expected, strict=True):
        torch.testing.assert_close(n.parameter.detach().double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plugin", [AdamW(Config()), SGD(SGD.Config(momentum=0.9))], ids=["adamw", "sgd"])
def test_updates_of_some_parameters_after_others_are_those_of_one_step(plugin: AdamW | SGD) -> None:
    assert plugin.separable
    whole, divided = _parameters(), _parameters()
    optimizers = [plugin.build(named) for named in (whole, divided)]
    for step in (1, 2):
        for named in (*whole, *divided):
            named.parameter.grad = torch.cos(named.parameter.detach() * step)
        optimizers[0].step()
        untouched = divided[0].parameter.detach().clone()
        update_some(optimizers[1], [divided[1].parameter])
        assert torch.equal(divided[0].parameter, untouched)
        update_some(optimizers[1], [divided[0].parameter])
        assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(whole, divided, strict=True))
    assert sum(len(group["params"]) for group in optimizers[1].param_groups) == 2


def test_updates_of_a_few_parameters_at_a_time_go_through_all_of_them_once() -> None:
    """Each group's list is put aside and put back as it is, and not looked through."""

    class Unread(list[nn.Parameter]):
        def __iter__(self) -> Iterator[nn.Parameter]:
            raise AssertionError("all parameters for the update of one")

    named = _parameters()
    optimizer = SGD(SGD.Config(lr=0.5, weight_decay=0.0)).build(named)
    groups = groups_of(optimizer)
    for group in optimizer.param_groups:
        group["params"] = Unread(group["params"])
    one, other = (each.parameter for each in named)
    before = [one.detach().clone(), other.detach().clone()]
    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    update_some(optimizer, [one, nn.Parameter(torch.ones(3))], groups)
    assert torch.equal(one, before[0] - 0.5) and torch.equal(other, before[1])
    assert all(type(group["params"]) is Unread for group in optimizer.param_groups)
