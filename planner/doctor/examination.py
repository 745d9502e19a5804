"""Runs all measurements on all ranks and evaluates them on rank 0."""

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan.errors import ConfigError
from titan.planner.doctor import cluster_file, collective_overhead, device, links
from titan.planner.doctor.clock import Clock
from titan.planner.doctor.report import Finding, Row, outliers, rows
from titan.ranks.process import Rank


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All measurements of a `titan doctor` run.

    date: YYYY-MM-DD.  torch: version.  device: name.  ranks: name of each rank, in order.  per_node: ranks per node.
    findings: outliers.  cluster: tables of the cluster file.
    """

    date: str
    torch: str
    device: str
    ranks: Sequence[str]
    per_node: int
    rows: Sequence[Row]
    findings: Sequence[Finding]
    cluster: Mapping[str, Any]

    def json(self) -> dict[str, Any]:
        """The JSON object of `titan doctor --json`; each row has seconds per call and spread by subject."""
        return {
            "date": self.date,
            "torch": self.torch,
            "device": self.device,
            "ranks": list(self.ranks),
            "world_size": len(self.ranks),
            "ranks_per_node": self.per_node,
            "measured": [{**asdict(row), "median": row.shown(row.middle)} for row in self.rows],
            "outliers": [{**asdict(finding), "says": str(finding)} for finding in self.findings],
            "cluster": dict(self.cluster),
        }


def examine(me: Rank, seconds: float, disk: Path | None) -> Examination | None:
    """Measure all ranks; all ranks call it. Returns the examination on rank 0, None on the others.

    seconds: approximate duration of all measurements.  disk: folder in which to measure writes; None: not measured.

    Raises:
        ConfigError: the nodes have different numbers of ranks.
        OSError: the disk cannot be written to.
    """
    layout = _layout(me)
    slots = device.slots(me.device) + (disk is not None)
    slots += links.slots(layout, me.device) + collective_overhead.slots(layout, me.device)
    clock = Clock(me, seconds / slots)
    taken = device.measure(clock, layout.names[me.number], disk)
    if me.world_size > 1:
        taken += [*links.measure(clock, layout), *collective_overhead.measure(clock, layout)]
    readings = _of_all(taken)
    if me.number:
        return None
    measured = rows(reading for of_rank in readings for reading in of_rank)
    n = layout.world_size
    pairs = {layout.pair(a, b): (layout.names[a], layout.names[b]) for a in range(n) for b in range(a + 1, n)}
    name = _device_name(me.device)
    return Examination(
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        device=name,
        ranks=layout.names,
        per_node=layout.per_node,
        rows=measured,
        findings=outliers(measured, pairs),
        cluster=cluster_file.table(measured, layout, me.device, name, _source(layout)),
    )


def _layout(me: Rank) -> links.Layout:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", me.world_size))
    if me.world_size % per_node:
        what = f"{me.world_size} ranks with {per_node} ranks per node: start the same number of ranks on every node"
        raise ConfigError(what, "environment")
    names = _of_all(f"rank {me.number} ({socket.gethostname()} {me.device})")
    return links.Layout(me.world_size, per_node, names)


def _of_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _source(layout: links.Layout) -> str:
    where = f"{socket.gethostname()}, ranks: {layout.world_size}, nodes: {layout.nodes}"
    return f"titan doctor, {time.strftime('%Y-%m-%d')}, {where}, torch {torch.__version__}"
