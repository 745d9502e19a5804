"""The attention kernels for CPUs: against exact numbers, and their operations under PyTorch."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.operations import Watch
from titan.planner.dryrun.meta_tensors import MetaTensorMode
from titan.planner.dryrun.work import attention_flops, flops_of
from titan.plugins.attention import cpu_kernel
from titan.plugins.attention.cpu_kernel import OPERATIONS, cpu_attention, why_not

CPU = torch.device("cpu")
SLACK = 2.0
"""Errors may be as large as PyTorch's own in the same dtype, times this."""


class Shape(NamedTuple):
    """B, H, K, S, N, and what a query sees."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int
    window: int = 0
    scale: float | None = None
    documents: int = 0
    """Mean length; 0: one document."""


SHAPES = (
    Shape(2, 4, 4, 128, 32),
    Shape(1, 2, 1, 70, 16),
    Shape(2, 6, 2, 200, 64),
    Shape(1, 2, 2, 257, 128, window=100),
    Shape(1, 2, 2, 300, 48, documents=20),
    Shape(2, 4, 2, 333, 80, window=17, documents=60),
    Shape(1, 1, 1, 1, 32),
    Shape(1, 2, 2, 15, 112, scale=0.3),
    Shape(1, 3, 3, 130, 96, scale=4.0),
    Shape(1, 2, 1, 100, 256),
)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of q, k and v; skips the test where no kernel computes it."""
    if why := why_not(CPU, request.param, 32):
        pytest.skip(why)
    return request.param


@pytest.fixture
def kernel() -> None:
    """Skips the test where there is no kernel."""
    if why := why_not(CPU, torch.bfloat16, 32):
        pytest.skip(why)


