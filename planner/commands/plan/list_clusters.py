"""`titan plan --list-clusters`: the built-in clusters."""

import argparse
from typing import Any

from titan.planner.machine import cluster
from titan.planner.report import render


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The clusters, as JSON and as text."""
    found = {name: cluster.load(name) for name in cluster.names()}
    rows = [[name, c.device.name, f"{c.device.memory_gib:g} GiB", c.name] for name, c in found.items()]
    return {"clusters": {name: vars(c.device) for name, c in found.items()}}, "\n".join(render.columns(rows, left=4))
