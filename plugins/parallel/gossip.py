"""Gossip: workers that train on their own, and after each step average their weights with a few neighbors.

The ranks of a worker (all that share its place on `mesh.worker`) train as a run of their own on their share of the
samples: their loss, gradient norm, clipping and optimizer state are the worker's. Of K workers, worker i takes the mean
of its weights after its own step and of those of its neighbors, n with itself (decentralized SGD, arXiv 1705.09056):

    x_i = sum_j W_ij x_j        W_ij = 1 / n for itself and its neighbors, else 0

`graph` says who the neighbors are. All rows and columns of W add up to 1, so that mixing leaves the mean of all weights
as it is. It multiplies the distance from the mean by 1 - gap at most, the second singular value of W:

    graph          neighbors of worker i                 n - 1           gap
    "ring"         i - 1 and i + 1                       2               about 4 pi^2 / (3 K^2)
    "torus"        the four on a grid, near-square       4               about 4 pi^2 / (5 K)
    "exponential"  i + 1, i + 2, i + 4, ... below i + K  ceil(log2 K)    about 2 / (1 + log2 K), arXiv 2110.13363
    "one_peer"     one of these, in turn by step         1               1 for ceil(log2 K) steps together, if K = 2^m

So "one_peer" sends least, and averages exactly in each period if K is a power of two. With another K no period does,
but weights still approach their mean. With each graph SGD converges as data parallelism does, at O(1 / sqrt(K T)) after
T steps, once T is large: the larger, the smaller the gap. Where W is the exact mean (K 2, or a ring of 3), plain SGD
without clipping, and with as many valid tokens on each worker, is data parallelism.

`tracking` removes the error of workers whose samples differ in kind: the optimizer steps by an estimate c of all
workers' mean gradient (momentum tracking, arXiv 2209.15505; with momentum 0, gradient tracking). With g the clipped
gradient of a worker:

    u = momentum u + g;   c = sum_j W_ij c_j + u - (u of the step before)

The sum of c over the workers is always that of u. A gradient that is not finite leaves u as it is.

The last step of a run averages over all workers, so that the last checkpoint has one model. Earlier ones hold the
weights and state of each worker. Another number of workers begins with the means, so the sums of c and u stay equal.

Cost for P parameters: (n - 1) P numbers sent per step, twice as many with tracking, to neighbors alone; nothing hides
them. Tracking: 8 bytes per parameter, where the worker's weights lie. A row of metrics: (K-1)/K P numbers sent, for the
distance from the mean. The last step: 2 (K-1)/K P. Validation is the mean over the workers, each on its share.

A worker whose update is skipped averages as ever, with the weights and the c that it has.

Limits: one axis whose ranks drift per run. A worker waits for its neighbors at each step, so the slowest sets the pace.
c is not clipped. "exponential" and "one_peer" send one way: their W is not symmetric, as the proofs for tracking ask.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from titan.contracts import (
    BuildContext,
    Costs,
    Job,
    Measure,
    ModelPart,
    ModelSpec,
    Technique,
    option,
    register,
    shard_of,
)
from titan.contracts.base.cost import CollectiveCost, PersistentState
from titan.contracts.base.spec import nearest

_log = logging.getLogger("titan.gossip")

BUCKET = 2**24
"""Numbers that are sent at a time, or those of one tensor: there is memory of so many for each neighbor, and as many
more."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.gossip]`."""

    graph: Literal["ring", "torus", "exponential", "one_peer"] = option(
        "one_peer", "with whom a worker averages its weights after each step"
    )
    tracking: bool = option(False, "step by an estimate of all workers' mean gradient (gradient or momentum tracking)")
    momentum: float = option(0.0, "of the gradients that are tracked, for tracking = true", at_least=0, below=1)


