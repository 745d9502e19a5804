"""`titan plan --study NAME`: predict a series of jobs, and compare them."""

import argparse
from typing import Any

from titan.config.tables import QUICKSTART
from titan.planner.machine import cluster
from titan.planner.report import fabric, plots, studies
from titan.planner.report.steps_ratios import steps_ratios
from titan.planner.report.study import Study


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The study, as JSON and as text."""
    where = cluster.load(args.cluster)
    if args.study == "fabric":
        ratios = steps_ratios(args.steps_ratio, args.steps_ratios, [path.stem for path in args.against])
        study: Study = fabric.run(
            args.config or QUICKSTART, args.against, ratios, args.overrides, where, args.world_size
        )
    else:
        study = studies.run(args.study, args.config, args.overrides, where, args.world_size)
    if args.plot is not None:
        plots.draw_study(study, args.plot)
    return study.as_json(), study.text()
