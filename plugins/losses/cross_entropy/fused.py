"""Projection and cross-entropy together, some tokens at a time: there are never more logits than of these tokens.

Gradients are made in the forward, right after the logits of the same tokens: the objective is a sum, so all that its
backward adds is a factor. They are made with the factor that is expected, and the backward multiplies by what it was
given over what was expected: by 1, so that numbers of a low precision are rounded as they would have been there.
Kept until then are the gradient of the hidden states and those of the projection's parameters.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan.contracts import Projection, shard_of
from titan.layers.products import in_float32, product

from .rows import Slice, local_of, loss_and_gradient


def fused(
    hidden: Tensor, labels: Tensor, project: Projection, size: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(objective, reported, what z-loss adds) of hidden states [B, S, D] and labels [B, S], `size` tokens at a time.

    The objective has a graph: to the hidden states and to the parameters of the projection.
    """
    parameters = [p for p in project.parameters() if p.requires_grad]
    factor = torch.ones((), device=hidden.device) if project.factor is None else project.factor.float()
    with torch.no_grad():
        states, flat = hidden.flatten(0, -2), labels.flatten()
        weight = project.weight
        with_gradients: _Gradients = (
            _OfParameters(project, states, parameters)
            if weight is None or not weight.requires_grad
            else _OfMatrix(weight, states, size)
        )
        sums = [
            torch.stack(with_gradients.take(slice(at, at + size), flat[at : at + size], z_loss, factor))
            for at in range(0, len(flat), size)
        ]
        reported, added = torch.stack(sums).sum(0)
    objective = reported + added
    # A node for each: a schedule that splits the backward runs that of the hidden states long before the others.
    of_states, of_parameters = with_gradients.found()
    for tensor, gradient in zip((hidden, *parameters), (of_states.view_as(hidden), *of_parameters), strict=True):
        if tensor.requires_grad and gradient is not None:
            objective = objective + _Known.apply(tensor, [gradient], factor)
    return objective, reported, added


def tokens_at_once(tokens: int, size: int) -> int:
    """Tokens per chunk, at most `size`, so that all chunks have as many but for the last."""
    return -(-tokens // -(-tokens // size))


class _Gradients(Protocol):
    """The gradients of hidden states and parameters, to which chunks of tokens are added."""

    def take(self, at: slice, labels: Tensor, z_loss: float, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(reported, what z-loss adds) of the tokens `at`."""

    def found(self) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The gradients of the hidden states [N, D], and of each parameter; None: the projection does not use it."""


class _OfMatrix:
    """Of logits h W^T and nothing else: products are written where they belong, and logits become gradients."""

    def __init__(self, weight: Tensor, states: Tensor, size: int) -> None:
        self.weight, self.states = weight.detach(), states
        self._logits = states.new_empty(min(size, len(states)), len(weight))
        self._of_states = torch.empty_like(states)
        # A sum over tokens is beyond float16 sooner than its product with the loss scale is.
        wide = torch.float32 if weight.dtype == torch.float16 or in_float32(weight) else weight.dtype
        self._of_weight = torch.empty_like(self.weight, dtype=wide, memory_format=torch.contiguous_format)

    def take(self, at: slice, labels: Tensor, z_loss: float, factor: Tensor) -> tuple[Tensor, Tensor]:
        states = self.states[at]
        logits = product(states, self.weight.t(), out=self._logits[: len(states)])
        sums = loss_and_gradient(logits, logits, labels, Slice(0, len(self.weight)), z_loss, factor)
        product(logits, self.weight, out=self._of_states[at])
        total, first = self._of_weight, at.start == 0  # of which nothing may be read before the first chunk
        if in_float32(states):
            logits, states = logits.float(), states.float()
        if total.dtype == states.dtype:
            torch.addmm(total, logits.t(), states, beta=int(not first), out=total)
        elif first:
            total.copy_(torch.mm(logits.t(), states))
        else:
            total.add_(torch.mm(logits.t(), states))
        return sums

    def found(self) -> tuple[Tensor, Sequence[Tensor]]:
        return self._of_states, [self._of_weight]


class _OfParameters:
    """Of any projection, by autograd, on copies of its parameters that share their memory.

    So no hook of a parameter sees a part of its gradient.
    """

    def __init__(self, project: Projection, states: Tensor, parameters: Sequence[Tensor]) -> None:
        self.project, self.states = project, states
        self._parameters = {p: p.detach().requires_grad_() for p in parameters}
        self._of_states = torch.empty_like(states)
        self._of_parameters: list[Tensor | None] = []

    def take(self, at: slice, labels: Tensor, z_loss: float, factor: Tensor) -> tuple[Tensor, Tensor]:
        states = self.states[at].detach().requires_grad_()
        with torch.enable_grad(), self.project.computing_with(self._parameters):
            logits, vocabulary = local_of(self.project(states[None]))
            logits = logits.squeeze(0)
        gradient = torch.empty_like(logits, requires_grad=False)
        sums = loss_and_gradient(gradient, logits.detach(), labels, vocabulary, z_loss, factor)
        inputs = (states, *self._parameters.values())
        of_states, *of_parameters = torch.autograd.grad(logits, inputs, gradient, allow_unused=True)
        self._of_states[at] = of_states
        if self._of_parameters:
            pairs = zip(self._of_parameters, of_parameters, strict=True)
            both = [(shard_of(p), shard_of(more)) for p, more in pairs if p is not None and more is not None]
            torch._foreach_add_([p for p, _ in both], [more for _, more in both])
        else:
            self._of_parameters = _apart(of_parameters)
        return sums

    def found(self) -> tuple[Tensor, Sequence[Tensor | None]]:
        return self._of_states, self._of_parameters


def _apart(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same in memory of their own: autograd gives one tensor for several parameters, such as of a sum."""
    taken, found = set[torch.UntypedStorage](), list[Tensor | None]()
    for gradient in gradients:
        if gradient is not None:
            storage = shard_of(gradient).untyped_storage()  # the same object for all tensors in it
            gradient = gradient.clone() if storage in taken else gradient
            taken.add(storage)
        found.append(gradient)
    return found


class _Known(torch.autograd.Function):
    """tensor -> 0, a summand of the objective, whose gradient with respect to the tensor is known already.

    It is given in a list, so that nothing else holds it: it is scaled in place, and becomes the parameter's own.
    expected: the factor that it has already.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: list[Tensor], expected: Tensor) -> Tensor:
        ctx.gradient, ctx.expected, ctx.dtype = gradient, expected, tensor.dtype
        return torch.zeros_like(expected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.gradient:
            raise RuntimeError("cross_entropy's backward ran a second time, after its gradients had been given away")
        gradient = ctx.gradient.pop()
        shard_of(gradient).mul_(factor / ctx.expected)
        return gradient.to(ctx.dtype), None, None