@register
class Gossip(Technique):
    """Workers that average their weights with a few neighbors after each step (decentralized SGD)."""

    name = "gossip"
    Config = Config
    config: Config
    phase = "materialise"
    covers = ("worker",)
    provides = ("joins_workers",)
    conflicts: ClassVar = {"joins_workers": "both join the weights of mesh.worker"}
    preserves_numerics = False
    measures: ClassVar = {
        "consensus_distance": Measure("mean square of a weight's distance from the workers' mean", "mean")
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._names: list[str] = []  # in lists, as a rank may hold two copies of a tied parameter
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[Tensor] = []
        self._summed: list[Tensor] = []
        self._tracked: list[Tensor] = []

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """A torus needs rows and columns; means of weights need float32."""
        for why in job.stating("narrow_weights"):
            yield f"workers average their weights, which takes float32: {why}"
        workers = job.layout.degree("worker")
        if self.config.graph == "torus" and workers > 1 and _height(workers) == 1:
            near = nearest(workers, lambda number: _height(number) > 1)
            yield (
                f'graph = "torus" with mesh.worker = {workers}: a grid of at least 2 x 2 workers is required; set '
                f'mesh.worker = {near}, or graph = "ring"'
            )

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        if self.config.momentum and not self.config.tracking:
            yield f"momentum = {self.config.momentum} is used by tracking = true alone"

    def cost(self, costs: Costs, job: Job) -> Costs:
        """What is sent to each neighbor and averaged per step; the tracked gradients."""
        neighbors = len(averaged(self.config.graph, job.layout.degree("worker"), 1)[0]) - 1
        tensors = 2 if self.config.tracking else 1
        sent = CollectiveCost(
            axes=("worker",),
            collective="send",
            where="step",
            when="update",
            numel=tensors,
            itemsize=4,
            count=neighbors,
            per_parameter=True,
            sharded_over=costs.updated_over,
            per="step",
        )
        passes, state = tensors * (24 + 16 * neighbors), costs.state
        if self.config.tracking:
            passes += 72
            state += (PersistentState(component="optimizer", bytes_per_param=8, axes=costs.updated_over),)
        return replace(
            costs, state=state, collectives=(*costs.collectives, sent), update_bytes=costs.update_bytes + passes
        )

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Note the weights and buffers of one part, and make its tracked gradients."""
        self._context = context
        named = dict(part.parameters())
        self._names += named
        self._parameters += named.values()
        if self.config.tracking:
            self._summed += [torch.zeros_like(parameter.detach()) for parameter in named.values()]
            self._tracked += [torch.zeros_like(parameter.detach()) for parameter in named.values()]
        persistent = part.module.state_dict().keys() - named.keys()
        buffers = part.module.named_buffers()
        self._buffers += [b for name, b in buffers if name in persistent and b.is_floating_point()]

    def state_dict(self) -> dict[str, Any]:
        """u and c of each parameter, if gradients are tracked."""
        names = self._names if self.config.tracking else []
        return {
            "summed": dict(zip(names, self._summed, strict=True)),
            "tracked": dict(zip(names, self._tracked, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Those that were saved; tracking begins with zeros."""
        if self._context.mesh.layout.degree("worker") == 1:
            _log.warning("[plugins.gossip] mesh.worker = 1, so there are no neighbors to average with; set it above 1")
        for kept, saved in ((self._summed, state.get("summed", {})), (self._tracked, state.get("tracked", {}))):
            for name, tensor in zip(self._names, kept, strict=False):
                if name in saved:
                    shard_of(tensor).copy_(shard_of(saved[name]))

    @torch.no_grad()
    def before_update(self, grad_norm: Tensor) -> None:
        if not self.config.tracking:
            return
        finite = grad_norm.isfinite()
        for parameter, summed, tracked in zip(self._parameters, self._summed, self._tracked, strict=True):
            if parameter.grad is None:  # other workers may have one
                parameter.grad = torch.zeros_like(parameter)
            gradient, before, c = (shard_of(tensor) for tensor in (parameter.grad, summed, tracked))
            now = torch.where(finite, self.config.momentum * before + gradient, before)
            c.add_(now - before)
            before.copy_(now)
            gradient.copy_(c)

    @torch.no_grad()
    def after_step(self, step: int, updated: Tensor) -> None:
        """Average weights, buffers and tracked gradients with the neighbors; at the last step over all workers."""
        workers = self._context.mesh.layout.degree("worker")
        last = step == self._context.job.train.steps
        for bucket in _buckets([*self._parameters, *self._buffers, *self._tracked]) if workers > 1 else ():
            if last:
                self._agree(bucket, workers)
            else:
                self._average(bucket, averaged(self.config.graph, workers, step))

    def _agree(self, tensors: Sequence[Tensor], workers: int) -> None:
        """Replace tensors by their means over all workers, each of which adds up a part, in the workers' order."""
        group, own = self._context.mesh.group("worker"), torch.cat([tensor.flatten() for tensor in tensors])
        parts = pad(own, (0, -own.numel() % workers)).view(workers, -1)
        theirs, means = torch.empty_like(parts), torch.empty_like(parts)
        dist.all_to_all_single(theirs, parts, group=group)
        mean, *rest = theirs
        for part in rest:
            mean += part
        mean /= workers
        dist.all_gather(list(means), mean, group=group)
        found = means.flatten()[: own.numel()].split([tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, found, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def _average(self, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> None:
        """Replace tensors by their means over the workers in this worker's row; sends them to those that need them.

        Elementwise, one operation at a time and in the order of the workers: what several ranks of a worker hold alike
        comes out alike, wherever it lies in a bucket, and so does a mean over all workers on each of them.
        """
        at, group = self._context.mesh.at("worker"), self._context.mesh.group("worker")
        own = torch.cat([tensor.flatten() for tensor in tensors])
        parts = [own if worker == at else torch.empty_like(own) for worker in rows[at]]
        moves = [
            dist.P2POp(dist.irecv, part, group=group, group_peer=worker)
            for worker, part in zip(rows[at], parts, strict=True)
            if worker != at
        ]
        moves += [
            dist.P2POp(dist.isend, own, group=group, group_peer=worker)
            for worker, row in enumerate(rows)
            if worker != at and at in row
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        total, *others = parts
        for part in others:
            total += part
        total /= len(parts)
        for tensor, mean in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    @torch.no_grad()
    def measure(self) -> Mapping[str, Tensor | None]:
        """The distance of the workers: each compares a part of all weights."""
        workers, mesh = self._context.mesh.layout.degree("worker"), self._context.mesh
        found = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for bucket in _buckets(self._parameters) if workers > 1 else ():
            own = torch.cat([weight.flatten() for weight in bucket])
            parts = pad(own, (0, -own.numel() % workers)).view(workers, -1)
            theirs = torch.empty_like(parts)
            dist.all_to_all_single(theirs, parts, group=mesh.group("worker"))
            apart = theirs.double() - theirs.double().mean(0)
            found += torch.stack([apart.square().sum(), torch.full_like(found[0], own.numel())])
        return {"consensus_distance": found}


def averaged(graph: str, workers: int, step: int) -> list[list[int]]:
    """Of each worker, those over which it takes the mean at a step, itself among them, in ascending order.

    So row i of W has 1 / n at these n workers. Neighbors lie at the same distances from each worker, around the grid:
    W is a mean of permutations, whose rows and columns add up to 1.

    graph: see `Config`.  workers: K.  step: from 1.
    """
    height = _height(workers) if graph == "torus" else 1
    width, doublings = workers // height, max((workers - 1).bit_length(), 1)
    ways = {
        "ring": [(0, 1), (0, -1)],
        "torus": [(0, 1), (0, -1), (1, 0), (-1, 0)],
        "exponential": [(0, 2**power) for power in range(doublings)],
        "one_peer": [(0, 2 ** ((step - 1) % doublings))],
    }[graph]
    return [
        sorted({(row + down) % height * width + (column + right) % width for down, right in ((0, 0), *ways)})
        for row in range(height)
        for column in range(width)
    ]


def _height(workers: int) -> int:
    """Rows of the squarest grid of workers, never more than its columns."""
    return max(number for number in range(1, math.isqrt(workers) + 1) if workers % number == 0)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """What this rank has of the tensors, in lists of at most `BUCKET` numbers or one tensor."""
    bucket: list[Tensor] = []
    for tensor in (shard_of(tensor) for tensor in tensors):
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        if tensor.numel():
            bucket.append(tensor)
    if bucket:
        yield bucket
