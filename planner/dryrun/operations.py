"""Operations to which PyTorch gives no public name, found by calling the public function that runs them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Operation: TypeAlias = Any
"""What a dispatch mode is called with, such as `torch.ops.aten.mm.default`; its class has no public name either."""


class _Listed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports the compiler, which takes a second

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and add it to `ran`."""
        self.ran.append(function)
        return function(*args, **(kwargs or {}))


def _run_by(call: Callable[[], object]) -> list[Operation]:
    listed = _Listed()
    with listed:
        call()
    return listed.ran


_ONE = torch.zeros(1, device="cpu")
_ROW = torch.zeros(1, 1, 1, 8, device="cpu", requires_grad=True)


def _attend() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(_ROW, _ROW, _ROW)
    # The node itself, as autograd's engine starts threads, which a process that forks later must not have.
    node: Any = out.grad_fn
    node(out)


(ITEM,) = _run_by(_ONE.item)
"""A value read by the host."""

(CAST,) = _run_by(_ONE.double)
"""A copy of another dtype."""

ATTENTION, *_, ATTENTION_BACKWARD = _run_by(_attend)
"""Attention in one kernel on a CPU, and its gradients."""
