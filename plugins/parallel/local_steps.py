"""Local steps: workers that train on their own, and exchange weights seldom.

The ranks of a worker (all that share its place on `mesh.worker`) train as a run of their own on their share of the
samples: their loss, gradient norm, clipping and optimizer state are the worker's. Every H steps the workers agree. With
a the weights that they agreed on before, w_k those of worker k, and d the mean of a - w_k over the workers:

    outer = "average"     a = a - d                                local SGD, arXiv 1805.09767; federated averaging
    outer = "nesterov"    m = mu m + d;   a = a - r (d + mu m)     DiLoCo, arXiv 2311.08105
    then on each worker   w_k = a

`exchange` sends d in 8 or 4 bits per number, in blocks of 256 with a scale each (4 bits: arXiv 2501.18512, which needed
no error feedback). `fragments` parts the layers into as many groups, whose exchanges are spread over the H steps, so
that a link carries 1/F of the bytes at a time (streaming DiLoCo, the same). `schedule = "quadratic"` lets H grow as the
learning rate falls, H = every (peak / rate)^2, the quadratic synchronization rule (arXiv 2310.14423). The last step of
a run exchanges everything.

With plain SGD, H 1, no clipping and workers with as many valid tokens each, "average" is data parallelism.

Exchanges follow the number of the step. A worker whose update is skipped takes part with the weights that it has, and
the outer momentum moves with each exchange.

Checkpoints hold the weights and optimizer state of each worker, and once what they agreed on. Another number of workers
begins with the mean; the outer momentum goes on. A save between two exchanges loses nothing.

Cost for P parameters, K workers: 2 (K-1)/K P numbers sent per H steps (in the format of `exchange`), which nothing
hides; 4 bytes per parameter for a and 4 for m with "nesterov" (4 for a alone where the exchange is quantised), where
the worker's weights lie, or in host memory (`offload`). For a moment, 7 copies of 2^24 numbers or the largest tensor.
Validation is the mean over the workers, each on its share.

Limits: one axis whose ranks drift per run. A quantised exchange depends on how a worker's ranks slice the weights: its
curve is one at any layout only within what the format loses. A router's bias is balanced by each worker for itself, so
that mixtures with one are near data parallelism with H 1, not equal to it. `every`, changed on a resume, counts anew.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from titan.contracts import (
    Alike,
    Axis,
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
from titan.contracts.base.cost import Collective, CollectiveCost, PersistentState

_log = logging.getLogger("titan.local_steps")

BLOCK = 256
"""Numbers with a scale of their own in a quantised exchange."""

PIECE = 2**24
"""Numbers of a rank that are exchanged together: the copies of an exchange take about 7 times their bytes."""

BITS = {"fp32": 32, "int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.local_steps]`."""

    every: int = option(16, "steps from one exchange to the next (H)", at_least=1)
    schedule: Literal["fixed", "quadratic"] = option(
        "fixed", '"quadratic": the steps grow with the square of peak over present learning rate, once that falls'
    )
    outer: Literal["average", "nesterov"] = option(
        "average", '"average" of the weights; "nesterov": a step by the mean change, with momentum (DiLoCo)'
    )
    outer_lr: float = option(0.7, 'rate of the outer step, for outer = "nesterov"', above=0)
    outer_momentum: float = option(0.9, 'momentum of the outer step, for outer = "nesterov"', at_least=0, below=1)
    exchange: Literal["fp32", "int8", "int4"] = option("fp32", "format in which the workers send their changes")
    fragments: int = option(1, "groups of layers that are exchanged at different steps", at_least=1, at_most=1024)
    offload: bool = option(False, "keep what the workers agreed on, and the momentum, in host memory")


