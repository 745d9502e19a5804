"""Replaces operations that save other activations on a GPU than on a CPU, so that a dry run saves as a GPU does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.machine import standing_in_for


class _RMSNorm(torch.autograd.Function):
    """Saves its input, its weight and one float32 per row, as the CUDA kernel does; computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        scale = torch.empty(x.shape[:rows], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


_rms_norm: Callable[[Tensor, Tensor | None, int], Tensor] = _RMSNorm.apply


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run RMSNorm as one kernel, as a GPU does, and use a GPU's chunk sizes, while the context is open.

    PyTorch's CPU runs RMSNorm as seven operations and saves their results. A mode of `torch.overrides` cannot replace
    norms: it is off while a backward recomputes.
    """
    original = F.rms_norm
    F.rms_norm = _norm  # type: ignore[assignment]
    try:
        with standing_in_for("cuda"):
            yield
    finally:
        F.rms_norm = original


def _norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _rms_norm(x, weight, x.ndim - len(normalized_shape))
