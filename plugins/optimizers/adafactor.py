"""Adafactor (Shazeer and Stern, arXiv 1804.04235): AdamW without a mean, whose mean square is kept per row and column.

For a matrix with gradient g at update t, b = 1 - t^-decay:

    R = b R + (1 - b) mean of (g^2 + 1e-30) over columns;   C likewise over rows;   V = R C / mean of R
    u = g / sqrt(V);   u = u / max(1, rms(u) / clip);   w = w - lr * (max(0.001, rms(w)) * u + weight_decay * w)

V of a vector is the mean square itself. A stack [E, rows, columns] is E matrices; rms is that of the whole tensor.
`scale_parameter = false` leaves out the factor of rms(w), so that lr is that of AdamW. Weight decay leaves out norms,
biases and embeddings. The schedule of the run sets the rate, in place of the paper's 1 / sqrt(t).

Every rank keeps R and C whole, as plain tensors: they are small, and a checkpoint loads at any layout. Ranks that shard
a matrix add up their sums of squares before each update, and those of u once more: two all-reduces per mesh dimension.
R, C, V of vectors and all sums are float32, also where weights are bf16; so a run may change the dtype of its weights
on resume.

Cost: 4 (rows + columns) bytes per matrix on each rank that holds some of it, and 4 bytes per parameter of vectors on
the rank that holds it; about 44 bytes read and written per parameter. Sent: 8 (rows + columns) bytes per sharded
matrix, which the planner leaves out, as it does R and C.
Limits: not for a few parameters at a time, as ranks add up all. The host waits for the device once per step, to know
whether the update is to be skipped. A step without a gradient counts as one with a gradient of zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register, shard_of
from titan.contracts.base.cost import PersistentState, UpdateScratch
from titan.contracts.base.sharding import slice_of

_LEAST_SQUARE, _LEAST_RMS = 1e-30, 1e-3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "adafactor"`."""

    lr: float = option(1e-2, "peak learning rate; with scale_parameter relative to the size of the weights", above=0)
    decay: float = option(0.8, "the mean square keeps 1 - t^-decay at update t", above=0, at_most=1)
    clip: float = option(1.0, "largest root mean square of an update before the learning rate", above=0)
    scale_parameter: bool = option(True, "multiply the rate by the root mean square of each parameter")
    weight_decay: float = option(0.0, "weight decay coefficient, times the learning rate", at_least=0)


