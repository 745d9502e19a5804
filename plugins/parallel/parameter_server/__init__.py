"""Parameter server: some ranks keep the weights, and workers pull them and push gradients, each at its own pace.

All ranks train. Those of the first `servers` workers keep the weights too, layers in turn, with the optimizer and its
state, in host memory and beside the training. Ranks at one place inside of their workers hold the same shards, so each
pushes to the ranks at its place in the servers. With K workers, and g_k the gradient of worker k after clipping:

    push of step t   g = g_k;   w = step of the optimizer with g at rate(t) / max(K, d)
    pull after t     when all workers have pushed step t - s (s = `staleness`)

d, the delay, counts the pushes of others that were applied between the pull from which g_k was computed and now. At an
even pace d is K - 1, and K pushes together make one step; a later push counts the less, as in staleness-aware SGD
(arXiv 1511.05950). The bound is that of stale synchronous parallel training (Ho et al., NIPS 2013): no worker is more
than s + 1 steps ahead of another, and within that a slow worker slows nobody. Pushes without a bound: Hogwild, arXiv
1106.5730. Weights sharded among servers: Li et al., OSDI 2014.

    s = 0            g = mean of g_k over the workers, added up in their order;  w = step with g at rate(t)

is data parallelism with any optimizer, where workers have as many valid tokens each and nothing is clipped: each worker
clips by its own norm. A worker whose update is skipped pushes nothing for that step, and the others' count as ever.

With s > 0 workers meet only to validate, to save and at the end; then all have the weights with every push applied.
Rows have the numbers of worker 0. Checkpoints have the weights of each worker, which are alike, and the optimizer's
state once: they come back at any number of workers and servers.

Cost for P parameters and n servers: a worker sends and receives P float32 numbers per step, a server (K - 1) P / n each
way, which nothing hides; host memory: P numbers on a worker, on a server K + 2 per parameter of its share and the
optimizer's state.
The update runs on the CPU of the server, once per push (s = 0: per step).

A worker that dies, with s > 0, is gone, not the run: servers forget it, K is the number of workers that are there, and
its samples are left out. A checkpoint has as many workers as were there. A worker is gone when one of its ranks is: the
launcher ends the others. What ends the run all the same, to restart from the newest checkpoint: the death of a worker
that is a server, and one while all meet (while they validate, or copy what is saved). A node that loses its network or
its power closes no connection: it counts as late, which `[comm] timeout_s` bounds. torchrun ends all ranks with one.

Limits: optimizers must update each number of a weight by itself where ranks of a worker hold slices (AdamW, SGD).
Persistent buffers, such as the bias of a router, are each worker's own. With s > 0 momentum and AdamW's moments decay
with each push, K times per step. A missing gradient counts as one of zeros. A server has a thread, a connection and a
gradient per worker, so there are at most 1,024. The planner counts the optimizer's state on all workers. Checkpoints of
a run without servers are weights to it: use them with checkpoint.init_from, and the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.contracts import (
    Alike,
    BuildContext,
    Costs,
    Fact,
    Job,
    Measure,
    ModelPart,
    ModelSpec,
    NamedParameter,
    Technique,
    option,
    register,
)
from titan.contracts.base.cost import CollectiveCost
from titan.errors import RankFailedError
from titan.plugins.parallel.parameter_server.server import (
    DONE,
    HELLO,
    PUSH,
    Arrival,
    Links,
    Order,
    Server,
    received,
)
from titan.plugins.parallel.parameter_server.slots import probed

MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.parameter_server]`."""

    servers: int = option(1, "workers, the first ones, whose ranks keep the weights too; layers in turn", at_least=1)
    staleness: int = option(
        0, "steps that a pull may lack of the slowest worker's pushes; 0: synchronous, as data parallelism", at_least=0
    )


