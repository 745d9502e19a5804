"""Projection and cross-entropy in chunks of tokens are those of all logits: sums, gradients, and what is held."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.operations import Watch
from titan.contracts import IGNORE, Projection
from titan.layers.decoder import CappedLinear
from titan.plugins.losses.cross_entropy import Config, CrossEntropy

BATCH, SEQ, DIM, VOCAB = 2, 9, 5, 37
TOKENS = BATCH * SEQ
LOSS = CrossEntropy(Config(chunk_tokens=4))
HEADS: dict[str, Callable[[], nn.Linear]] = {
    "a product": lambda: nn.Linear(DIM, VOCAB, bias=False),
    "with a bias": lambda: nn.Linear(DIM, VOCAB),
    "with a soft cap": lambda: CappedLinear(3.0, DIM, VOCAB),
}


def _head(kind: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = HEADS[kind]()
        for parameter in head.parameters():
            nn.init.normal_(parameter)
    return head.to(dtype)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels[0, 3], labels[1, 2:7] = IGNORE, IGNORE  # of chunks of 4 tokens one is ignored altogether
    return hidden, labels


def _project(head: nn.Module) -> Projection:
    return Projection(head, head.forward, VOCAB)


def _run(head: nn.Module, chunk: int, z_loss: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Sums and gradients, under a factor as of a mean with a loss scale."""
    hidden, labels = _inputs(dtype)
    loss = CrossEntropy(Config(z_loss=z_loss, chunk_tokens=chunk))
    objective, reported = loss.of_hidden(hidden, labels, _project(head))
    assert objective.requires_grad and not reported.requires_grad
    assert objective.shape == reported.shape == () and objective.dtype == reported.dtype == torch.float32
    (objective * 0.37).backward()
    found = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad()
    measured = loss.measure()["z_loss"]
    more = {} if measured is None else {"measured": measured}
    return {"objective": objective.detach(), "reported": reported, "hidden": hidden.grad, **found, **more}  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [1, 4, 7, TOKENS - 1])
def test_chunks_are_all_logits_at_once(kind: str, z_loss: float, chunk: int) -> None:
    head = _head(kind)
    whole, chunks = (_run(head, size, z_loss) for size in (TOKENS, chunk))
    assert whole.keys() == chunks.keys() and ("measured" in whole) == (z_loss > 0)
    for name, expected in whole.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(chunks[name], expected, rtol=1e-6, atol=1e-6, msg=told)


@pytest.mark.parametrize("kind", HEADS)
def test_without_gradients_chunks_are_all_logits_at_once(kind: str) -> None:
    head, (hidden, labels), made = _head(kind), _inputs(), list[tuple[int, ...]]()
    loss = CrossEntropy(Config(z_loss=0.01, chunk_tokens=4))
    head.register_forward_hook(lambda _, __, logits: made.append(logits.shape))
    with torch.no_grad():
        chunks = loss.of_hidden(hidden, labels, Projection(head, head, VOCAB))
        torch.testing.assert_close(chunks, loss.compute(head(hidden), labels), rtol=1e-6, atol=1e-6)
    assert {math.prod(shape[:-1]) for shape in made[:-1]} == {4, 2}, "18 tokens, 4 at a time"
    assert loss.measure()["z_loss"] is None


class _Idle(nn.Linear):
    """A plain product beside a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(DIM, VOCAB, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))


class _Adapted(_Idle):
    """A weight in two summands, whose gradients autograd gives as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(VOCAB, DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight + self.delta)


