"""Muon: orthogonal updates of matrices; AdamW for tables, the head and vectors (kellerjordan.github.io/posts/muon).

    b = momentum b + (1 - momentum) g;   u = (1 - momentum) g + momentum b   (nesterov; else u = b)
    w = w - lr * (scale * U V^T + weight_decay * w),   u = U S V^T

U V^T is approximated by `ns_steps` Newton-Schulz iterations x = a x + (b x x^T + c (x x^T)^2) x of u / |u|. `scale` is
0.2 sqrt(max(rows, columns)) by default: updates then have the root mean square of AdamW's, so that its rate and decay
carry over (Moonlight, arXiv 2502.16982). "original" is sqrt(max(1, rows / columns)), whose rate is about 0.02. A stack
of experts [E, rows, columns] is E matrices. AdamW's part is PyTorch's fused kernel.

No rank computes what another has computed. Ranks that shard, slice or replicate matrices deal them out by FLOPs: the
shards of a matrix travel to its rank, by one all-to-all per mesh dimension for many matrices, and slices of the update
travel back; replicas gather what each has computed. A stack that is sharded by its elements stays where it is.

Cost, for P parameters in matrices over n ranks: 4 bytes of float32 momentum per parameter of a matrix and 8 of others,
sharded as these are. 2 ns_steps (2 m^2 n + m^3) FLOPs for each m x n matrix, m <= n, on one of the ranks: beside
6 m n FLOPs per token of the step they are ns_steps (2 m + m^2 / n) / 3 tokens' worth. Bytes sent: 2 P / n per rank and
direction in bfloat16, per mesh dimension; and as much again per replica. Matrices of about `TOGETHER` numbers per rank
travel at once, which is what exists besides during the update.

Limits: the host waits for the device once per step, to know whether the update is skipped. Fewer matrices than ranks
leave ranks idle. A matrix that is no DTensor is computed by each rank that holds it. A step without a gradient of a
matrix counts as one with a gradient of zeros, as ranks must agree on what travels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register, shard_of
from titan.contracts.base.cost import CollectiveCost, MatrixWork, PersistentState, UpdateScratch
from titan.contracts.optimizers import AdamW, joined

from .dealing import TOGETHER, batches


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "muon"`."""

    lr: float = option(1e-3, "peak learning rate of matrices", above=0)
    momentum: float = option(
        0.95, "share of a matrix's running mean of gradients that a step keeps", at_least=0, below=1
    )
    nesterov: bool = option(True, "look ahead: mix the gradient into the running mean once more")
    ns_steps: int = option(5, "Newton-Schulz iterations", at_least=1, at_most=100)
    coefficients: tuple[float, float, float] = option(
        (3.4445, -4.7750, 2.0315), "a, b and c of the Newton-Schulz iteration"
    )
    eps: float = option(1e-7, "least norm that a matrix is divided by", above=0)
    weight_decay: float = option(0.1, "weight decay coefficient, times the learning rate", at_least=0)
    adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw", "scale of an update: 0.2 sqrt(max(rows, columns)), or sqrt(max(1, rows / columns))"
    )
    dtype: Literal["bfloat16", "float32"] | None = option(
        None, "of the iterations and of what travels; unset: float32 on CPUs, bfloat16 elsewhere"
    )
    adamw_lr: float | None = option(
        None, "peak learning rate of tables, head and vectors; unset: lr", above=0, over="lr"
    )
    adamw_betas: tuple[float, float] = option((0.9, 0.95), "betas of AdamW", at_least=0, below=1)
    adamw_eps: float = option(1e-8, "eps of AdamW", above=0)
    adamw_weight_decay: float | None = option(
        None,
        "weight decay coefficient of what AdamW updates and usual practice decays; unset: weight_decay",
        at_least=0,
        over="weight_decay",
    )


