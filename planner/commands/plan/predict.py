"""`titan plan`: predict one job on a cluster, as a report, plots and a picture of its layout."""

import argparse
from typing import Any

from titan.config.groups import listed
from titan.errors import ConfigError
from titan.planner.commands.plan.job import load_settled
from titan.planner.machine import cluster
from titan.planner.report import render
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner, Prediction


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report, as JSON and as text."""
    where = cluster.load(args.cluster)
    job, chosen = load_settled(args, where.memory)
    prediction = Planner(where).predict(costs_of(job), job.layout, keep=args.plot is not None)
    budget = _budget(prediction, args.tokens)
    if args.plot is not None:
        from titan.planner.report import plots

        plots.draw_prediction(prediction, where, args.plot)
    if args.draw is not None:
        from titan.planner.picture.draw import draw_layout

        draw_layout(job, where, args.draw)
    report = prediction.as_json() | {"cluster": where.name} | ({"budget": budget} if budget else {})
    text = render.prediction_text(prediction, where, str(job.layout), budget)
    lines = [*render.active_text(job.spec), text, *listed(job.optimizer), *chosen]
    return report | {"unset_options": chosen}, "\n".join(lines)


def _budget(prediction: Prediction, tokens: float | None) -> dict[str, float] | None:
    """Totals for a number of training tokens; the price is in the currency of the cluster file."""
    if tokens is None:
        return None
    if not tokens > 0:
        raise ConfigError(f"--tokens {tokens:g}: must be above 0", "command line")
    steps = tokens / prediction.tokens
    hours = steps * prediction.step_time_s / 3600
    return {
        "tokens": tokens,
        "days": hours / 24,
        "device_hours": hours * prediction.world_size,
        "energy_mwh": steps * prediction.energy_j / 3.6e9,
        "price": steps * prediction.price,
    }
