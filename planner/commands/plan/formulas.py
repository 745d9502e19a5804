"""`titan plan --formulas`: closed-form estimates of a model's parameters, memory and FLOPs."""

import argparse
from typing import Any

from titan.config import Job, load_job
from titan.planner.report import closed_form
from titan.planner.step.layout import costs_of


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report, as JSON and as text."""
    job: Job = load_job(args.config, args.overrides) if args.config else closed_form.alone(args.overrides)
    report = closed_form.report(
        job,
        tokens=args.tokens,
        devices=args.devices,
        peak_tflops=args.peak_tflops,
        utilisation=args.utilisation,
        held=costs_of(job).state,
    )
    return report, closed_form.text(report)
