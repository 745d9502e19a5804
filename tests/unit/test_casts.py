"""Parameters that are cast for a forward, and gradients that are cast in the backward, without a wrapper."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from titan.contracts.base import casts
from titan.contracts.base.casts import CastParameters

IDS = torch.tensor([[3, 1, 3, 9]])


class Model(nn.Module):
    """A table, two layers of which one has a frozen bias, a layer that is never used, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.layers[0].bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        self.hidden: list[Tensor] = []
        for layer in self.layers:
            x = layer(x).tanh()
            self.hidden.append(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def cast(model: Model) -> CastParameters:
    return CastParameters(model, [[model.table], *([layer] for layer in model.layers), [model.head]], torch.bfloat16)


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().square().sum()


def expected(model: Model) -> dict[str, Tensor | None]:
    """Gradients of a model whose parameters are all bfloat16, as float32."""
    narrow = {n: p.detach().bfloat16().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    loss_of(functional_call(model, narrow, (IDS,))).backward()  # type: ignore[no-untyped-call]
    return {name: None if each.grad is None else each.grad.float() for name, each in narrow.items()}


def assert_gradients(model: Model, gradients: dict[str, Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        wanted = gradients[name]
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, wanted), name


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied_or_not(request: pytest.FixtureRequest, model: Model) -> Iterator[Model]:
    if request.param:
        model.head.weight = model.table.weight
    yield model


def test_gradients_are_those_of_a_cast_model(tied_or_not: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "PIECE", 24)  # three rows of the table, so that the last piece is shorter
    model, gradients, parameters = tied_or_not, expected(tied_or_not), dict(tied_or_not.named_parameters())
    casting = cast(model)
    loss_of(model(IDS)).backward()  # type: ignore[no-untyped-call]
    casting.restore()
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
    assert_gradients(model, gradients)


def test_micro_batches_are_added_up_in_float32(tied_or_not: Model) -> None:
    model, gradients = tied_or_not, expected(tied_or_not)
    casting = cast(model)
    for _ in range(3):
        loss_of(model(IDS)).backward()  # type: ignore[no-untyped-call]
    casting.restore()
    assert_gradients(model, {name: each if each is None else each + each + each for name, each in gradients.items()})


def test_gradients_of_a_unit_are_cast_before_the_backward_of_the_unit_before(model: Model) -> None:
    cast(model)
    came: list[str] = []
    for name in ("head.weight", "layers.1.weight", "layers.0.weight"):
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    logits = model(IDS)
    for number, hidden in enumerate(model.hidden):
        hidden.register_hook(lambda _, number=number: came.append(f"hidden {number}"))
    loss_of(logits).backward()  # type: ignore[no-untyped-call]
    assert came == ["head.weight", "hidden 1", "layers.1.weight", "hidden 0", "layers.0.weight"]


def test_modules_compute_with_copies_and_gradients_find_none_left(model: Model) -> None:
    cast(model)
    dtypes: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
    loss_of(model(IDS)).backward()  # type: ignore[no-untyped-call]
    assert dtypes == [torch.bfloat16] and model.head.weight.dtype == torch.float32
    assert model.unused.weight.dtype == torch.bfloat16  # until it is restored: no gradient has come


def test_a_first_forward_without_gradients_leaves_them_to_the_second(model: Model) -> None:
    gradients = expected(model)
    casting, plain = cast(model), model.forward

    def forward(ids: Tensor) -> Tensor:
        with torch.no_grad():
            model.layers[0](model.table(ids))
        return plain(ids)

    model.forward = forward  # type: ignore[method-assign]
    loss_of(model(IDS)).backward()  # type: ignore[no-untyped-call]
    casting.restore()
    assert_gradients(model, gradients)


def test_an_embedding_whose_forward_was_replaced_keeps_it(model: Model) -> None:
    gradients, calls = expected(model), list[torch.dtype]()
    plain = model.table.forward

    def forward(ids: Tensor) -> Tensor:
        calls.append(model.table.weight.dtype)
        return plain(ids)

    model.table.forward = forward  # type: ignore[method-assign]
    casting = cast(model)
    loss_of(model(IDS)).backward()  # type: ignore[no-untyped-call]
    casting.restore()
    assert calls == [torch.bfloat16]
    assert_gradients(model, gradients)


def test_an_evaluation_casts_once_and_gives_parameters_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    casting, weight = cast(model), model.head.weight
    with torch.no_grad():
        first = model(IDS)
        copy = model.head.weight
        second = model(IDS)
    assert model.head.weight is copy is not weight and copy.dtype == torch.bfloat16
    assert torch.equal(first, second)
    casting.restore()
    assert model.head.weight is weight
    with torch.no_grad():
        weight.zero_()
        assert not model(IDS).any()