@register
class Adafactor(Optimizer):
    """Adam's second moment per row and column, without the first: state far below the size of the weights."""

    name = "adafactor"
    Config = Config
    config: Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        decayed = [named.parameter for named in parameters if named.decays]
        rest = [named.parameter for named in parameters if not named.decays]
        groups = [{"params": decayed, "weight_decay": self.config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return _Adafactor([group for group in groups if group["params"]], self.config)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The mean square of vectors; weight and gradient are read three times, the weight is written."""
        state = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over, kinds=("vector",))
        at_once = UpdateScratch(bytes_per_param=8 + 4 * (costs.store_itemsize < 4))  # float32: the update and a factor
        return replace(
            costs,
            state=(*costs.state, state),
            update_bytes=costs.update_bytes + 11 * costs.store_itemsize,
            update_scratch=at_once,
        )


class _Shard(NamedTuple):
    """This rank's part of a parameter.

    at: of each dimension, the numbers of its entries that are here, to index a whole tensor.
    groups: of the ranks that have the other parts.
    """

    at: tuple[Tensor, ...]
    groups: tuple[dist.ProcessGroup, ...]


class _Adafactor(torch.optim.Optimizer):
    """State of a matrix: rows [..., rows] and columns [..., columns], whole; of a vector: mean_square. Both: steps."""

    def __init__(self, groups: Sequence[dict[str, Any]], options: Config) -> None:
        super().__init__(groups, {"lr": options.lr})
        self._options = options
        self._shards: dict[Tensor, _Shard] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """All ranks that share parameters together."""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        self._shards.update({p: _shard(p) for p in groups if p not in self._shards})
        shards = {p: self._shards[p] for p in groups}
        gradients = {p: torch.zeros_like(shard_of(p.data)) if p.grad is None else shard_of(p.grad) for p in groups}
        sums = {p: _sums(p, shards[p], gradients[p]) for p in groups}
        _add_up(sums, shards)
        for p in groups:
            self._advance(p, gradients[p], sums[p])
        squares = {p: [self._update(p, shards[p], gradients[p]).square().sum()] for p in groups}
        _add_up(squares, shards)
        for p, group in groups.items():
            self._apply(p, group, self._update(p, shards[p], gradients[p]), squares[p][0], sums[p][0])

    def _advance(self, parameter: Tensor, gradient: Tensor, sums: Sequence[Tensor]) -> None:
        """Move the mean squares by this step's gradient."""
        state, shape = self.state[parameter], parameter.shape
        if not state:
            state["steps"] = 0
            if parameter.ndim < 2:
                state["mean_square"] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                state["rows"], state["columns"] = torch.zeros_like(sums[1]), torch.zeros_like(sums[2])
        state["steps"] += 1
        new = state["steps"] ** -self._options.decay
        if parameter.ndim < 2:
            state["mean_square"] = state["mean_square"].float()  # bf16 where a checkpoint of float32 weights was loaded
            shard_of(state["mean_square"]).lerp_(gradient.float().square() + _LEAST_SQUARE, new)
            return
        for slot, total, over in (("rows", sums[1], shape[-1]), ("columns", sums[2], shape[-2])):
            state[slot].lerp_(total / over + _LEAST_SQUARE, new)

    def _update(self, parameter: Tensor, shard: _Shard, gradient: Tensor) -> Tensor:
        """This rank's part of g / sqrt(V), float32."""
        state, gradient = self.state[parameter], gradient.float()
        if parameter.ndim < 2:
            return gradient * shard_of(state["mean_square"]).rsqrt()
        rows = (state["rows"] / state["rows"].mean(-1, keepdim=True)).rsqrt()
        columns = state["columns"].rsqrt()
        *stack, row, column = shard.at
        return gradient * rows[_grid(*stack, row)].unsqueeze(-1) * columns[_grid(*stack, column)].unsqueeze(-2)

    def _apply(self, parameter: Tensor, group: dict[str, Any], update: Tensor, squares: Tensor, weight: Tensor) -> None:
        """squares: the sum of those of the whole update.  weight: of the whole parameter."""
        options, numbers = self._options, math.prod(parameter.shape)
        factor = 1 / ((squares / numbers).sqrt() / options.clip).clamp(min=1.0)
        if options.scale_parameter:
            factor = factor * (weight / numbers).sqrt().clamp(min=_LEAST_RMS)
        values = shard_of(parameter.data)
        values.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(factor * group["lr"]))


def _shard(parameter: Tensor) -> _Shard:
    """From metadata alone; constant over a run."""
    values, shape = shard_of(parameter.data), parameter.shape
    numbers = [torch.arange(size, device=values.device) for size in shape]
    if not isinstance(parameter, DTensor):
        return _Shard(tuple(numbers), ())
    mesh, at = parameter.device_mesh, []
    for dim, entries in enumerate(numbers):
        here = slice_of(entries.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape), parameter)
        line = tuple(slice(None) if d == dim else 0 for d in range(len(shape)))
        at.append(here[line] if values.numel() else entries[: values.shape[dim]])
    dims = [d for d, placement in enumerate(parameter.placements) if not placement.is_replicate() and mesh.size(d) > 1]
    return _Shard(tuple(at), tuple(mesh.get_group(d) for d in dims))


def _grid(*at: Tensor) -> tuple[Tensor, ...]:
    """Indices of all combinations, to index as many dimensions."""
    return torch.meshgrid(*at, indexing="ij")


def _sums(parameter: Tensor, shard: _Shard, gradient: Tensor) -> list[Tensor]:
    """What ranks add up, float32: the weight's squares; of a matrix the gradient's over columns and rows, whole."""
    found = [shard_of(parameter.data).float().square().sum()]
    if parameter.ndim < 2:
        return found
    squares = gradient.float().square()
    *stack, row, column = shard.at
    for entries, dim in ((row, -1), (column, -2)):
        shape = [*parameter.shape[:-2], parameter.shape[-2 if dim == -1 else -1]]
        whole = squares.new_zeros(shape)
        if squares.numel():
            whole.index_put_(_grid(*stack, entries), squares.sum(dim))
        found.append(whole)
    return found


def _add_up(tensors: dict[Any, list[Tensor]], shards: dict[Any, _Shard]) -> None:
    """Add up tensors over the ranks that have the other parts of their parameter, many at once."""
    together: dict[tuple[dist.ProcessGroup, ...], list[tuple[Any, int]]] = {}
    for parameter, some in tensors.items():
        if shards[parameter].groups:
            together.setdefault(shards[parameter].groups, []).extend((parameter, i) for i in range(len(some)))
    for groups, places in together.items():
        flat = torch.cat([tensors[parameter][i].reshape(-1) for parameter, i in places])
        for group in groups:
            dist.all_reduce(flat, group=group)
        sizes = [tensors[parameter][i].numel() for parameter, i in places]
        for (parameter, i), piece in zip(places, flat.split(sizes), strict=True):
            tensors[parameter][i] = piece.view_as(tensors[parameter][i])
