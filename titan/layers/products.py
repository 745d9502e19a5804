"""Products of bf16 matrices on CPUs that have no instructions for them: in float32, rounded once.

A product in bf16 is summed in float32 and rounded at its end, wherever it is computed. So operands that are widened
first, which loses nothing, give the same numbers but for the order of a sum. PyTorch multiplies bf16 matrices number by
number where oneDNN does not, on CPUs without AVX-512, so that a product in float32 takes a fraction of the time, with
all casts (`python -m bench.overhead`). The backward of attention consists of such products too.

Cost: for a moment, 4 bytes for each number of operands and results. Selective recomputation keeps products before they
are rounded. Plans and dry runs count neither: those of such a CPU in bf16 are too low.

Limits: validation's logits, heads that are split, capped or not in chunks, and attention that writes its scores are
still multiplied in bf16.
"""

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_BF16 = (("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"), ("avx_vnni", "avx_ne_convert", "avx_vnni_int8"))
"""Sets of instructions of x86 with each of which oneDNN multiplies bf16 matrices."""


def _lacks_bf16() -> bool:
    has = torch.cpu.get_capabilities()
    enough = any(all(has.get(name) for name in names) for names in _BF16)
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return platform.machine() in ("x86_64", "AMD64") and not (there and enough)


LACKS_BF16 = _lacks_bf16()
"""Whether oneDNN multiplies no bf16 matrices on this machine's CPU; a lower `ONEDNN_MAX_CPU_ISA` is not known here."""


def in_float32(tensor: Tensor) -> bool:
    """Whether products of tensors like this one are to be computed in float32; on the meta device none is."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and LACKS_BF16


def is_wanted(ctx: Any, place: int) -> bool:
    """Whether the backward under way uses the gradient of an input: a pipeline may ask for rows now, weights later."""
    if torch.compiler.is_compiling() or not ctx.needs_input_grad[place]:
        return bool(ctx.needs_input_grad[place])
    node = ctx.next_functions[place][0]  # of a leaf the engine does not tell
    return node.name().endswith("AccumulateGrad") or torch._C._will_engine_execute_node(node)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b in their dtype, written to `out` [R, C] if that is given; a [R, K], b [K, C]. Without a graph."""
    if not in_float32(a):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    wide = a.float() @ b.float()
    return wide.to(a.dtype) if out is None else out.copy_(wide)


class _Linear(torch.autograd.Function):
    """As `F.linear`; saves what that saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = (is_wanted(ctx, place) for place in range(3))
        wide = grad.reshape(-1, grad.shape[-1]).float()
        return (
            (wide @ weight.float()).view_as(x).to(x.dtype) if of_x else None,
            (wide.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if of_weight else None,
            wide.sum(0).to(grad.dtype) if of_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in float32 where `in_float32` says so; x [..., D], W [F, D], b [F]."""
    if in_float32(x) and in_float32(weight):
        # A view: of a leaf, autograd does not tell whether its gradient is wanted.
        return _Linear.apply(x, weight.view_as(weight), bias)  # type: ignore[no-any-return,no-untyped-call]
    return F.linear(x, weight, bias)


class _Listed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports the compiler, which takes a second

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(function)
        return function(*args, **(kwargs or {}))


def operations_of(call: Callable[[], object]) -> list[Any]:
    """The operations that a call runs, in order: how to come by those to which PyTorch gives no public name."""
    with _Listed() as listed:
        call()
    return listed.ran  # type: ignore[no-any-return]


def _attend_once() -> None:
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        row = torch.zeros(1, 1, 1, 8, device="cpu", requires_grad=True)
        out = F.scaled_dot_product_attention(row, row, row)
    # The node itself, as autograd's engine starts threads, which a process that forks later must not have.
    node: Any = out.grad_fn
    node(out)


_ran = [operation for operation in operations_of(_attend_once) if "flash" in str(operation)]
FLASH, FLASH_BACKWARD = _ran
"""PyTorch's flash kernel for CPUs, with the log of the softmax's sums, and its backward, which no public call gives."""


class _Attention(torch.autograd.Function):
    """PyTorch's flash kernel for CPUs, whose backward is computed in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        out, lse = FLASH(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.scale = scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        return *attention_backward((grad, q, k, v, out), lse, mask is None, mask, ctx.scale), None, None


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` is for these: training in bf16 on such a CPU, and what the kernel reads."""
    if not (in_float32(q) and q.requires_grad and q.ndim == 4):
        return False
    dense = all(t.stride(-1) == 1 and t.shape[-1] == q.shape[-1] for t in (q, k, v))
    return dense and (mask is None or (mask.dtype == q.dtype and mask.stride(-1) == 1 and not mask.requires_grad))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """As `attend`, where `takes` says so: q [B, H, S, N]; k, v [B, K, S, N]; mask [B or 1, H or 1, S, S] or None."""
    return _Attention.apply(q, k, v, mask, scale)  # type: ignore[no-any-return,no-untyped-call]


def attention_backward(
    given: Sequence[Tensor], lse: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by PyTorch's flash kernel for CPUs, in float32 where `in_float32` says so.

    given: gradient, q, k, v and output, [B, H, S, N].  lse: log of the softmax's sums, [B, H, S].  mask: not `causal`.
    """
    dtype = given[1].dtype
    if in_float32(given[1]):
        given, mask = [t.float() for t in given], None if mask is None else mask.float()
    of_q, of_k, of_v = FLASH_BACKWARD(*given, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return of_q.to(dtype), of_k.to(dtype), of_v.to(dtype)
