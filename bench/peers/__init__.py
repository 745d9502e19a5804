"""Whole training loops of titan and of other trainers, in turns: `python -m bench.peers`, and their processes."""

from collections.abc import Mapping
from statistics import median
from typing import Any

OURS, KERNEL = "titan", "titan, own kernel"
"""The second has `[plugins.attention]`, on CPUs with AVX-512 BF16."""

COMPILED = "bf16, compiled"
OF_PEERS, WITH_KERNEL, OF_BARE, OF_TORCHTITAN = 1.25, 1.9, 1.0, 1.05
"""Speeds to reach, relative to the best peer compiled, without and with the kernel; to a bare loop; and on two ranks to
torchtitan."""


def speeds(rows: Mapping[str, Any], whose: str = OURS) -> dict[str, float]:
    """Other trainer -> tokens/s of one of ours relative to it, by the medians of a case."""
    own = median(rows[whose]["seconds"])
    return {name: median(row["seconds"]) / own for name, row in rows.items() if name not in (OURS, KERNEL)}


def figures(found: Mapping[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """(what, target, measured, whether it is met) of a result."""
    asked = []
    for case, rows in found["rows"].items():
        others = speeds(rows)
        peers = {name: speed for name, speed in others.items() if name != "bare"}
        if "bare" in others:
            asked.append((f"{case}: speed over a bare loop", OF_BARE, others["bare"]))
        if case == COMPILED:
            asked.append((f"{case}: speed over the best peer", OF_PEERS, min(peers.values(), default=None)))
            own = speeds(rows, KERNEL) if KERNEL in rows else {}
            best = min((speed for name, speed in own.items() if name != "bare"), default=None)
            asked.append((f"{case}: the same with titan's kernel", WITH_KERNEL, best))
        elif "bare" not in others:
            asked.append((f"{case}: speed over torchtitan", OF_TORCHTITAN, peers.get("torchtitan")))
    return [
        (
            what,
            f"at least {target}",
            "not here" if got is None else f"{got:.2f}",
            None if got is None else got >= target,
        )
        for what, target, got in asked
    ]
