"""Predictions and searches in words and tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan.planner.machine.cluster import Cluster
from titan.planner.search.best_first import Found, Result
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Prediction

NAMES = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "computed again",
    "tp": "tensor parallelism (tp)",
    "cp": "context parallelism (cp)",
    "ep": "expert parallelism (ep)",
    "dp": "data parallelism (dp)",
    "pp": "between stages (pp)",
    "bubble": "bubble",
    "optimizer": "optimizer",
}


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table whose first `left` columns stand left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def prediction_text(prediction: Prediction, cluster: Cluster, layout: str, budget: Mapping[str, Any] | None) -> str:
    """A prediction: speed, what the step is spent on, memory of each place of the pipeline."""
    p = prediction
    head = [
        f"{layout}: {p.world_size:,} x {cluster.device.name} ({cluster.name})",
        "",
        f"step {seconds(p.step_time_s)}, {p.tokens_per_s:,.0f} tokens/s, {p.tokens_per_s / p.world_size:,.0f} a device",
        f"model {p.model_tflops_per_device:.1f} TFLOP/s a device (MFU {p.mfu:.1%}), hardware "
        f"{p.hardware_tflops_per_device:.1f} (HFU {p.hfu:.1%}), bubble {p.bubble_fraction:.1%}",
    ]
    return "\n".join([*head, *_budget(budget), "", *_spent(p), "", *_memory(p, cluster)])


def seconds(value: float) -> str:
    """`1.234 s`, `56.7 ms`."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _budget(budget: Mapping[str, Any] | None) -> list[str]:
    if budget is None:
        return []
    said = f"{budget['tokens']:.3g} tokens: {budget['days']:.1f} days, {budget['device_hours']:,.0f} device hours"
    said += f", {budget['energy_mwh']:,.4g} MWh" if budget["energy_mwh"] else ""
    return [said + (f", price {budget['price']:,.0f}" if budget["price"] else "")]


def _spent(p: Prediction) -> list[str]:
    rows = [["the last rank's step", "seconds", "share", "hidden"]]
    for key, name in NAMES.items():
        value, hidden = p.time_s[key], p.overlapped_s.get(key, 0.0)
        if value or hidden:
            share = f"{value / p.step_time_s:.1%}"
            rows.append([name, f"{value:.4f}", share, f"{hidden:.4f}" if hidden else ""])
    return columns([*rows, ["in all", f"{p.step_time_s:.4f}", "", ""]])


def _memory(p: Prediction, cluster: Cluster) -> list[str]:
    names = [name for name in p.memory[0].gib() if name != "total"]
    rows = [["GiB a rank", *names, "total", "layers"]]
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
        rows.append([name, *(f"{gib[component]:.2f}" for component in names), f"{gib['total']:.2f}", layers])
    room, most = cluster.device.memory_gib, max(m.total for m in p.memory) / GIB
    verdict = f"fits into {room:g} GiB" if p.fits else f"does NOT fit: {most:.1f} GiB of {room:g}"
    return [*columns(rows), verdict]


def search_text(result: Result, cluster: Cluster, ranks: int) -> str:
    """The best layouts, and how the others were ruled out."""
    looked = result.refused + result.slower + result.too_large + result.simulated
    counts = (
        f"{result.layouts:,} combinations of degrees and micro batch on {ranks:,} x {cluster.device.name}: "
        f"{result.by_bound:,} ruled out by what they take at least; in the others {looked:,} layouts: "
        f"{result.refused:,} cannot work, {result.too_large:,} do not fit, {result.slower:,} cannot be among the best, "
        f"{result.simulated:,} simulated"
    )
    if not result.best:
        return counts + "\n\n" + nothing_fits(result, cluster)
    rows = [["", "step", "MFU", "GiB", "bubble", "layout"]]
    for number, found in enumerate(result.best, 1):
        p = found.prediction
        most = max(m.total for m in p.memory) / GIB
        rows.append([f"{number}", seconds(p.step_time_s), f"{p.mfu:.1%}", f"{most:.1f}", f"{p.bubble_fraction:.1%}",
                     str(found.choice)])  # fmt: skip
    lines = [line.rstrip() for line in columns([[*row[:-1], row[-1].ljust(1)] for row in rows])]
    return "\n".join([counts, "", *lines])


def left_out_text(names: Sequence[str]) -> str:
    """Which techniques a search has left out, and how to have them in it."""
    asked = ", ".join(f"--plugins.{name}.enabled true" for name in names)
    return f"left out, as they change the curve: {', '.join(names)}; to search with them: {asked}"


def nothing_fits(result: Result, cluster: Cluster) -> str:
    """Why a search found nothing."""
    if result.tightest is None:
        return "no layout can work: the global batch divides over none, or plugins refuse all of them"
    most, choice = result.tightest
    return f"none fits into {cluster.device.memory_gib:g} GiB; the smallest takes {most / GIB:.1f} GiB: {choice}"


def explained(best: Sequence[Found]) -> str:
    """What the first of several layouts is good at, and what each of the others loses to it."""
    first = best[0].prediction
    largest = sorted(first.time_s, key=lambda key: -first.time_s[key])[:3]
    lines = [
        "the best spends " + ", ".join(f"{first.time_s[k] / first.step_time_s:.0%} on {NAMES[k]}" for k in largest)
    ]
    for number, found in enumerate(best[1:], 2):
        p = found.prediction
        lost = p.step_time_s - first.step_time_s
        deltas = {key: p.time_s[key] - first.time_s[key] for key in p.time_s}
        lines.append(f"{number}: {lost / first.step_time_s:+.1%}: {_deltas(deltas, first.step_time_s)}")
    return "\n".join(lines)


def _deltas(deltas: Mapping[str, float], step: float) -> str:
    told = [key for key in sorted(deltas, key=lambda key: -abs(deltas[key])) if abs(deltas[key]) > 0.0005 * step]
    words: Iterable[str] = (f"{NAMES[key]} {deltas[key] / step:+.1%}" for key in told[:4])
    return ", ".join(words) or "the same within 0.05 %"
