"""Text of a dry run: what `titan plan --dry-run` prints."""

from collections import defaultdict

from titan.planner.dryrun.result import COMPONENTS, DryRun

_BARS = 24
"""Printed lines of the timeline."""


def report(run: DryRun) -> str:
    """A dry run as text: memory by component, top allocations at the peak, timeline, collectives, FLOPs, notes."""
    stages = ", ".join(str(stage) for stage in run.stages)
    head = (
        f"rank {run.rank} of {run.world_size}, stage {stages}: {run.parameters:,} parameters on this rank; "
        f"peak memory {_size(run.peak_bytes)}, in {_peak(run)}"
    )
    sections = (_memory, _top_allocations, _timeline, _collectives, _flops)
    blocks = [[head], *(lines_of(run) for lines_of in sections), list(run.notes)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


def _peak(run: DryRun) -> str:
    batch = f" of micro batch {run.peak.micro_batch}" if run.peak.micro_batch >= 0 else ""
    return f"{run.peak.phase}{batch}" + (f", {run.peak.module}" if run.peak.module else "")


def _memory(run: DryRun) -> list[str]:
    lines = [f"{'':14}{'at total peak':>14}{'own peak':>14}{'between steps':>15}"]
    for name in COMPONENTS:
        sizes = run.at_peak[name], run.peak_by_component[name], run.steady[name]
        lines.append(f"{name:14}{_size(sizes[0]):>14}{_size(sizes[1]):>14}{_size(sizes[2]):>15}")
    lines.append(f"{'total':14}{_size(run.peak_bytes):>14}{'':14}{_size(run.steady_bytes):>15}")
    return [*lines, *([f"in the host's memory besides: {_size(run.host_bytes)}"] if run.host_bytes else [])]


def _top_allocations(run: DryRun) -> list[str]:
    lines = ["top allocations at the peak (size, count x [shape] dtype, component: operation module):"]
    for c in run.top_allocations[:12]:
        shape = " x ".join(str(n) for n in c.shape)
        line = f"  {_size(c.bytes):>10}  {c.count:>4} x [{shape}] {c.dtype}, {c.component}: {c.op} {c.module}"
        lines.append(line.rstrip())
    return lines


def _timeline(run: DryRun) -> list[str]:
    step = -(-len(run.timeline) // _BARS)
    points = [max(run.timeline[i : i + step], key=lambda p: p.bytes) for i in range(0, len(run.timeline), step)]
    return [
        "memory over the step (peak of each interval):",
        *(f"  {'#' * round(40 * p.bytes / run.peak_bytes):40} {_size(p.bytes):>10}  {p.label}" for p in points),
    ]


def _collectives(run: DryRun) -> list[str]:
    sums: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for c in run.collectives:
        pair = sums[c.kind, c.axes, c.group_size]
        pair[0] += c.count
        pair[1] += c.count * c.bytes
    return [
        *(["collectives per step (bytes of whole tensors):"] if sums else []),
        *(
            f"  {kind} over {axes} ({size} ranks): {count} calls, {_size(moved)}"
            for (kind, axes, size), (count, moved) in sums.items()
        ),
        *([f"  bytes that this rank sends: {_size(run.bytes_sent)}"] if sums else []),
    ]


def _flops(run: DryRun) -> list[str]:
    total = run.total_flops
    words = f"forward {total.forward:.4g}, backward {total.backward:.4g}"
    words += f", recomputation and attention scores again {total.recompute:.4g}"
    return [f"FLOPs per step on this rank: {total.total:.4g} ({words})"]
