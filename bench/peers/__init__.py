"""Whole training loops of titan and of other trainers, in turns: `python -m bench.peers`, and their processes."""

from collections.abc import Mapping
from statistics import median
from typing import Any

OURS, KERNEL = "titan", "titan, own kernel"
"""The second has `[plugins.attention]`, where the CPU has what the kernel needs."""

COMPILED = "bf16, compiled"
OF_PEERS, WITH_KERNEL, OF_BARE, OF_TORCHTITAN = 1.25, 1.9, 1.0, 1.05
"""Speeds to reach, relative to the best peer compiled, without and with the kernel; to a bare loop; and on two ranks to
torchtitan."""


def speeds(rows: Mapping[str, Any], whose: str = OURS) -> dict[str, float]:
    """Other trainer -> tokens/s of one of ours relative to it, by the medians of a case."""
    own = median(rows[whose]["seconds"])
    return {name: median(row["seconds"]) / own for name, row in rows.items() if name not in (OURS, KERNEL)}


def _least(others: Mapping[str, float]) -> float | None:
    """The speed over the best peer, of speeds over all others."""
    return min((speed for name, speed in others.items() if name != "bare"), default=None)


def figures(found: Mapping[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """(what, target, measured, whether it is met) of a result."""
    asked = []
    for case, rows in found["rows"].items():
        others = speeds(rows)
        own = speeds(rows, KERNEL) if KERNEL in rows else {}
        if case == COMPILED:
            asked.append((f"{case}: speed over a bare loop", OF_BARE, others.get("bare")))
            asked.append((f"{case}: speed over the best peer", OF_PEERS, _least(others)))
            asked.append((f"{case}: with titan's kernel, speed over the best peer", WITH_KERNEL, _least(own)))
            continue
        other, target = ("bare", OF_BARE) if "bare" in others else ("torchtitan", OF_TORCHTITAN)
        over = "a bare loop" if other == "bare" else other
        asked.append((f"{case}: speed over {over}", target, others.get(other)))
        asked.append((f"{case}: with titan's kernel, speed over {over}", target, own.get(other)))
    return [
        (
            what,
            f"at least {target}",
            "not here" if got is None else f"{got:.2f}",
            None if got is None else got >= target,
        )
        for what, target, got in asked
    ]
