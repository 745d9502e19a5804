"""Leave-one-source-out errors: each source predicted by a fit to the others, before and after one scale is fitted."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .fit import A100, CONSTANTS, INFINIBAND, Case, Constant, World, fit, fitted
from .report import UNEXPLAINED, figures

ROUNDS = 5
"""Iterations of a refit at most; it starts at the constants of the full fit."""

FEWEST = 5
"""Rows of grade A that a source must have to be left out."""


def left_out(cases: Sequence[Case], values: Mapping[Constant, float]) -> dict[str, dict[str, Any]]:
    """Leave-one-source-out errors, of each source with at least FEWEST rows of grade A.

    A constant that only the left-out rows determine takes the value of the A100, or of InfiniBand, from that fit.
    """
    chosen = fitted(cases)
    sources = {c.source: [k for k in chosen if k.source == c.source and k.grade == "A"] for c in chosen}
    return {
        source: _without([c for c in chosen if c.source != source], rows, values)
        for source, rows in sources.items()
        if len(rows) >= FEWEST
    }


def _without(others: Sequence[Case], rows: Sequence[Case], values: Mapping[Constant, float]) -> dict[str, Any]:
    found = fit(others, start=values, rounds=ROUNDS)
    borrowed = {c: value for c in CONSTANTS if c not in found and (value := _like(c, found)) is not None}
    world = World({**found, **borrowed})
    ratios = [world.seconds(case) / case.seconds for case in rows if case.seconds]
    explained = [ratio for ratio, case in zip(ratios, rows, strict=True) if case.id not in UNEXPLAINED]
    scale = statistics.median(ratios)
    return {
        **figures([ratio - 1 for ratio in ratios]),
        "explained": figures([ratio - 1 for ratio in explained]),
        "scale": scale,
        "scaled": figures([ratio / scale - 1 for ratio in ratios]),
        "borrowed": [c.name for c in borrowed],
    }


def _like(constant: Constant, found: Mapping[Constant, float]) -> float | None:
    """The fitted value of the most similar constant; None if there is none."""
    if constant.devices:
        key = constant.where.replace("products.bfloat16.", "products.").replace("products.float8.", "products.")
        return next((v for c, v in found.items() if c.devices == A100 and c.where == key), None)
    fabric, key = constant.where.split(".")[1:]
    alike = [v for c, v in found.items() if c.where.startswith("fabric.") and c.where.endswith("." + key)]
    usual = next((v for c, v in found.items() if c.where == f"fabric.{INFINIBAND}.{key}"), None)
    return usual if usual is not None and fabric != INFINIBAND else (alike[-1] if alike else None)