@register
class Muon(Optimizer):
    """Orthogonal updates of matrices, dealt out over ranks; AdamW for tables, head and vectors."""

    name = "muon"
    Config = Config
    config: Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """Muon over what is a matrix, or a stack of them, and AdamW over the rest."""
        matrices = [named for named in parameters if _is_matrix(named)]
        found: list[torch.optim.Optimizer] = [_Matrices(matrices, self.config)] if matrices else []
        if groups := self._adamw_groups([named for named in parameters if not _is_matrix(named)]):
            options = self.config
            rate = options.lr if options.adamw_lr is None else options.adamw_lr
            settings: dict[str, Any] = {"lr": rate, "betas": options.adamw_betas, "eps": options.adamw_eps}
            found.append(AdamW(groups, fused=True, **settings))
        return joined(found, "Muon")

    def _adamw_groups(self, parameters: Sequence[NamedParameter]) -> list[dict[str, Any]]:
        """What is decayed, and what is not."""
        options, found = self.config, dict[bool, list[torch.nn.Parameter]]()
        decay = options.weight_decay if options.adamw_weight_decay is None else options.adamw_weight_decay
        for named in parameters:
            found.setdefault(named.decays, []).append(named.parameter)
        return [{"params": group, "weight_decay": decay * decays} for decays, group in found.items()]

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Momentum of matrices, AdamW's means of the rest; iterations on one rank a matrix; shards there and back."""
        shards, axes = costs.updated_over, [axis for axis in job.layout.axes if not axis.folds]
        slices = tuple(axis.name for axis in axes if axis.weights == "slices")
        copies = tuple(axis.name for axis in axes if axis.weights == "copies" and axis.name not in shards)
        size, width = costs.store_itemsize, 4 if self.config.dtype == "float32" else 2
        momentum = PersistentState(component="optimizer", bytes_per_param=size, axes=shards, kinds=("matrix", "stack"))
        means = PersistentState(
            component="optimizer", bytes_per_param=2 * size, axes=shards, kinds=("table", "head", "vector")
        )
        work = MatrixWork(
            square=4 * self.config.ns_steps, cube=2 * self.config.ns_steps, over=(*shards, *copies, *slices)
        )
        # What is made orthogonal, and what comes out.
        at_once = UpdateScratch(
            bytes_per_param=2 * width, all_at_once=True, at_most=TOGETHER, kinds=("matrix", "stack")
        )
        moves: dict[str, Any] = {
            "where": "step",
            "when": "update",
            "numel": 1,
            "itemsize": width,
            "per_parameter": True,
            "kinds": ("matrix",),
        }
        there_and_back = [
            CollectiveCost(axes=among, collective="all_to_all", count=2, sharded_over=(*shards, *copies), **moves)
            for among in (shards, *((axis,) for axis in slices))
            if among
        ]
        copied = [
            CollectiveCost(axes=(axis,), collective="all_gather", sharded_over=shards, **moves) for axis in copies
        ]
        return replace(
            costs,
            state=(*costs.state, momentum, means),
            update_bytes=costs.update_bytes + 7 * size,
            matrix_work=work,
            update_scratch=at_once,
            collectives=(*costs.collectives, *there_and_back, *copied),
        )

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """For example `muon: 4.2 M parameters in 28 matrices by orthogonal updates; 0.5 M in 10 tensors by AdamW`."""
        matrices = [named.parameter.numel() for named in parameters if _is_matrix(named)]
        rest = [named.parameter.numel() for named in parameters if not _is_matrix(named)]
        line = f"{self.name}: {sum(matrices) / 1e6:.3g} M parameters in {len(matrices)} matrices by orthogonal updates"
        return f"{line}; {sum(rest) / 1e6:.3g} M in {len(rest)} tensors by AdamW" if rest else line


def _is_matrix(named: NamedParameter) -> bool:
    return named.kind == "matrix" and named.parameter.ndim in (2, 3)


class _Matrices(torch.optim.Optimizer):
    """Muon over matrices and stacks of them."""

    def __init__(self, parameters: Sequence[NamedParameter], options: Config) -> None:
        decayed = [named.parameter for named in parameters if named.decays]
        rest = [named.parameter for named in parameters if not named.decays]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        super().__init__([group for group in groups if group["params"]], {"lr": options.lr})
        self._options = options
        self._batches = batches(named.parameter for named in parameters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """All ranks that share matrices together, batch after batch."""
        rates = {p: (group["lr"], group["weight_decay"]) for group in self.param_groups for p in group["params"]}
        for batch in self._batches:
            directions = [self._direction(parameter) for parameter in batch.parameters]
            mine = batch.gather(directions)
            del directions
            done = {number: self._orthogonal(whole) for number, whole in mine.items()}
            for parameter, update in zip(batch.parameters, batch.scatter(done), strict=True):
                rate, decay = rates[parameter]
                weight = shard_of(parameter.data)
                weight.mul_(1 - rate * decay).add_(update, alpha=-rate * self._scale(parameter))

    def _direction(self, parameter: Tensor) -> Tensor:
        """This rank's shard of what is made orthogonal, in the dtype that travels; moves the running mean."""
        state, momentum = self.state[parameter], self._options.momentum
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        mean = shard_of(state["momentum"])
        gradient = torch.zeros_like(mean) if parameter.grad is None else shard_of(parameter.grad)
        mean.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self._options.nesterov else mean
        name = self._options.dtype or ("float32" if mean.is_cpu else "bfloat16")
        return direction.to(torch.bfloat16 if name == "bfloat16" else torch.float32)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """U V^T of a matrix, or of each of a stack [E, rows, columns]."""
        a, b, c = self._options.coefficients
        upright = matrix.shape[-2] > matrix.shape[-1]
        x = (matrix.mT if upright else matrix).reshape(-1, *sorted(matrix.shape[-2:]))
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=self._options.eps)
        for _ in range(self._options.ns_steps):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        return (x.mT if upright else x).reshape(matrix.shape)

    def _scale(self, parameter: Tensor) -> float:
        rows, columns = parameter.shape[-2:]
        if self._options.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
