"""What layers in pieces cost beyond their collectives: layers split over ranks, and layers gathered from shards.

They are a few numbers wide, which leaves nothing to compute or send, and the same layers whole are taken off. What is
left is latency and, on a CPU, what dispatching, copying in and out, and waking each other takes. A host
that runs ahead of its device hides that, so it is measured on CPUs alone.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titan.doctor.clock import Clock, Time
from titan.doctor.links import Layout
from titan.doctor.report import Reading

SPLIT, GATHERED = "joins of split layers", "gathers of sharded layers"
JOINS = 4
"""Of a split half of a layer: its input is gathered and its output summed, and the same backwards."""

UNITS, COLLECTIVES = 4, 3
"""Sharded halves, and what each takes part in: gathered forward and backward, its gradient reduced."""

SLICE = 16


class _Half(nn.Module):
    """Half a layer: a norm, and products in and out, added to what came in."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SLICE)
        self.pair = _Pair(inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.pair(self.norm(x))
        return y


class _Pair(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(SLICE, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, SLICE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, more = (linear(x) for linear in self.into)
        y: Tensor = self.out(F.silu(gate) * up + more)
        return y


def slots(layout: Layout, device: torch.device) -> int:
    """How many readings `measure` takes."""
    return 4 if layout.per_node > 1 and device.type == "cpu" else 0


def measure(clock: Clock, layout: Layout) -> Iterator[Reading]:
    """What a collective that joins a split layer takes, and one of a sharded layer; all ranks call it."""
    if not slots(layout, clock.me.device):
        return
    mesh = init_device_mesh("cpu", (layout.nodes, layout.per_node), mesh_dim_names=("nodes", "node"))["node"]
    first = layout.names[clock.me.number // layout.per_node * layout.per_node]
    for kind, name, layers, parts in (
        (SPLIT, "a collective that joins a split layer", (_split(mesh), _Half(SLICE * mesh.size())), JOINS),
        (GATHERED, "a collective of a sharded layer", (_sharded(mesh), _halves()), UNITS * COLLECTIVES),
    ):
        pieces, whole = (_both_ways(clock, layer) for layer in layers)
        yield Reading(
            kind=kind, name=name, subject=f"the node of {first}",
            seconds=max(pieces.seconds - whole.seconds, 1e-9) / parts, spread=pieces.spread, work=1, unit="us",
            about={"ranks": mesh.size()},
        )  # fmt: skip


def _both_ways(clock: Clock, layer: nn.Module) -> Time:
    x = torch.ones(1, 1, SLICE, requires_grad=True)
    return clock.together(lambda: layer(x).sum().backward())


def _split(mesh: DeviceMesh) -> nn.Module:
    """Over slices of the sequence between its products, as tensor parallelism has it."""
    gathers = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False)
    styles = {
        "norm": SequenceParallel(use_local_output=True), "pair": gathers, "pair.into.*": ColwiseParallel(),
        "pair.out": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    return parallelize_module(_Half(SLICE * mesh.size()), mesh, styles)


def _halves() -> nn.Sequential:
    return nn.Sequential(*(_Half(SLICE) for _ in range(UNITS)))


def _sharded(mesh: DeviceMesh) -> nn.Module:
    halves = _halves()
    for module in (*halves, halves):
        fully_shard(module, mesh=mesh)
    return halves
