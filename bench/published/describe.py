"""Frameworks, devices and fabrics of published rows, from the TOML files of this folder."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from titan.planner.machine import cluster as clusters
from titan.planner.machine.cluster import Cluster, Link

from .rows import Row, Skip

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Behavior of a framework that affects time or memory; frameworks.toml explains the keys."""

    name: str
    match: str
    dated: str = ""
    source: str
    blocking_p2p: bool = False
    scatter_p2p: bool = False
    overlap_gradients: bool = True
    gather_prefetch: bool = False
    fused_qkv: bool = False
    split_gate: bool = False
    bias: bool = True
    dropout: bool = False
    flash: bool = True
    vocab_multiple: int = 1
    tied: bool = False
    compiled: bool = False
    update_bytes: float = 40.0
    accumulate: str = ""
    wide_gradients: str = ""
    early_stop: bool = False
    summed_whole: bool = False
    broadcasts: bool = False
    unaccounted: float = 0.0
    readied: tuple[float, float] = (4.0, 4.0)
    drops_narrow: bool = False
    casts: bool = False
    cut: str = "even"
    saves_narrow: bool = True
    saves_magnitudes: bool = False
    sends_narrow: bool = False
    cp_repeats_heads: bool = False
    offloaded: bool = False
    loss_chunks: int = 1
    recompute: str = "none"
    selective: str = "products"
    fused_loss: bool = False
    gate_kept: bool = False
    regathers: bool = False
    narrow_inputs: bool = False
    cudnn: bool = False
    tp_overlap: bool = False
    tp_overlap_backward: bool = False
    loss: tuple[float, float] = (6.0, 4.0)
    norm: tuple[float, float] = (2.0, 3.0)
    norms_again: bool = False
    loss_kept: tuple[float, float] = (2.0, 2.0)


@cache
def frameworks() -> tuple[Framework, ...]:
    """The frameworks of frameworks.toml, in order; the first match describes a row."""
    table = tomllib.loads((FOLDER / "frameworks.toml").read_text(encoding="utf-8"))["framework"]
    known = {field.name for field in fields(Framework)}
    for entry in table:
        if unknown := set(entry) - known:
            raise ValueError(f"frameworks.toml: {entry.get('name')}: unknown keys {sorted(unknown)}")
    return tuple(
        Framework(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for entry in table
    )


def framework_of(row: Mapping[str, Any]) -> Framework:
    """The framework of a row, by the name that the row gives, and its version by the row's source."""
    said = str(row.get("framework") or "")
    source = str(row.get("source") or "")
    found = next(entry for entry in frameworks() if re.search(entry.match, said) and re.search(entry.dated, source))
    return replace(
        found,
        compiled=found.compiled or "compile" in said,
        offloaded="offload" in said,
        tp_overlap=found.tp_overlap or "AsyncTP" in said,
    )


@cache
def _fabrics() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "fabrics.toml").read_text(encoding="utf-8"))


def device_of(row: Mapping[str, Any], framework: Framework) -> str:
    """Name of the cluster file of a row's device, with cuDNN attention if its framework uses that.

    Raises:
        Skip: there is no cluster file of the device.
    """
    said = str(row.get("gpu") or "")
    if not said:
        raise Skip("not stated: gpu")
    memory = row.get("gpu_mem_gb")
    for entry in _fabrics()["device"]:
        if re.search(entry["match"], said) and (
            not entry.get("memory_gb") or not memory or memory == entry["memory_gb"]
        ):
            return str(entry["cudnn"] if framework.cudnn and "cudnn" in entry else entry["cluster"])
    raise Skip(f"no cluster file for {said}")


def fabric_of(row: Mapping[str, Any], job: Row, device: str) -> tuple[str, float]:
    """(fabric between nodes, its bandwidth in GB/s per device) of a row."""
    said = str(row.get("interconnect") or "")
    kinds = _fabrics()["fabric"]
    date = re.search(r"date (\d\d-\d\d)", str(row.get("notes") or ""))
    fits = (e for e in kinds if re.search(e["match"], said) and ("until" not in e or (date and date[1] < e["until"])))
    kind = next(fits)
    gb_s = _fabrics()["usual_bandwidth_gb_s"].get(device.split("-")[0], 25.0)
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", said):
        gb_s = int(found[1]) * int(found[2]) / 8 / job.per_node
    elif found := re.search(r"(\d+) Omni-Path", said):
        gb_s = int(found[1]) * 100 / 8 / job.per_node
    elif found := re.search(r"(\d+)\s*Gbps node", said):
        gb_s = int(found[1]) / 8 / job.per_node
    elif found := re.search(r"(\d+)\s*Gb/s", said):
        gb_s = int(found[1]) / 8
    return str(kind["name"]), gb_s


def cluster_of(device: Cluster, fabric: Link, gb_s: float, per_node: int) -> Cluster:
    """The cluster of a device with `per_node` ranks per node and a fabric of `gb_s` GB/s per device between nodes."""
    return replace(device, links=(replace(device.links[0], ranks=per_node), replace(fabric, bandwidth_gb_s=gb_s)))


def file_of(name: str) -> Path:
    """Path of a device's cluster file: of this folder, else of configs/clusters."""
    own = FOLDER / "clusters" / f"{name}.toml"
    return own if own.is_file() else FOLDER.parents[1] / "configs" / "clusters" / f"{name}.toml"


def all_devices() -> dict[str, Cluster]:
    """All cluster files that rows can use, and those that repeat their constants, by name."""
    files = {entry[key] for entry in _fabrics()["device"] for key in ("cluster", "cudnn") if key in entry}
    return {name: _load(name) for name in sorted(files.union(_fabrics()["repeated"]))}


@cache
def _load(name: str) -> Cluster:
    return clusters.load(str(file_of(name)))


def reread() -> None:
    """Clear the caches of the files, so that they are read again."""
    _load.cache_clear()
    _fabrics.cache_clear()


def all_fabrics() -> dict[str, Link]:
    """All fabrics between nodes, by name, with a bandwidth of 1 GB/s."""
    keys = ("latency_us", "efficiency", "p2p_efficiency")
    return {
        entry["name"]: Link(name=entry["name"], bandwidth_gb_s=1.0, **{key: entry[key] for key in keys if key in entry})
        for entry in _fabrics()["fabric"]
    }
