"""Experts: feed-forwards of which a router chooses a few for each token, and losses beside the objective.

The weights of all experts of a layer are stacks [E, out, in]. Tokens are sorted by expert, so that each expert has its
rows in one piece, and no token is dropped (arXiv 2211.15841). A technique may give `Experts` another operation, which
sends the rows to the ranks that hold their experts.
"""

# T tokens, k experts per token, E experts, R = T k rows sorted by expert, D dim, F hidden units of an expert.

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from titan.errors import PluginError
from titan.layers.products import is_wanted, product

ExpertOperation = Callable[[Tensor, Tensor], Tensor]
"""(rows [R, D], counts [E]) -> results [R, D]: rows are sorted by expert, counts[e] rows are expert e's."""


@library.custom_op("titan::stacked_product", mutates_args=())
def stacked_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each row times the matrix of its expert: rows [R, in], weight [E, in, out], counts [E] int64 -> [R, out].

    One operation whatever the counts are, so it compiles. On the meta device one matrix stands for all.
    """
    if rows.is_meta:
        return rows.mm(weight[0])
    if has_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=counts.cumsum(0, dtype=torch.int32))
    pieces = zip(torch.split(rows, counts.tolist()), weight, strict=True)
    return torch.cat([product(piece, matrix) for piece, matrix in pieces])


@library.custom_op("titan::stacked_outer", mutates_args=())
def _stacked_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Of each expert, the sum over its rows of their outer products: [R, a], [R, b], [E] -> [E, a, b]."""
    if left.is_meta:
        one = left.t().mm(right)
        return one.new_empty(counts.shape[0], *one.shape)
    if has_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=counts.cumsum(0, dtype=torch.int32))
    pieces = zip(*(torch.split(rows, counts.tolist()) for rows in (left, right)), strict=True)
    return torch.stack([product(a.t(), b) for a, b in pieces])


@stacked_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_stacked_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, counts = ctx.saved_tensors
    of_rows, of_weight = (is_wanted(ctx, place) for place in (0, 1))
    gradient = gradient.contiguous()
    return (
        stacked_product(gradient, weight.transpose(1, 2), counts) if of_rows else None,
        # Laid out as the parameter [E, out, in] is, of which `weight` is a view.
        _stacked_outer(gradient, rows.contiguous(), counts).transpose(1, 2) if of_weight else None,
        None,
    )


stacked_product.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

STACKED_PRODUCT = torch.ops.titan.stacked_product.default
"""`stacked_product` as dispatch modes and recomputation see it."""