class OptimizerOnServers(torch.optim.Optimizer):
    """In place of a worker's optimizer, which is never stepped: notes the gradients that are to be pushed."""

    def __init__(self, optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self._note, self._clear = note, optimizer.zero_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the worker's parameters."""
        self._clear(set_to_none)

    def step(self, closure: Any = None) -> None:
        """The update is due, by the servers."""
        self._note()


@register
class ParameterServer(Technique):
    """Asynchronous training: ranks that keep the weights, and workers that pull and push with bounded staleness."""

    name = "parameter_server"
    Config = Config
    config: Config
    phase = "materialise"
    covers = ("worker",)
    provides = ("joins_workers",)
    conflicts: ClassVar = {"joins_workers": "both join the weights of mesh.worker"}
    preserves_numerics = False
    measures: ClassVar = {
        "push_delay": Measure("updates by others between a worker's pull and its next push, in the last step", "mean"),
        "push_delay_max": Measure("the largest of these", "max"),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._flats: list[Tensor] = []
        self._slots: dict[str, dict[str, bool]] = {}
        self._server: Server | None = None
        self._links: Links | None = None
        self._ranks: list[int] = []
        self._pushes = False
        self._delays: list[int] = []

    @cached_property
    def _shares(self) -> list[dict[str, list[Tensor]]]:
        """Of each server: its weights, by name, each with all that hold it on this rank."""
        return [{} for _ in range(self.config.servers)]

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Several workers, and a layer for each server; servers add up in float32."""
        for why in job.stating("narrow_weights"):
            yield f"servers add gradients to weights, which takes float32: {why}"
        for technique in job.techniques:
            if technique is not self and {"wraps_optimizer", "updates_in_backward"} & technique.facts().keys():
                yield (
                    f"[plugins.{technique.name}] changes the optimizer of workers, but the servers have the optimizer; "
                    f"disable one of {technique.name} and parameter_server"
                )
        servers, workers = self.config.servers, job.layout.degree("worker")
        if workers > MOST_WORKERS:
            yield f"mesh.worker = {workers}: a server has a thread for each worker, so at most {MOST_WORKERS}"
        if workers == 1:
            yield "mesh.worker = 1: needs at least 2 workers; set mesh.worker, or disable parameter_server"
        elif servers > min(workers, spec.n_layers):
            most = min(workers, spec.n_layers)
            yield (
                f"servers = {servers}: at most one per worker and per layer, so {most} with mesh.worker = {workers} "
                f"and {spec.n_layers} layers; set servers = {most}"
            )

    def facts(self) -> dict[Fact, str]:
        """Workers at different steps, unless they are synchronous."""
        way_out = "[plugins.parameter_server] staleness lets workers keep their own pace; set staleness = 0"
        wraps = "[plugins.parameter_server] pushes gradients instead of an update; switch it off"
        return {"wraps_optimizer": wraps, **({"own_pace": way_out} if self.config.staleness else {})}

    def cost(self, costs: Costs, job: Job) -> Costs:
        """All of a server's traffic: what the other workers push to it, and then pull from it."""
        others = job.layout.degree("worker") - 1
        traffic = CollectiveCost(
            axes=("worker",),
            collective="send",
            where="step",
            when="update",
            numel=2 * max(1.0, others / self.config.servers),
            itemsize=4,
            per_parameter=True,
            sharded_over=costs.updated_over,
            per="step",
        )
        return replace(costs, collectives=(*costs.collectives, traffic))

    # --- the build ------------------------------------------------------------------------------------------------

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Note the weights of one part by server: layers in turn, the head with the last, all else with the first."""
        self._context = context
        if self.config.staleness:
            context.mesh.spare(range(self.config.servers, context.mesh.layout.degree("worker")))
        layers = [f"{name}." for name in context.spec.layer_names()]
        for name, parameter in part.parameters():
            if not parameter.requires_grad:
                continue
            last = -1 if name.startswith(f"{context.spec.head[-1]}.") else 0
            number = next((i for i, layer in enumerate(layers) if name.startswith(layer)), last)
            self._shares[number % self.config.servers].setdefault(name, []).append(parameter)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
    ) -> torch.optim.Optimizer:
        """One that notes gradients; and the server's, where this rank is one."""
        context, named = self._context, {one.name: one for one in parameters}
        build, worker = context.job.optimizer.build, context.mesh.at("worker")
        self._flats = [_flat(share) for share in self._shares]
        if worker < self.config.servers:
            share = self._shares[worker]
            flat = torch.empty_like(self._flats[worker])
            sizes = [_local(holders[0]).numel() for holders in share.values()]
            masters = [
                replace(named[name], parameter=nn.Parameter(one.view_as(_local(holders[0]))))
                for (name, holders), one in zip(share.items(), flat.split(sizes), strict=True)
            ]
            self._slots = probed(build, [named[name] for name in share])
            workers, job = context.mesh.layout.degree("worker"), context.job
            self._server = Server(masters, build, flat, workers, job.lr_factor, context.mesh.spared)
        return OptimizerOnServers(optimizer, self._note)

    # --- the state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer's share on this rank. Before a load, what there may be of it, without memory."""
        if self._server is None:
            return {}
        tables: dict[str, dict[str, Tensor]] = {}
        for name, master in self._server.parameters.items():
            like = self._shares[self._context.mesh.at("worker")][name][0]
            blank = torch.zeros((), device=master.device)
            state: Mapping[str, Tensor] = (
                {slot: blank.expand(master.shape) if whole else blank for slot, whole in self._slots[name].items()}
                if self._links is None or self._server.optimizer is None
                else self._server.optimizer.state[master]
            )
            for slot, value in state.items():
                placed = self._slots[name][slot] and isinstance(like, DTensor)
                tables.setdefault(slot, {})[name] = _as(value.detach(), like) if placed else value
        return {"optimizer": {slot: Alike(tensors) for slot, tensors in tables.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The saved state, and the weights, which all workers have alike; then begin to serve."""
        if self._server is not None and self._server.optimizer is not None:
            masters = self._server.parameters
            for name, (weight, *_) in self._shares[self._context.mesh.at("worker")].items():
                masters[name].copy_(_local(weight))
            for slot, tensors in state.get("optimizer", {}).items():
                for name in tensors.keys() & masters.keys():
                    self._server.optimizer.state[masters[name]][slot] = _local(tensors[name])
        self._connect()

    def _connect(self) -> None:
        """Meet the servers, one after the other; connections are made here, before there are threads."""
        layout, here, servers = self._context.mesh.layout, self._context.mesh.rank, self.config.servers
        at = [layout.coordinate(rank)["worker"] for rank in range(layout.world_size)]
        self._ranks = dist.get_process_group_ranks(self._context.mesh.group("worker"))
        # A thread that serves waits as long as its worker trains: what limits a wait is said where one waits.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        mates = [rank for rank, worker in enumerate(at) if worker == at[here]]
        self._links = Links(group, at[here], self._ranks, mates)
        word = torch.zeros(1, dtype=torch.int64)
        for server in range(servers):
            if server != at[here]:
                self._links.send(word, self._ranks[server], HELLO)
                continue
            for client in self._ranks[:server] + self._ranks[server + 1 :]:
                self._links.receive(word, client, HELLO)
            for mate in mates[1:]:
                if here == mates[0]:
                    self._links.send(word, mate, HELLO)
                elif here == mate:
                    self._links.receive(word, mates[0], HELLO)
        comm = self._context.job.comm
        self._limits_s = comm.init_timeout_s, comm.timeout_s
        if self._server is not None:
            order = Order(layout.degree("worker"), self.config.staleness)
            self._server.serve(self._links, order, self._limits_s)
            self._flats[at[here]] = self._server.flats[at[here]]

    # --- the steps ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _note(self) -> None:
        """Copy the clipped gradients to where they are sent from."""
        self._pushes = True
        for flat, share in zip(self._flats, self._shares, strict=True):
            for one, (parameter, *_) in _slices(flat, share):
                if parameter.grad is None:
                    one.zero_()
                else:
                    one.copy_(_local(parameter.grad).flatten())

    def after_step(self, step: int, updated: Tensor) -> None:
        """Push, and pull as soon as the bound allows."""
        pushed, self._pushes = self._pushes, False
        if self._links is not None:  # else nobody serves: a dry run
            self._exchange(step, pushed, self.config.staleness)

    def meet(self, step: int) -> Collection[int]:
        """Pull the weights with every push of every worker."""
        self._exchange(step, False, 0)
        return () if self._server is None else frozenset(self._server.gone)

    @torch.no_grad()
    def _exchange(self, step: int, pushed: bool, bound: int) -> None:
        assert self._links is not None
        links, head = self._links, torch.tensor([step, pushed, bound])
        for server, flat in enumerate(self._flats):
            if server == links.worker and self._server is not None:
                self._server.arrive(Arrival(server, step, pushed, bound))
                continue
            self._sent(head, server)
            if pushed and flat.numel():
                self._sent(flat, server)
        self._delays = [] if pushed else self._delays
        for server, (flat, share) in enumerate(zip(self._flats, self._shares, strict=True)):
            late, clock, delay = self._answer(server, flat)
            if late >= 0:
                raise RankFailedError(
                    f"worker {links.worker} waits for worker {late}, which has done {clock} steps, longer than [comm] "
                    "timeout_s (init_timeout_s before the first update)"
                )
            self._delays += [delay] if pushed else []
            for one, holders in _slices(flat, share):
                for holder in holders:
                    _local(holder).copy_(one.view_as(_local(holder)))

    def _sent(self, tensor: Tensor, server: int) -> None:
        assert self._links is not None
        try:
            self._links.send(tensor, self._ranks[server], PUSH)
        except RuntimeError as error:
            raise RankFailedError(f"the parameter server on rank {self._ranks[server]} is gone: {error}") from error

    def _answer(self, server: int, flat: Tensor) -> list[int]:
        """[worker that is waited for too long or -1, its step, delay of the push]; the weights come into `flat`."""
        assert self._links is not None
        limit_s, source = 2 * max(self._limits_s), self._ranks[server]  # servers give up before
        if server == self._links.worker and self._server is not None:
            return self._server.answer(limit_s)
        head = received(self._links.group, torch.empty(3, dtype=torch.int64), source, limit_s)
        if flat.numel() and head[0] < 0:
            received(self._links.group, flat, source, limit_s)
        return head.tolist()

    def measure(self) -> Mapping[str, Tensor | None]:
        """The delay of this rank's last push, at each server."""
        if not self._delays:
            return {"push_delay": None, "push_delay_max": None}
        delays = torch.tensor(self._delays, dtype=torch.float32, device=self._context.device)
        return {
            "push_delay": torch.stack([delays.sum(), torch.full_like(delays[0], len(delays))]),
            "push_delay_max": delays.max(),
        }

    def close(self) -> None:
        """Say to all servers that this worker is done."""
        if self._links is None:
            return
        for server in range(self.config.servers):
            if server != self._links.worker:
                with contextlib.suppress(RuntimeError):  # it has failed: it waits for nobody
                    self._links.send(torch.tensor([DONE, 0, 0]), self._ranks[server], PUSH)
        if self._server is not None:
            self._server.close()


def _flat(share: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """Memory for a share of the weights, or of their gradients, one after the other; in host memory."""
    locals_ = [_local(holders[0]) for holders in share.values()]
    device = "meta" if any(one.is_meta for one in locals_) else "cpu"
    pinned = any(one.is_cuda for one in locals_)
    return torch.zeros(sum(one.numel() for one in locals_), device=device, pin_memory=pinned)


def _slices(flat: Tensor, share: Mapping[str, Sequence[Tensor]]) -> Iterable[tuple[Tensor, Sequence[Tensor]]]:
    """What `flat` has of each weight, and those that hold the weight."""
    sizes = [_local(holders[0]).numel() for holders in share.values()]
    return zip(flat.split(sizes), share.values(), strict=True) if sizes else ()


def _as(value: Tensor, like: Tensor) -> Tensor:
    """A tensor of a shard's shape, placed as a weight, but in host memory: `DTensor.from_local` would move it."""
    assert isinstance(like, DTensor)
    like = like.detach()
    names, context = like.__tensor_flatten__()
    inner = {name: value if isinstance(held := getattr(like, name), Tensor) else held for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
