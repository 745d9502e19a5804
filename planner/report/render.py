"""Text of predictions and searches: what `titan plan` prints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan.contracts.base.spec import ModelSpec
from titan.planner.machine.cluster import MEMORY_LIMIT, Cluster
from titan.planner.machine.host import short_of
from titan.planner.search.best_first import Found, Result
from titan.planner.search.space import Space
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Prediction

NAMES = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "data-parallel communication",
    "worker": "exchange between workers",
    "pp": "pipeline communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
}
"""Printed names of the parts of a step (`Prediction.time_s`)."""


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def prediction_text(prediction: Prediction, cluster: Cluster, layout: str, budget: Mapping[str, Any] | None) -> str:
    """A prediction as text: throughput, step time by component, memory per rank of each pipeline stage.

    layout: in words.  budget: totals for a number of tokens (`titan plan --tokens`), or None.
    """
    p = prediction
    head = [
        f"{layout}: {p.world_size:,} x {cluster.device.name} ({cluster.name})",
        "",
        f"step time {seconds(p.step_time_s)}, {p.tokens_per_s:,.0f} tokens/s, "
        f"{p.tokens_per_s / p.world_size:,.0f} tokens/s per device",
        f"TFLOP/s per device: model {p.model_tflops_per_device:.1f} (MFU {p.mfu:.1%}), hardware "
        f"{p.hardware_tflops_per_device:.1f} (HFU {p.hfu:.1%}); pipeline bubble {p.bubble_fraction:.1%}",
    ]
    return "\n".join([*head, *_budget(budget), "", *_spent(p), "", *_memory(p, cluster)])


def active_text(spec: ModelSpec) -> list[str]:
    """A line with the active and all parameters of a model: "12.9 B active of 46.7 B"; none where all are active."""
    active, whole = spec.active_params, spec.params
    return [f"parameters: {active / 1e9:.3g} B active of {whole / 1e9:.3g} B"] if active < whole else []


def seconds(value: float) -> str:
    """Seconds as text with a unit: `1.234 s`, `56.7 ms`."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _budget(budget: Mapping[str, Any] | None) -> list[str]:
    if budget is None:
        return []
    said = f"{budget['tokens']:.3g} tokens: {budget['days']:.1f} days, {budget['device_hours']:,.0f} device hours"
    said += f", {budget['energy_mwh']:,.4g} MWh" if budget["energy_mwh"] else ""
    return [said + (f", price {budget['price']:,.0f}" if budget["price"] else "")]


def _spent(p: Prediction) -> list[str]:
    rows = [["rank that finishes last", "non-overlapped, s", "share", "overlapped, s"]]
    for key, name in NAMES.items():
        value, overlapped = p.time_s[key], p.overlapped_s.get(key, 0.0)
        if value or overlapped:
            share = f"{value / p.step_time_s:.1%}"
            rows.append([name, f"{value:.4f}", share, f"{overlapped:.4f}" if overlapped else ""])
    return [line.rstrip() for line in columns([*rows, ["step time", f"{p.step_time_s:.4f}", "", ""]])]


def _memory(p: Prediction, cluster: Cluster) -> list[str]:
    names = [name for name in max((memory.gib() for memory in p.memory), key=len) if name != "total"]
    rows = [["GiB per rank", *names, "total", "layers"]]
    alike: list[tuple[int, int]] = []
    for place, memory in enumerate(p.memory):
        if alike and memory == p.memory[alike[-1][0]] and len(p.layers[place]) == len(p.layers[alike[-1][0]]):
            alike[-1] = (alike[-1][0], place)
        else:
            alike.append((place, place))
    for first, last in alike:
        gib = p.memory[first].gib()
        layers = "+".join(f"{held.start}-{held.stop - 1}" for held in p.layers[first]) if first == last else ""
        name = f"stage {first}" if first == last else f"stages {first}-{last}"
        rows.append([name, *(f"{gib.get(component, 0.0):.2f}" for component in names), f"{gib['total']:.2f}", layers])
    fullest = max(p.memory, key=lambda memory: memory.total)
    tensors = (
        f"of it {fullest.allocated / GIB:.1f} GiB allocated to tensors and {fullest.reserved / GIB:.1f} GiB reserved"
    )
    peak = f"peak {p.peak_gib:.1f} GiB of {cluster.device.memory_gib:g} GiB"
    short = short_of(cluster.memory, [memory.host for memory in p.memory], p.world_size)
    said = [f"fits: {peak}" if p.fits else "; ".join([f"does NOT fit: {peak}", *([short] if short else [])])]
    if p.fits and p.peak_gib > cluster.memory.limit_gib:
        said.append(
            f"warning: less than {100 * (1 - MEMORY_LIMIT):.0f} % of the memory is free, and predictions are off by "
            f"several percent; --search proposes layouts of at most {cluster.memory.limit_gib:.4g} GiB"
        )
    return [*columns(rows), said[0], tensors, *said[1:]]