@pytest.mark.parametrize("chunk", [4, TOKENS - 1])
@pytest.mark.parametrize("kind", [_Adapted, _Idle])
def test_parameters_that_share_a_gradient_or_have_none(kind: type[nn.Linear], chunk: int) -> None:
    torch.manual_seed(2)
    head = kind()
    whole, chunks = _run(head, TOKENS), _run(head, chunk)
    assert whole["unused"] is None and chunks["unused"] is None
    for name in whole.keys() - {"unused"}:
        torch.testing.assert_close(chunks[name], whole[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_chunks_are_the_formula(kind: str) -> None:
    """In double precision, by autograd alone."""
    head = _head(kind)
    chunks = _run(head, 4, 0.01)
    hidden, labels = _inputs(torch.float64)
    logits = head.double()(hidden)[labels != IGNORE]
    log_z = logits.logsumexp(-1)
    reported = (log_z - logits.gather(-1, labels[labels != IGNORE][:, None]).squeeze(-1)).sum()
    objective = reported + 0.01 * log_z.square().sum()
    expected = torch.autograd.grad(objective * 0.37, (hidden, *head.parameters()))
    torch.testing.assert_close(chunks["objective"].double(), objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunks["reported"].double(), reported, rtol=1e-6, atol=0)
    names = ["hidden", *(name for name, _ in head.named_parameters())]
    for name, wanted in zip(names, expected, strict=True):
        torch.testing.assert_close(chunks[name].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["a product", "with a soft cap"])
def test_low_precision_rounds_as_often_as_chunks(kind: str, dtype: torch.dtype) -> None:
    exact, found = _run(_head(kind), TOKENS), _run(_head(kind, dtype), 4, dtype=dtype)
    assert found["weight"].dtype == found["hidden"].dtype == dtype
    for name, expected in exact.items():
        assert (found[name].float() - expected).norm() < 0.03 * expected.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_lies_in_new_memory_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **more: empty_like(*args, **more).fill_(torch.nan))
    found = _run(_head("a product", dtype), 4, dtype=dtype)
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_a_sum_beyond_float16_is_finite_once_it_is_scaled() -> None:
    head = _head("a product", torch.float16)
    hidden = torch.full((1, 64, DIM), 2000.0, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(1, 64, dtype=torch.int64)
    nn.init.zeros_(head.weight)
    objective, _ = CrossEntropy(Config(chunk_tokens=16)).of_hidden(hidden, labels, _project(head))
    (objective / 64).backward()
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad[0], torch.full((DIM,), -2000 * 36 / 37, dtype=torch.float16))


def test_no_label_gives_zeros_and_one_outside_the_vocabulary_nan() -> None:
    head, (hidden, labels) = _head("a product"), _inputs()
    objective, reported = LOSS.of_hidden(hidden, labels.fill_(IGNORE), _project(head))
    objective.backward()
    assert objective.item() == reported.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any() and not head.weight.grad.any()  # type: ignore[union-attr]
    labels[0, 0] = VOCAB
    assert LOSS.of_hidden(hidden, labels, _project(head))[0].isnan()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    head, (hidden, labels) = _head("a product"), _inputs()
    hidden.requires_grad_(frozen == "weight")
    head.requires_grad_(frozen == "hidden")
    objective, _ = LOSS.of_hidden(hidden, labels, _project(head))
    assert objective.requires_grad == (frozen != "both")
    if frozen != "both":
        objective.backward()
    assert (hidden.grad is not None) == (frozen == "weight")
    assert (head.weight.grad is not None) == (frozen == "hidden")


@pytest.mark.parametrize("kind", HEADS)
def test_hooks_of_a_parameter_see_its_gradient_once(kind: str) -> None:
    head, (hidden, labels) = _head(kind), _inputs()
    seen: list[Tensor] = []
    after: list[Tensor] = []
    head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    head.weight.register_post_accumulate_grad_hook(after.append)
    own = head.weight
    objective, _ = LOSS.of_hidden(hidden, labels, _project(head))
    assert not seen and head.weight is own
    objective.backward()
    assert len(seen) == len(after) == 1
    assert head.weight.grad is not None and torch.equal(seen[0], head.weight.grad)


def test_gradients_of_micro_batches_add_up() -> None:
    head, (hidden, labels) = _head("a product"), _inputs()
    objectives = [LOSS.of_hidden(hidden, labels, _project(head))[0] for _ in range(2)]  # both are under way at once
    objectives[1].backward()
    once = head.weight.grad.clone()  # type: ignore[union-attr]
    objectives[0].backward()
    torch.testing.assert_close(head.weight.grad, 2 * once)


def test_a_second_backward_is_refused() -> None:
    hidden, labels = _inputs()
    objective, _ = LOSS.of_hidden(hidden, labels, _project(_head("a product")))
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        objective.backward()


def _sizes(sizes: list[int]) -> Watch:
    """Notes how many numbers each tensor has that an operation returns."""

    def note(_: Any, args: Any, out: Any) -> None:
        sizes.extend(each.numel() for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor))

    return Watch(note)


@pytest.mark.parametrize("kind", HEADS)
def test_no_operation_has_the_logits_of_more_than_a_chunk(kind: str) -> None:
    head, (hidden, labels) = _head(kind), _inputs()
    sizes: list[int] = []
    with _sizes(sizes):
        CrossEntropy(Config(chunk_tokens=6)).of_hidden(hidden, labels, _project(head))[0].backward()
    assert max(sizes) == 6 * VOCAB > max(head.weight.numel(), hidden.numel())


def test_the_gradient_that_was_made_becomes_the_parameters_own() -> None:
    """Without a copy: the head's weight may be the largest tensor there is."""
    head, (hidden, labels) = _head("a product"), _inputs()
    sizes, made = list[int](), list[str]()

    def note(function: Any, args: Any, out: Any) -> None:
        held = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        if isinstance(out, Tensor) and out.numel() >= VOCAB * DIM and out.untyped_storage()._cdata not in held:
            made.append(str(function))

    with _sizes(sizes):
        objective, _ = CrossEntropy(Config(chunk_tokens=1)).of_hidden(hidden, labels, _project(head))
    with Watch(note):
        objective.backward()
    assert max(sizes) == VOCAB * DIM and not made


def test_bf16_rounds_as_a_backward_would_where_the_factor_is_known() -> None:
    """But for the hidden states' own gradient, in one product, so bits are the same; whatever the loss scale adds."""
    head, factor = _head("a product", torch.bfloat16), torch.tensor(1 / 37)
    found = []
    for chunk in (TOKENS, 4):
        hidden, labels = _inputs(torch.bfloat16)
        project = replace(_project(head), factor=factor)
        objective, _ = CrossEntropy(Config(chunk_tokens=chunk)).of_hidden(hidden, labels, project)
        (objective * factor * 1024).backward()
        found.append(hidden.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_without_gradients_no_gradient_is_made() -> None:
    hidden, labels = _inputs()
    expected, _ = LOSS.of_hidden(hidden, labels, _project(_head("a product")))
    with torch.no_grad():
        objective, reported = LOSS.of_hidden(hidden, labels, _project(_head("a product")))
    assert not objective.requires_grad
    torch.testing.assert_close(objective, expected.detach())
    torch.testing.assert_close(reported, expected.detach())
