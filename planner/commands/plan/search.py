"""`titan plan --search`: the best layouts of a job on a number of ranks."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from titan.config import load_job
from titan.errors import ConfigError
from titan.planner.machine import cluster
from titan.planner.report import render
from titan.planner.report.export_toml import text_to_replace, write_layout, write_toml
from titan.planner.search import best_first
from titan.planner.search.best_first import Result
from titan.planner.search.space import Base, Space, load_base
from titan.planner.step.predict import Planner
from titan.ranks.meeting.launch_env import cores

MOST_WORKERS = 4
"""Processes of a search. More would find the same layouts, but each prunes less."""


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The best layouts, as JSON and as text; the best one is written where asked."""
    text_before = _text_to_replace(args.config) if args.in_place else ""
    where, base = cluster.load(args.cluster), load_base(args.config, args.overrides)
    ranks = args.world_size or load_job(args.config, args.overrides).layout.world_size
    space, planner = base.space(ranks, where.ranks_per_node), Planner(where)
    result = _search(args, base, space, planner)
    if not result.best:
        raise ConfigError(render.nothing_found(result, where, space))
    parts = [render.search_text(result, where, ranks)]
    if space.left_out:
        parts.append(render.left_out_text(space.left_out))
    if args.explain:
        parts.append(render.explained(result.best))
    best = result.best[0]
    if args.output is not None:
        write_toml(args.output, args.config, args.overrides, best.choice.values())
        parts.append(f"wrote {args.output}; train with titan train --config {args.output}")
    if args.in_place:
        try:
            parts.append(_write_in_place(args, text_before, best.choice.values()))
        except ConfigError:
            print("\n\n".join(parts), file=sys.stderr)  # the layouts that a long search has found are no less right
            raise
    layouts = [found.prediction.as_json() | {"layout": found.choice.values()} for found in result.best]
    about = {"layouts": layouts, "left_out": list(space.left_out), "cluster": where.name}
    return best.prediction.as_json() | about, "\n\n".join(parts)


def _search(args: argparse.Namespace, base: Base, space: Space, planner: Planner) -> Result:
    with tqdm(desc="layouts", disable=None, leave=False, file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        return best_first.search(
            base.job,
            planner,
            [space],
            keep=args.top,
            objective=args.objective,
            progress=progress,
            workers=min(MOST_WORKERS, cores()),
        )


def _text_to_replace(config: Path | None) -> str:
    """The text of the job's own TOML, which must be a file that can be replaced; a search can take long."""
    if config is None or not config.is_file():
        given = "needs --config FILE" if config is None else f"--config {config} is not a file"
        raise ConfigError(f"--in-place: {given}; give the path of the TOML to write", "command line")
    return text_to_replace(config)


def _write_in_place(args: argparse.Namespace, text: str, values: Mapping[str, Any]) -> str:
    """Write these layout keys into the job's own TOML, which had this text; returns the line to print."""
    changes = write_layout(args.config, text, args.overrides, values)
    return f"wrote into {args.config}: {', '.join(changes) or 'nothing, because it has this layout'}"