@register
class LocalSteps(Technique):
    """Workers that train on their own and exchange weights seldom (local SGD, DiLoCo)."""

    name = "local_steps"
    Config = Config
    config: Config
    phase = "materialise"
    axes = (
        Axis(name="worker", data="dealt", weights="own", topology_order=-10, doc="workers with weights of their own"),
    )
    provides = ("joins_workers",)
    conflicts: ClassVar = {"joins_workers": "both join the weights of mesh.worker"}
    preserves_numerics = False
    measures: ClassVar = {
        "worker_drift": Measure(
            "mean square of a weight's distance from the workers' mean, at the last exchange", "mean"
        )
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._weights: dict[str, list[Tensor]] = {}  # two where this rank has both stages that hold a tied one
        self._fragments: list[dict[str, Tensor]] = [{} for _ in range(config.fragments)]
        self._buffers: dict[str, list[Tensor]] = {}
        self._agreed: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        self._due: list[int] = []
        self._drift: Tensor | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Fragments need a step and a layer each; means of weights need float32."""
        for why in job.stating("narrow_weights"):
            yield f"workers average their weights, which takes float32: {why}"
        config = self.config
        most = min(config.every, spec.n_layers)
        if config.fragments > most:
            yield (
                f"fragments = {config.fragments}: at most one per step and per layer, so {most} with every = "
                f"{config.every} and {spec.n_layers} layers; set fragments = {most}"
            )

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        if self.config.outer == "average":
            for name in ("outer_lr", "outer_momentum"):
                if (value := getattr(self.config, name)) != getattr(Config(), name):
                    yield f'{name} = {value} is used by outer = "nesterov" alone'

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The exchange, as its share of a step; what was agreed on, and its momentum."""
        config, tensors = self.config, self._kept_tensors()
        bytes_each = BITS[config.exchange] / 8 + (0 if config.exchange == "fp32" else 4 / BLOCK)
        kinds: tuple[Collective, ...] = ("all_to_all", "all_gather")
        exchange = tuple(
            CollectiveCost(
                axes=("worker",),
                collective=kind,
                where="step",
                when="update",
                count=config.fragments / config.every,
                numel=1 / config.fragments,
                itemsize=bytes_each,
                per_parameter=True,
                sharded_over=costs.updated_over,
                per="step",
            )
            for kind in kinds
        )
        kept = PersistentState(component="optimizer", bytes_per_param=4 * tensors, axes=costs.updated_over)
        state = costs.state if config.offload or not tensors else (*costs.state, kept)
        passes = (12 + 8 * tensors) / config.every
        return replace(
            costs,
            state=state,
            collectives=(*costs.collectives, *exchange),
            update_bytes=costs.update_bytes + passes,
            after_update_bytes=max(costs.after_update_bytes, self._buffer_bytes(costs, job)),
        )

    def _buffer_bytes(self, costs: Costs, job: Job) -> float:
        """Bytes per parameter that an exchange holds besides its state, of the fragment with embeddings and head."""
        spec, layout = job.spec, job.layout
        layers = spec.n_layers - math.ceil(spec.n_layers / self.config.fragments)
        share, ranks = 1 - layers * spec.layer_params / spec.params, layout.degree_of("slices")
        ranks *= math.prod(layout.degree(axis) for axis in costs.updated_over)
        held = share * spec.params / ranks / layout.degree_of("layers")
        share *= min(1.0, max(PIECE, spec.vocab_size * spec.dim / ranks) / held)
        if layout.workers == 1:
            return share * 4 * min(self._kept_tensors(), 1)
        if self.config.exchange == "fp32":
            return share * (16 + 2 * self._kept_tensors() + 8 / layout.workers)
        return share * (25 + 5 / layout.workers)

    def _kept_tensors(self) -> int:
        """Tensors of a parameter's size that outlive the step."""
        if self.config.outer == "nesterov":
            return 2
        return int(self.config.exchange != "fp32")

    # --- the state ------------------------------------------------------------------------------------------------

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Note the weights of one part by fragment: layers in turn, what is no layer with the first."""
        self._context = context
        layers = [f"{name}." for name in context.spec.layer_names()]
        for name, parameter in part.parameters():
            weight, number = parameter.detach(), next((i for i, at in enumerate(layers) if name.startswith(at)), 0)
            self._weights.setdefault(name, []).append(weight)
            self._fragments[number % self.config.fragments][name] = weight
            if self._kept_tensors():
                self._agreed[name] = self._zeros(weight)
            if self.config.outer == "nesterov":
                self._momentum[name] = self._zeros(weight)
        persistent = part.module.state_dict().keys() - dict(part.parameters()).keys()
        for name, buffer in part.module.named_buffers():
            if name in persistent and buffer.is_floating_point():
                self._buffers.setdefault(name, []).append(buffer)

    def _zeros(self, like: Tensor) -> Tensor:
        """Zeros placed as a weight, in host memory where that is asked for."""
        zeros = torch.zeros_like(shard_of(like), device="cpu" if self.config.offload else None)
        if self.config.offload and like.is_cuda:
            zeros = zeros.pin_memory()
        if not isinstance(like, DTensor):
            return zeros
        return _placed(zeros, like)

    def state_dict(self) -> dict[str, Any]:
        """What the workers agreed on, the momentum, and when each fragment is exchanged next."""
        return {
            "agreed": Alike(self._agreed),
            "momentum": Alike(self._momentum),
            "due": list(self._due),
            "every": self.config.every,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The saved state. Where nothing was agreed on, the workers agree on the mean of their weights now."""
        if self._context.mesh.layout.degree("worker") == 1:
            left = "the outer step is the worker's own" if self.config.outer == "nesterov" else "nothing changes"
            _log.warning(f"[plugins.local_steps] mesh.worker = 1, so nothing is exchanged and {left}; set it above 1")
        agreed: Mapping[str, Tensor] = state.get("agreed", {})
        if self._agreed.keys() - agreed.keys():
            self._agree(self._weights)
            agreed = {name: weights[0] for name, weights in self._weights.items()}
        for kept, saved in ((self._agreed, agreed), (self._momentum, state.get("momentum", {}))):
            for name in kept.keys() & saved.keys():
                shard_of(kept[name]).copy_(shard_of(saved[name]))
        due = [int(step) for step in state.get("due", ())]
        goes_on = len(due) == self.config.fragments and state.get("every") == self.config.every
        self._due = due if goes_on else []

    # --- the exchange ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def after_step(self, step: int, updated: Tensor) -> None:
        every, count, last = self.config.every, self.config.fragments, self._context.job.train.steps
        if not self._due:
            self._due = [step - 1 + math.ceil((i + 1) * every / count) for i in range(count)]
        turn = [i for i, due in enumerate(self._due) if step >= due or step == last]
        if turn:
            self._drift = torch.zeros(2, dtype=torch.float64, device=self._context.device)
        for i in turn:
            for names in _piecewise(self._fragments[i]):
                self._drift += self._exchange(names)
            if step >= self._due[i]:
                self._due[i] = step + self._steps_after(step)
        if 0 in turn:
            self._agree(self._buffers)

    def _steps_after(self, step: int) -> int:
        """H, from this step to the next exchange of what was exchanged now."""
        job, every = self._context.job, self.config.every
        now, later = (job.lr_schedule.factor(min(at, job.train.steps), job.train.steps) for at in (step, step + 1))
        if self.config.schedule == "fixed" or later >= now:
            return every
        return max(every, round(every / now**2))

    def _agree(self, tensors: Mapping[str, list[Tensor]]) -> None:
        """Replace tensors by their mean over the workers."""
        for names in _piecewise(tensors):
            for name, mean in zip(
                names, self._means([shard_of(tensors[name][0]) for name in names], "fp32"), strict=True
            ):
                for tensor in tensors[name]:
                    shard_of(tensor).copy_(mean)

    def _exchange(self, names: Sequence[str]) -> Tensor:
        """The outer step of some weights; returns [sum of the squares of their drift, their number]."""
        config, weights = self.config, [self._weights[name][0] for name in names]
        held = [shard_of(weight) for weight in weights]
        bases = [shard_of(self._agreed[name]) if self._agreed else None for name in names]
        changes = [w if a is None else a.to(w.device) - w for a, w in zip(bases, held, strict=True)]
        means = self._means(changes, config.exchange)
        drift = torch.stack(
            [_counted(change - mean, weight) for change, mean, weight in zip(changes, means, weights, strict=True)]
        ).sum(0)
        for name, base, mean in zip(names, bases, means, strict=True):
            new = mean if base is None else self._stepped(name, base, mean)
            for weight in self._weights[name]:
                shard_of(weight).copy_(new)
        return drift

    def _stepped(self, name: str, agreed: Tensor, mean: Tensor) -> Tensor:
        """What the workers agree on after an outer step by their mean change."""
        change = mean.to(agreed.device)
        if self.config.outer == "nesterov":
            momentum = shard_of(self._momentum[name])
            momentum.mul_(self.config.outer_momentum).add_(change)
            change = self.config.outer_lr * (change + self.config.outer_momentum * momentum)
        return agreed.sub_(change)

    def _means(self, own: Sequence[Tensor], form: str) -> list[Tensor]:
        """The mean over the workers of each tensor, sent in a format; bit by bit the same on all workers.

        Each worker adds up a part of all numbers, in the order of workers, and no block has numbers of two tensors, so
        what several ranks of a worker hold alike comes out alike, whatever else they hold.
        """
        workers = self._context.mesh.layout.degree("worker")
        if workers == 1:
            return list(own)
        group = self._context.mesh.group("worker")
        sizes = [-(-one.numel() // BLOCK) * BLOCK for one in own]
        width = -(-sum(sizes) // (workers * BLOCK)) * BLOCK
        padded = [pad(one.flatten(), (0, size - one.numel())) for one, size in zip(own, sizes, strict=True)]
        parts = pad(torch.cat(padded), (0, workers * width - sum(sizes))).view(workers, width)
        sent = encoded(parts, form)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total, *others = decoded(received, form)
        for part in others:
            total = total + part
        sent = encoded(total[None] / workers, form)
        received = sent.new_empty(workers, sent.shape[1])
        dist.all_gather(list(received), sent[0], group=group)
        found = decoded(received, form).flatten()[: sum(sizes)].split(sizes)
        return [mean[: one.numel()].view_as(one) for one, mean in zip(own, found, strict=True)]

    def measure(self) -> Mapping[str, Tensor | None]:
        return {"worker_drift": self._drift}


def _piecewise(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names in order, in runs of at most `PIECE` numbers of this rank, or of one tensor."""
    run: list[str] = []
    numbers = 0
    for name, held in tensors.items():
        size = shard_of(held[0] if isinstance(held, list) else held).numel()
        if run and numbers + size > PIECE:
            yield run
            run, numbers = [], 0
        run, numbers = [*run, name], numbers + size
    if run:
        yield run


def _counted(drift: Tensor, weight: Tensor) -> Tensor:
    """[sum of squares, numbers] of a weight's drift, each as its share of the ranks of a worker that hold the same."""
    holders = 1
    if isinstance(weight, DTensor):
        sizes = zip(weight.placements, weight.device_mesh.shape, strict=True)
        holders = math.prod(size for placement, size in sizes if placement.is_replicate())
    squares = drift.double().square().sum() / holders
    return torch.stack([squares, torch.full_like(squares, drift.numel() / holders)])


def encoded(rows: Tensor, form: str) -> Tensor:
    """[R, N] float32, N a multiple of `BLOCK` -> [R, bytes] uint8: scales, then numbers; "fp32" as they are."""
    if form == "fp32":
        return rows.contiguous()
    largest = 2 ** (BITS[form] - 1) - 1
    blocks = rows.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1) / largest
    steps = (blocks / scales.where(scales != 0, 1.0)[..., None]).round().clamp(-largest, largest)
    numbers = (steps + largest).to(torch.uint8).flatten(1)
    if form == "int4":
        numbers = numbers[:, ::2] + 16 * numbers[:, 1::2]
    return torch.cat([scales.contiguous().view(torch.uint8), numbers], 1)


def decoded(rows: Tensor, form: str) -> Tensor:
    """The numbers [R, N] of what `encoded` gave."""
    if form == "fp32":
        return rows
    largest, per_block = 2 ** (BITS[form] - 1) - 1, 4 + BLOCK * BITS[form] // 8
    blocks = rows.shape[1] // per_block
    scales, numbers = rows[:, : 4 * blocks].contiguous().view(torch.float32), rows[:, 4 * blocks :]
    if form == "int4":
        numbers = torch.stack([numbers % 16, numbers // 16], -1).flatten(1)
    return ((numbers.float() - largest).unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)


def _placed(shard: Tensor, like: DTensor) -> Tensor:
    """A DTensor of this shard, placed as a weight; `DTensor.from_local` would move it from the host to the GPU."""
    names, context = like.__tensor_flatten__()
    inner = {name: shard if isinstance(held := getattr(like, name), Tensor) else held for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
