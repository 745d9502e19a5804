"""Builds a cluster file from measurements: the median rank, and linear fits over message sizes."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from titan.contracts.base.collectives import PASSES, sent_bytes
from titan.planner.doctor.collective_overhead import GATHERED, SPLIT
from titan.planner.doctor.device import FROM_HOST, LAUNCH, PRODUCTS
from titan.planner.doctor.links import Layout
from titan.planner.doctor.report import Row, line
from titan.ranks.meeting.launch_env import cores
from titan.training.metrics import peak_tflops

NORMS_AND_ACTIVATIONS = ("norm", "activation")


def table(rows: Sequence[Row], layout: Layout, device: torch.device, name: str, source: str) -> dict[str, Any]:
    """The cluster file as nested tables.

    rows: all measurements.  layout: ranks and nodes measured.  name: of the device.  source: note for the file. The
    peak of a dtype is the vendor's, or else the best rate measured; efficiencies are fractions of that peak.
    """
    dtypes = dict.fromkeys(row.about["dtype"] for row in rows if row.kind.startswith(PRODUCTS))
    points = {dtype: _points(rows, dtype) for dtype in dtypes}
    peaks = {dtype: _peak(device, dtype, max(rate for _, rate in curve)) for dtype, curve in points.items()}
    kinds = {row.kind: row for row in rows}
    large = max(row.shown(row.middle) for row in rows if row.kind == "memory")
    forward, both = (row for row in rows if row.kind == "attention")
    peak = peaks[forward.about["dtype"]] * 1e12
    backward = (both.work - forward.work) / max(both.middle - forward.middle, 1e-9)
    layer = [row for row in rows if row.kind in NORMS_AND_ACTIVATIONS]
    kept = sum(row.work for row in layer) / sum(row.middle for row in layer) / 1e9 / large
    return {
        "name": f"{name}, ranks: {layout.world_size}",
        "source": source,
        "device": {
            "name": name,
            "bandwidth_gb_s": _digits(large),
            **_about(device, layout),
            **_of_host(kinds),
            "peak_tflops": {dtype: _digits(peak) for dtype, peak in peaks.items()},
        },
        "kernels": {
            "attention_forward": _digits(forward.work / forward.middle / peak),
            "attention_backward": _digits(backward / peak),
            "bandwidth_efficiency": _digits(kept),
            "update_bandwidth_efficiency": 1.0,
            "tp_overhead_us": _digits(_join(rows, SPLIT) * 1e6),
            "fsdp_overhead_us": _digits(_join(rows, GATHERED) * 1e6),
            # On a CPU the cores that compute also send.
            "overlap_slowdown": 0.0 if device.type == "cuda" else 1.0,
            "launch_us": _digits(kinds[LAUNCH].middle * 1e6),
            "fused_norms": device.type != "cpu",
            "matmul": {
                dtype: {
                    "efficiency": _digits(max(rate for _, rate in curve) / peaks[dtype]),
                    "points": [f"{flops:.4g} {rate:.4g}" for flops, rate in curve],
                }
                for dtype, curve in points.items()
            },
        },
        "links": list(_links(rows, layout)),
    }


def _join(rows: Sequence[Row], kind: str) -> float:
    """Seconds of a TP or FSDP collective beyond the latency of its messages."""
    for row in (row for row in rows if row.kind == kind):
        group = "a node" if any(r.about.get("group") == "a node" for r in rows) else "all ranks"
        latency = float(_link(rows, group, "in a node")["latency_us"]) * 1e-6
        return max(0.0, row.middle - latency * math.log2(row.about["ranks"]))
    return 0.0


def _points(rows: Iterable[Row], dtype: str) -> list[tuple[float, float]]:
    """(FLOPs of one product, TFLOP/s)."""
    return [
        (2.0 * row.about["rows"] * row.about["features"] ** 2, row.shown(row.middle))
        for row in rows
        if row.kind == PRODUCTS + dtype
    ]


def _peak(device: torch.device, dtype: str, measured: float) -> float:
    stated = peak_tflops(device) if dtype in ("bfloat16", "float16") else None
    return max(stated or 0.0, measured)


def _about(device: torch.device, layout: Layout) -> Mapping[str, Any]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"memory_gib": _digits(found.total_memory / 2**30), "compute_units": found.multi_processor_count}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"memory_gib": _digits(memory / layout.per_node), "stream_pools": False, "full_speed_ranks": cores()}


def _of_host(kinds: Mapping[str, Row]) -> Mapping[str, float]:
    """The rate of copies from the host, which all ranks made at once; nothing on a CPU, which makes none."""
    row = kinds.get(FROM_HOST)
    return {} if row is None else {"host_gb_s": _digits(row.shown(row.middle))}


def _links(rows: Sequence[Row], layout: Layout) -> Iterable[dict[str, Any]]:
    """The link within a node, if a node has several ranks, and the link between nodes, if there are several."""
    if layout.per_node > 1:
        several = layout.nodes > 1
        inner = "a node" if several else "all ranks"
        yield {"name": "within a node", "ranks": layout.per_node if several else 0, **_link(rows, inner, "in a node")}
    if layout.nodes > 1:
        outer = "across nodes" if layout.per_node > 1 else "all ranks"
        yield {"name": "between nodes", "ranks": 0, **_link(rows, outer, "across nodes")}


def _link(rows: Sequence[Row], group: str, pairs: str) -> dict[str, Any]:
    collectives, messages = [], []
    for row in (row for row in rows if row.about.get("group") in (group, pairs)):
        kind, ranks, size = row.about["collective"], row.about["ranks"], row.about["bytes"]
        if kind == "send":
            messages.append((1.0, size, row.middle))
        else:
            collectives.append((PASSES[kind] * math.log2(ranks), sent_bytes(kind, size, ranks), row.middle))
    latency, collective = _line(collectives)
    _, message = _line(messages)
    best = max(collective, message)
    return {
        "bandwidth_gb_s": _digits(best),
        "latency_us": _digits(latency * 1e6),
        "efficiency": _digits(collective / best),
        "p2p_efficiency": _digits(message / best),
    }


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(seconds of latency, GB/s); where latency hides the bandwidth, the largest rate measured."""
    latency, per_byte = line(points)
    return latency, (1 / per_byte if per_byte else max(bytes_ / seconds for _, bytes_, seconds in points)) / 1e9


def _digits(value: float) -> float:
    """A value rounded to four significant digits."""
    return float(f"{value:.4g}")