def search_text(result: Result, cluster: Cluster, ranks: int) -> str:
    """A search as text: how many layouts were pruned and why, then a table of the best, best first."""
    looked = result.refused + result.slower + result.too_large + result.simulated
    counts = (
        f"{result.layouts:,} combinations of degrees and micro batch on {ranks:,} x {cluster.device.name}, "
        f"{result.by_bound:,} pruned by lower bound.\n"
        f"The others hold {looked:,} layouts: {result.refused:,} invalid, {result.too_large:,} too large, "
        f"{result.slower:,} pruned by lower bound, {result.simulated:,} simulated."
    )
    if result.too_large:
        counts += f"\nToo large: a predicted peak above {cluster.memory.limit_text()}"
        counts += f", or too much in the host's memory, as {result.host_short}." if result.host_short else "."
    rows, layouts = [["", "step time", "MFU", "peak memory, GiB", "bubble"]], ["layout"]
    for number, found in enumerate(result.best, 1):
        p = found.prediction
        shares = f"{p.mfu:.1%}", f"{p.peak_gib:.1f}", f"{p.bubble_fraction:.1%}"
        rows.append([f"{number}", seconds(p.step_time_s), *shares])
        layouts.append(str(found.choice))
    lines = [f"{line}  {layout}" for line, layout in zip(columns(rows), layouts, strict=True)]
    return "\n".join([counts, "", *lines])


def left_out_text(left_out: Mapping[str, str]) -> str:
    """The techniques that a search skips because they change the loss curve, and the options that include them."""
    asked = ", ".join(left_out.values())
    return f"not searched, because they change the loss curve: {', '.join(left_out)}; include them with {asked}"


def nothing_found(result: Result, cluster: Cluster, space: Space) -> str:
    """The reason why a search found no layout: how many were looked at, and what each of them lacks."""
    if not result.layouts:
        return f"no valid layout: {_no_combination(space)}"
    looked = f"{result.refused + result.too_large:,} layouts looked at"
    if result.host_short:
        counted = f"{looked}, {result.refused:,} invalid, {result.too_large:,} too large"
        return f"no layout fits into the memory of devices and host: {counted}; {result.host_short}"
    if result.tightest is None:
        return f"no valid layout: {looked}, all of them invalid, the first because: {result.refusal}"
    most, choice = result.tightest
    return (
        f"no layout fits into {cluster.memory.limit_text()}: "
        f"{looked}, {result.refused:,} invalid, {result.too_large:,} too large; "
        f"the smallest needs at least {most / GIB:.3g} GiB per rank: {choice}"
    )


def _no_combination(space: Space) -> str:
    """The reason why no degrees and micro batch of a space belong together."""
    splits = sum(1 for _ in space.layouts())
    if not splits:
        fixed = ", ".join(f"mesh.{axis} = {degree}" for axis, degree in space.degrees.items() if degree != -1)
        return f"{space.ranks:,} ranks cannot be split with {fixed}; change these degrees or --world-size"
    sizes = {"global_batch_size": space.job.train.global_batch_size}
    if "train.micro_batch_size" in space.fixed and space.job.train.micro_batch_size:
        sizes["micro_batch_size"] = space.job.train.micro_batch_size
    divided = " and ".join(f"train.{key} = {value:,}" for key, value in sizes.items())
    return (
        f"{splits:,} splits of {space.ranks:,} ranks over the mesh axes looked at, and none agrees with {divided}; "
        f"global_batch_size must be a multiple of data-parallel ranks x micro_batch_size"
    )


def explained(best: Sequence[Found]) -> str:
    """The largest parts of the best layout's step, and the differences of the other layouts from it.

    best: layouts, best first. All percentages are relative to the best layout's step time.
    """
    first = best[0].prediction
    largest = sorted(first.time_s, key=lambda key: -first.time_s[key])[:3]
    lines = [
        "layout 1 spends " + ", ".join(f"{first.time_s[k] / first.step_time_s:.0%} on {NAMES[k]}" for k in largest)
    ]
    for number, found in enumerate(best[1:], 2):
        p = found.prediction
        lost = p.step_time_s - first.step_time_s
        deltas = {key: p.time_s[key] - first.time_s[key] for key in p.time_s}
        slower = f"{lost / first.step_time_s:+.1%} step time"
        lines.append(f"layout {number}: {slower}: {_deltas(deltas, first.step_time_s)}")
    return "\n".join(lines)


def _deltas(deltas: Mapping[str, float], step: float) -> str:
    told = [key for key in sorted(deltas, key=lambda key: -abs(deltas[key])) if abs(deltas[key]) > 0.0005 * step]
    words: Iterable[str] = (f"{NAMES[key]} {deltas[key] / step:+.1%}" for key in told[:4])
    return ", ".join(words) or "the same within 0.05 %"
