"""Overhead per collective of tensor parallelism and of FSDP, beyond the transfer itself.

The layers are only SLICE wide, so compute and transfer take no time. The time of the same layers on one rank is
subtracted. The rest is latency and, on a CPU, dispatch, copies, and waking the other ranks. A host that runs ahead of
its device hides this overhead, so it is measured on CPUs only.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan.contracts.base.sharding import Slices, gathered, summed
from titan.planner.doctor.clock import Clock, Time
from titan.planner.doctor.links import Layout
from titan.planner.doctor.report import Reading

SPLIT, GATHERED = "TP collective overhead", "FSDP collective overhead"
JOINS = 4
"""Collectives of half a layer with tensor parallelism: input gathered, output reduced; the same in backward."""

UNITS, COLLECTIVES = 4, 3
"""FSDP units, and collectives per unit: all-gather in forward and backward, reduce-scatter of its gradient."""

SLICE = 16


class _Half(nn.Module):
    """Half a layer: norm, matrix products in and out, residual.

    slices: the ranks over which its linears and the sequence are split; None: on one rank.
    """

    def __init__(self, slices: Slices | None = None) -> None:
        super().__init__()
        self.slices = slices
        self.norm = nn.RMSNorm(SLICE)
        self.into = nn.ModuleList(nn.Linear(SLICE, SLICE, bias=False) for _ in range(3))
        self.out = nn.Linear(SLICE, SLICE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        whole = normed if self.slices is None else gathered(normed, self.slices)
        gate, up, more = (linear(whole) for linear in self.into)
        out: Tensor = self.out(F.silu(gate) * up + more)
        return x + (out if self.slices is None else summed(out, self.slices))


def slots(layout: Layout, device: torch.device) -> int:
    """Number of measurements that `measure` takes, for sharing out the time."""
    return 4 if layout.per_node > 1 and device.type == "cpu" else 0


def measure(clock: Clock, layout: Layout) -> Iterator[Reading]:
    """Yield the overhead in seconds per TP collective and per FSDP collective; all ranks call it."""
    if not slots(layout, clock.me.device):
        return
    mesh = init_device_mesh("cpu", (layout.nodes, layout.per_node), mesh_dim_names=("nodes", "node"))["node"]
    first = layout.names[clock.me.number // layout.per_node * layout.per_node]
    slices = Slices(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), positions=True)
    for kind, name, layers, parts in (
        (SPLIT, "overhead per TP collective", (_Half(slices), _Half()), JOINS),
        (GATHERED, "overhead per FSDP collective", (_sharded(mesh), _halves()), UNITS * COLLECTIVES),
    ):
        pieces, whole = (_both_ways(clock, layer) for layer in layers)
        yield Reading(
            kind=kind,
            name=name,
            subject=f"the node of {first}",
            seconds=max(pieces.seconds - whole.seconds, 1e-9) / parts,
            spread=pieces.spread,
            work=1,
            unit="us",
            about={"ranks": mesh.size()},
        )


def _both_ways(clock: Clock, layer: nn.Module) -> Time:
    x = torch.ones(1, 1, SLICE, requires_grad=True)
    return clock.together(lambda: layer(x).sum().backward())


def _halves() -> nn.Sequential:
    return nn.Sequential(*(_Half() for _ in range(UNITS)))


def _sharded(mesh: DeviceMesh) -> nn.Module:
    halves = _halves()
    for module in (*halves, halves):
        fully_shard(module, mesh=mesh)
    return halves