def has_kernel(*tensors: Tensor) -> bool:
    """Whether PyTorch has one kernel for all matrices of a stack: CUDA's, in bfloat16, of rows aligned to 16 bytes."""
    aligned = all(size % 8 == 0 for tensor in tensors for size in tensor.shape[1:])
    return aligned and all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[0] > 0 for t in tensors)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`, int64 [R]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _GatherRows(torch.autograd.Function):
    """Rows in another order, whose gradient is gathered too: indexing's own sorts the rows again to add them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(back)
        return x[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        found = gradient[back]
        if ctx.copies > 1:
            found = found.view(-1, ctx.copies, found.shape[-1]).sum(1)
        return found, None, None, None


def gather_rows(x: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Each row of x [T, D] as often as `copies` says, by a permutation of the T copies rows: -> [T copies, D].

    order, back: int64 [T copies], a permutation and its inverse. Copies of a row are neighbours before it.
    The gradients of a row's copies are added in that order, whatever the permutation is, and rounded once.
    """
    return _GatherRows.apply(x, order, back, copies)  # type: ignore[no-any-return,no-untyped-call]


class StackedLinear(nn.Module):
    """E linears without biases, of which each is applied to its own rows.

    weight: [E, out, in]. Under expert or tensor parallelism a rank's own share: no forward reads sizes from a config.
    """

    def __init__(self, stack: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(stack, outputs, inputs))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [R, in], the first counts[0] of them the first linear's, and so on; counts [E] int64. -> [R, out]."""
        return stacked_product(rows, self.weight.transpose(1, 2), counts)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """E gated feed-forwards w2(silu(w1 x) * w3 x), of which each token passes k (arXiv 2101.03961, 2211.15841).

    computed: rows that this rank's experts have computed in training since somebody set it to 0.
    """

    computed: Tensor

    def __init__(self, stack: int, dim: int, width: int) -> None:
        super().__init__()
        self.stack = stack
        self.w1 = StackedLinear(stack, dim, width)
        self.w2 = StackedLinear(stack, width, dim)
        self.w3 = StackedLinear(stack, dim, width)
        self.register_buffer("computed", torch.zeros((), dtype=torch.float64), persistent=False)
        self.operation: ExpertOperation | None = None
        self._used_by = ""

    def use(self, operation: ExpertOperation, by: str) -> None:
        """Compute the results by another operation, which calls `compute`; for techniques, before phase "recompute".

        PluginError: another technique has done so.
        """
        if self._used_by:
            both = f"techniques {self._used_by} and {by}"
            raise PluginError(f"{both} both replace what experts compute; disable one of them")
        self.operation, self._used_by = operation, by

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs for each token, [T, D] in the dtype of x.

        x: [T, D].  chosen: [T, k] int64, numbers of experts, different for a token.  weights: [T, k].
        The sum over k is taken in the order of `chosen`, however rows are sorted and wherever they are computed.
        """
        order = chosen.flatten().argsort(stable=True)
        back = inverse(order)
        rows = gather_rows(x, order, back, chosen.shape[1])
        operation = self.compute if self.operation is None else self.operation
        results = gather_rows(operation(rows, rows_per_expert(chosen, self.stack)), back, order)
        return torch.bmm(weights[:, None].to(x.dtype), results.view(*chosen.shape, -1)).squeeze(1)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results [R, D] of rows [R, D] sorted by expert; counts [E] of the experts whose weights this rank holds."""
        if self.training and not is_recomputed():
            self.computed.add_(rows.shape[0])
        return self.w2(F.silu(self.w1(rows, counts)) * self.w3(rows, counts), counts)  # type: ignore[no-any-return]


def is_recomputed() -> bool:
    """Whether the forward under way runs again, for a backward: what it counts has been counted. Compiled: never."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def rows_per_expert(chosen: Tensor, stack: int, real: Tensor | None = None) -> Tensor:
    """How many tokens have chosen each expert: [T, k] int64 -> [E] int64.

    real: [T] bool, false at tokens that are not counted, such as padding; None: all are.
    """
    flat = chosen.flatten()
    ones = torch.ones_like(flat) if real is None else real[:, None].expand(chosen.shape).flatten().to(flat.dtype)
    return torch.zeros(stack, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, ones)


class _WithLoss(torch.autograd.Function):
    """Hidden states, and a summand of the objective, whose gradient is 1 however the hidden states are used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summand: Tensor) -> Tensor:
        ctx.dtype = summand.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.dtype, device=gradient.device)


class SideLoss(nn.Module):
    """Adds a loss of a module's own to the objective, in whichever pipeline stage the module is.

    share: what the sum over a rank's sequences is multiplied by. The host sets it to one over the sequences of a step.
        A technique whose ranks all compute the loss alike, and add up gradients, divides it by their number.
    scaled: the objective times the scales of techniques (`Technique.loss_scale`). The host sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0
        self.scaled: Callable[[Tensor], Tensor] = _unscaled

    def forward(self, x: Tensor, loss: Tensor) -> Tensor:
        """x, any tensor that the objective depends on; loss, a scalar, the sum over the sequences of this forward."""
        return _WithLoss.apply(x, self.scaled(loss * self.share))  # type: ignore[no-any-return,no-untyped-call]


def _unscaled(objective: Tensor) -> Tensor:
    return objective
