"""An optimizer from outside: Muon (kellerjordan.github.io/posts/muon) for matrices, AdamW for all other parameters.

    b = momentum b + g;   w = w - lr * 0.2 sqrt(max(rows, columns)) * U V^T,    b = U S V^T

U V^T is approximated by five Newton-Schulz iterations. The factor gives updates the root mean square of AdamW's
(arXiv 2502.16982). Each rank gathers every matrix for it, and keeps its shard of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import NamedParameter, Optimizer, option, register
from titan.contracts.base.sharding import slice_of


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""

    lr: float = option(3e-3, "peak learning rate", above=0)
    momentum: float = option(0.95, "share of a matrix's former gradients kept", at_least=0, below=1)


class _Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            update = self._matrix if group["kind"] == "matrix" else self._adam
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(update(p, self.state[p], group), alpha=-group["lr"])

    def _matrix(self, p, state, group):
        sums = state.setdefault("momentum", torch.zeros_like(p))
        sums.mul_(group["momentum"]).add_(p.grad)
        if not isinstance(sums, DTensor):
            return _orthogonal(sums)
        mine = slice_of(_orthogonal(sums.full_tensor()), sums)
        return DTensor.from_local(mine, sums.device_mesh, sums.placements, shape=sums.shape, stride=sums.stride())

    def _adam(self, p, state, group):
        if not state:
            state |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p), "step": torch.zeros(())}
        state["step"] += 1
        state["mean"].lerp_(p.grad, 0.1)
        state["square"].lerp_(p.grad.square(), 0.05)
        mean, square = state["mean"] / (1 - 0.9 ** state["step"]), state["square"] / (1 - 0.95 ** state["step"])
        return mean / (square.sqrt() + 1e-8)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Of a matrix, or of each of a stack [E, rows, columns]."""
    rows, columns = matrix.shape[-2:]
    x = matrix.mT if rows > columns else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.mT if rows > columns else x
    return 0.2 * max(rows, columns) ** 0.5 * x


@register
class Muon(Optimizer):
    """Orthogonal updates of matrices; AdamW for embeddings, head, norms and biases."""

    name = "whole_muon"
    Config = Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        matrices = [p.parameter for p in parameters if p.kind == "matrix"]
        others = [p.parameter for p in parameters if p.kind != "matrix"]
        groups = [{"params": matrices, "kind": "matrix"}, {"params": others, "kind": "other"}]
        return _Muon(groups, {"lr": self.config.lr, "momentum": self.config.momentum})
