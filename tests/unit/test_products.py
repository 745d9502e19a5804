"""Products in float32 of what is bf16, as on a CPU without instructions for bf16: the numbers, and who computes so."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.jobs import LLAMA, MOE
from tests.operations import Watch
from titan.contracts.objective import Projection
from titan.layers import products
from titan.layers.attention import attend, document_mask
from titan.layers.experts import stacked_product
from titan.plugins.losses.cross_entropy.fused import fused
from titan.plugins.precision.bf16 import BFloat16, Config
from titan.testing.jobs import train_job, trained

STEP = 2.0**-8
"""Of bf16: the largest relative error of a number that is rounded once."""


@pytest.fixture(autouse=True, params=[True, False], ids=["in float32", "in bf16"])
def in_float32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "LACKS_BF16", request.param)
    return bool(request.param)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradient of each input, with one for the result that is drawn."""
    own = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*own)
    return [result.detach(), *torch.autograd.grad(result, own, _drawn(*result.shape).to(result.dtype))]


def _assert_rounded_once(found: list[Tensor], exact: list[Tensor]) -> None:
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=STEP, atol=1e-5)


def _assert_near(found: list[Tensor], exact: list[Tensor], steps: int) -> None:
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < steps * STEP * other.norm()


def _watch(seen: list[torch.dtype]) -> Watch:
    """Notes the dtypes of the matrices that are multiplied."""
    kinds = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm)
    return Watch(lambda func, args, _: seen.append(args[1].dtype) if func.overloadpacket in kinds else None)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_and_its_gradients_are_rounded_once(bias: bool) -> None:
    inputs = [_drawn(2, 7, 24), _drawn(40, 24), *([_drawn(40)] if bias else [])]
    exact = _gradients(F.linear, *(each.double() for each in inputs))
    _assert_rounded_once(_gradients(products.linear, *inputs), exact)


def test_a_linear_saves_its_own_operands() -> None:
    x, weight, saved = _drawn(7, 24).requires_grad_(), _drawn(40, 24).requires_grad_(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        products.linear(x, weight)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_a_linear_is_recomputed_and_compiled() -> None:
    inputs = [_drawn(7, 24), _drawn(40, 24)]
    plain = _gradients(products.linear, *inputs)
    again = _gradients(lambda *own: checkpoint(products.linear, *own, use_reentrant=False), *inputs)
    compiled = _gradients(torch.compile(products.linear, backend="aot_eager", fullgraph=True), *inputs)
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(plain, again, compiled, strict=True))


def test_a_backward_of_one_input_computes_one_product(in_float32: bool) -> None:
    x, weight = _drawn(7, 24).requires_grad_(), _drawn(40, 24).requires_grad_()
    y, seen = products.linear(x * 1, weight), list[torch.dtype]()
    with _watch(seen):
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert seen == [torch.float32 if in_float32 else torch.bfloat16]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_attention_are_those_of_double_precision(kv_heads: int, masked: bool) -> None:
    mask = None
    if masked:
        seen = document_mask(torch.tensor([[0] * 20 + [1] * 13]))
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, -torch.inf)
    inputs = [_drawn(1, heads, 33, 16) for heads in (4, kv_heads, kv_heads)]
    found = _gradients(lambda *own: attend(*own, mask), *inputs)
    wide = None if mask is None else mask.double()
    exact = _gradients(lambda *own: attend(*own, wide), *(each.double() for each in inputs))
    assert {one.dtype for one in found} == {torch.bfloat16}
    _assert_near(found, exact, 3)


@pytest.mark.parametrize(
    ("width", "turned", "learned"),
    [(16, True, False), (8, False, False), (16, False, True)],
    ids=["strides", "another width of values", "a mask with a gradient"],
)
def test_attention_leaves_to_pytorch_what_the_kernel_does_not_take(width: int, turned: bool, learned: bool) -> None:
    q, v, mask = _drawn(1, 4, 16, 16), _drawn(1, 4, 16, width), _drawn(1, 4, 16, 16)
    inputs = [q, v, mask] if learned else [q, v]

    def attended(q: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return attend(q.mT if turned else q, q, v, *masks)

    found, exact = _gradients(attended, *inputs), _gradients(attended, *(each.double() for each in inputs))
    _assert_near(found, exact, 4)


def test_rows_of_experts_are_rounded_once() -> None:
    counts = torch.tensor([5, 0, 2])
    inputs = [_drawn(7, 24), _drawn(3, 24, 40)]
    exact = _gradients(lambda *own: stacked_product(*own, counts), *(each.double() for each in inputs))
    _assert_rounded_once(_gradients(lambda *own: stacked_product(*own, counts), *inputs), exact)


def test_the_fused_loss_and_its_gradients() -> None:
    labels, found, exact = torch.arange(32).view(2, 16) % 50, list[Tensor](), list[Tensor]()
    for results, dtype in ((found, torch.bfloat16), (exact, torch.float64)):
        head = nn.Linear(24, 50, bias=False, dtype=dtype)
        head.weight.data = _drawn(50, 24).to(dtype)
        states = _drawn(2, 16, 24).to(dtype).requires_grad_()
        objective, _, _ = fused(states, labels, Projection(head, head.forward, 50), 8, 0.0)
        objective.backward()
        assert states.grad is not None and head.weight.grad is not None
        results += [objective.detach(), states.grad, head.weight.grad]
    assert [each.dtype for each in found[1:]] == [torch.bfloat16] * 2
    _assert_near(found, exact, 3)


def test_linears_change_on_such_a_cpu_alone_and_a_forward_that_was_replaced_stays(in_float32: bool) -> None:
    plain, replaced = nn.Linear(8, 8), nn.Linear(8, 8)
    replaced.forward = lambda x: x
    job = SimpleNamespace(run=SimpleNamespace(seed=0))
    part = SimpleNamespace(layers=lambda spec: [("layers.0", nn.Sequential(plain, replaced))])
    for kind, changes in (("cpu", in_float32), ("cuda", False)):
        context = SimpleNamespace(job=job, spec=None, device=torch.device(kind))
        plain.__class__ = nn.Linear
        BFloat16(Config()).apply(part, context)  # type: ignore[arg-type]
        assert (type(plain) is not nn.Linear) is changes
        assert type(replaced) is nn.Linear


def test_nothing_is_widened_on_the_meta_device_nor_in_other_precisions() -> None:
    meta = torch.empty(2, 2, dtype=torch.bfloat16, device="meta")
    assert not any(map(products.in_float32, (meta, torch.ones(2), torch.ones(2).half())))


def _watched(lacks: bool, folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train; how many products of two bf16 matrices there were."""
    products.LACKS_BF16 = lacks
    seen: list[torch.dtype] = []
    with _watch(seen):
        trained(folder, words, config)
    return {"products": torch.tensor(seen.count(torch.bfloat16))}


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=lambda path: path.stem)
def test_a_run_in_bf16_computes_so(config: Path, in_float32: bool, tmp_path: Path) -> None:
    words = ("--plugins.bf16.enabled", "true", "--train.steps", "1", "--validation.every", "0")
    found = train_job(tmp_path, 1, *words, config=config, run=partial(_watched, in_float32))
    assert bool(found.weights["products"] == 0) is in_float32