def _tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the gradient of the output, as models lay them out, [B, S, H, N]; and the documents."""
    drawn = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, length, width, *_ = shape
    sizes = [(batch, length, count, width) for count in (heads, kv_heads, kv_heads, heads)]
    made = [torch.randn(size, generator=drawn).to(dtype).transpose(1, 2) for size in sizes]
    if not shape.documents:
        return made, None
    begins = torch.rand(batch, length, generator=drawn) < 1 / shape.documents
    return made, begins.cumsum(-1)


def _seen(shape: Shape, documents: Tensor | None) -> Tensor:
    """Which position sees which, [1 or B, 1, S, S] bool."""
    seen = torch.ones(shape.length, shape.length, dtype=torch.bool).tril()
    if shape.window:
        seen = seen.triu(1 - shape.window)
    if documents is None:
        return seen[None, None]
    return seen & (documents[:, None, :, None] == documents[:, None, None, :])


def _plainly(shape: Shape, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Output and gradients in float64, by separate operations."""
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    keys, values = (tensor.repeat_interleave(shape.heads // shape.kv_heads, 1) for tensor in (k, v))
    scores = q @ keys.mT * (shape.width**-0.5 if shape.scale is None else shape.scale)
    out = scores.masked_fill(~_seen(shape, documents), -math.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def _by(operation: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of an operation of q, k and v."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = operation(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


def _by_kernel(shape: Shape, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    operation = partial(cpu_attention, scale=shape.scale, window=shape.window, documents=documents)
    return _by(operation, tensors)


def _by_pytorch(shape: Shape, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    masked = bool(shape.window) or documents is not None
    group = shape.heads // shape.kv_heads

    def operation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        mask = _seen(shape, documents) if masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, scale=shape.scale)

    return _by(operation, tensors)


def _errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm()) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_further_from_exact_numbers_than_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    tensors, documents = _tensors(shape, dtype)
    wanted = _plainly(shape, tensors, documents)
    ours, theirs = (_errors(by(shape, tensors, documents), wanted) for by in (_by_kernel, _by_pytorch))
    # Gradients that are zero in exact numbers are a difference of two equal sums, which are not equal in all bits.
    least = [2e-7 * float(x.norm()) if x.norm() > 1e-6 else 1e-6 * x.numel() ** 0.5 for x in wanted]
    within = [own <= SLACK * other + tiny for own, other, tiny in zip(ours, theirs, least, strict=True)]
    assert all(within), (ours, theirs)


def test_bfloat16_by_the_kernel_of_float32_is_rounded_once(monkeypatch: pytest.MonkeyPatch, kernel: None) -> None:
    """As on a CPU that has no instructions for bfloat16."""
    if why := why_not(CPU, torch.float32, 32):
        pytest.skip(why)
    monkeypatch.setattr(cpu_kernel, "computed_in", lambda _: torch.float32)
    shape = Shape(1, 4, 2, 90, 32)
    tensors, _ = _tensors(shape)
    out, *gradients = _by_kernel(shape, tensors, None)
    wide, *exact_gradients = _by_kernel(shape, [tensor.float() for tensor in tensors], None)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())
    for ours, exact in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).norm() < 2**-7 * exact.norm()  # the saved output is rounded too


@pytest.mark.parametrize("sees", ["window", "documents"])
def test_rows_that_see_only_themselves_return_their_value(sees: str, dtype: torch.dtype) -> None:
    shape = Shape(2, 4, 2, 100, 32)
    tensors, _ = _tensors(shape, dtype)
    more = {"window": 1} if sees == "window" else {"documents": torch.arange(100).expand(2, -1)}
    (out, dq, dk, dv), rounding = _by(partial(cpu_attention, **more), tensors), torch.finfo(dtype).eps
    exactly = 0.0 if dtype == torch.bfloat16 else 2 * rounding
    torch.testing.assert_close(out, tensors[2].repeat_interleave(2, 1), rtol=exactly, atol=0)
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
    # The weight of the log-sum-exp is 1 but for its last bits, so that a sum may lie on the other side of a tie.
    wanted = tensors[3].double().unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(dv.double(), wanted, rtol=rounding, atol=1e-5)


def test_scores_that_grow_along_the_sequence(dtype: torch.dtype) -> None:
    """Each block of keys raises the maximum, and what was summed before shrinks."""
    shape = Shape(1, 2, 2, 400, 32)
    tensors, _ = _tensors(shape, dtype)
    tensors[0] = tensors[0].abs()
    tensors[1] = (tensors[1].abs() * torch.linspace(0.1, 8, 400)[:, None]).to(dtype)
    wanted = _plainly(shape, tensors, None)
    ours, theirs = (_errors(by(shape, tensors, None), wanted) for by in (_by_kernel, _by_pytorch))
    assert all(own <= SLACK * other for own, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_the_log_of_the_sums_is_natural(dtype: torch.dtype) -> None:
    (q, k, v, _), _ = _tensors(Shape(1, 2, 2, 90, 32), dtype)
    _, lse = OPERATIONS[0](q, k, v, None, 0.25, 0)
    scores = (q.float() @ k.float().mT * 0.25).masked_fill(torch.ones(90, 90).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [Shape(1, 4, 2, 200, 32), Shape(2, 2, 2, 150, 64, window=70, documents=50)], ids=str)
def test_the_same_bits_with_any_number_of_threads_and_in_every_run(
    shape: Shape, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With many threads for few heads, the bfloat16 kernel computes gradients of keys and of queries apart."""
    tensors, documents = _tensors(shape, dtype)
    before, first = torch.get_num_threads(), _by_kernel(shape, tensors, documents)
    for threads, address in ((1, None), (3, None), (16, None), (5, 0)):  # 0: threads that the kernel starts itself
        with monkeypatch.context() as patch:
            if address is not None:
                patch.setattr(cpu_kernel, "gomp_parallel", lambda: 0)
            torch.set_num_threads(threads)
            try:
                again = _by_kernel(shape, tensors, documents)
            finally:
                torch.set_num_threads(before)
        assert all(map(torch.equal, again, first)), threads


def test_the_same_bits_however_tensors_lie_in_memory(dtype: torch.dtype) -> None:
    shape = Shape(2, 4, 2, 100, 32)
    tensors, _ = _tensors(shape, dtype)
    first = _by_kernel(shape, tensors, None)
    layouts: list[Callable[[Tensor], Tensor]] = [
        Tensor.contiguous,
        lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda x: F.pad(x, (8, 24))[..., 8:-24],
    ]
    for layout in layouts:
        assert all(map(torch.equal, _by_kernel(shape, [layout(x) for x in tensors], None), first))
    tensors[0] = tensors[0][:, :1].expand(-1, 4, -1, -1)
    wanted = _by_kernel(shape, [tensors[0].contiguous(), *tensors[1:]], None)
    assert all(map(torch.equal, _by_kernel(shape, tensors, None), wanted))


def test_blocks_in_which_nothing_is_seen_are_not_read(dtype: torch.dtype) -> None:
    """NaN in a document is in its own results, and in none of the next, which begins at a block of its own."""
    shape = Shape(1, 2, 2, 256, 32)
    (q, k, v, grad), _ = _tensors(shape, dtype)
    for tensor in (q, k, v):
        tensor[:, :, :128] = math.nan
    documents = (torch.arange(256) >= 128).long()[None]
    for clean, more in ((128, {"documents": documents}), (192, {"window": 64})):
        results = _by(partial(cpu_attention, **more), [q, k, v, grad])
        assert all(one[:, :, clean:].isfinite().all() for one in results), more
        assert all(one[:, :, :64].isnan().all() for one in results), more


WITHOUT_THREADS = """
import resource, torch
from titan.plugins.attention import cpu_kernel
q = torch.randn(2, 4, 64, 32, dtype=torch.bfloat16)
torch.set_num_threads(1)
expected = cpu_kernel.cpu_attention(q, q, q)
torch.set_num_threads(4)
cpu_kernel.gomp_parallel = lambda: 0
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**20, resource.RLIM_INFINITY))  # less than a thread's stack
assert torch.equal(cpu_kernel.cpu_attention(q, q, q), expected)
"""


def test_a_machine_without_more_threads_computes_with_those_it_has(kernel: None) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The check itself reads `grad` of tensors that are not leaves (PyTorch 2.14 and 2.15), and hides what Python says of it
# only where warnings are not errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("documents", [False, True])
def test_pytorch_finds_no_fault_in_the_operation(documents: bool, dtype: torch.dtype) -> None:
    tensors, ids = _tensors(Shape(2, 4, 2, 70, 32, documents=20 * documents), dtype)
    inputs = [tensor.requires_grad_() for tensor in tensors[:3]]
    opcheck(OPERATIONS[0], (*inputs, ids, 0.2, 30))


def test_compiled_as_one_graph(dtype: torch.dtype) -> None:
    shape = Shape(2, 4, 2, 70, 32, window=30, documents=20)
    tensors, documents = _tensors(shape, dtype)
    operation = partial(cpu_attention, window=30, documents=documents)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, _by(compiled, tensors), _by(operation, tensors)))


@pytest.mark.parametrize(("selective", "calls"), [(True, 1), (False, 2)])
def test_recomputation_keeps_the_result_if_it_is_told_to(selective: bool, calls: int, dtype: torch.dtype) -> None:
    def policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE

    tensors, _ = _tensors(Shape(1, 2, 2, 70, 32), dtype)
    more = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if selective else {}

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cpu_attention(q.sin(), k, v).cos()

    seen: list[bool] = []
    with Watch(lambda function, *_: seen.append(function is OPERATIONS[0])):
        results = _by(partial(checkpoint, layer, use_reentrant=False, **more), tensors)
    assert sum(seen) == calls
    assert all(map(torch.equal, results, _by(layer, tensors)))


def test_a_dry_run_counts_the_flops_of_attention() -> None:
    """No kernel is needed: the tensors have no numbers."""
    found = []
    mode = MetaTensorMode()
    mode.look = lambda *seen: found.append(flops_of(*seen))
    with mode:
        q, k, v = (torch.empty(2, h, 100, 32, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
        out = cpu_attention(q, k, v, window=10, documents=torch.zeros(2, 100, dtype=torch.int64))
        out.sum().backward()
    assert [tensor.shape for tensor in (out, q.grad, k.grad)] == [q.shape, q.shape, k.shape]
    one = attention_flops(q.shape, k.shape, v.shape, (1, 0))
    assert [flops for flops in found if flops[0]] == [(2 * one, 0), (5 * one, one)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(1, 3, 8, 32).bfloat16()}, r"q \[1, 3, 8, 32\], k \[1, 2, 8, 32\]"),
        ({"v": torch.zeros(1, 2, 9, 32).bfloat16()}, r"v \[1, 2, 9, 32\]: not"),
        ({"k": torch.zeros(1, 2, 8, 32)}, "torch.bfloat16, torch.float32, torch.bfloat16 .*: not all bfloat16"),
        (dict.fromkeys("qkv", torch.zeros(1, 2, 8, 32).double()), "not all bfloat16 or all float32"),
        (dict.fromkeys("qkv", torch.zeros(1, 2, 8, 24).bfloat16()), "24 features per head"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"window": -1}, "window -1"),
        ({"documents": torch.zeros(1, 7, dtype=torch.int64)}, r"documents \[1, 7\]"),
        ({"documents": torch.zeros(1, 8)}, "documents .* of torch.float32"),
    ],
)
def test_what_it_cannot_compute_is_refused(change: dict, said: str) -> None:
    given = {**dict.fromkeys("qkv", torch.zeros(1, 2, 8, 32).bfloat16()), **change}
    with pytest.raises(ValueError, match=said):
        cpu_attention(**given)
