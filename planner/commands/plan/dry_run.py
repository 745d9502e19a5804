"""`titan plan --dry-run`: build and step one rank on meta tensors, and report its memory, FLOPs and bytes sent."""

import argparse
from typing import Any

from titan.errors import ConfigError
from titan.planner.commands.plan.job import load_settled
from titan.planner.dryrun import dry_run, report
from titan.planner.machine import cluster
from titan.planner.machine.host import short_of


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report, as JSON and as text."""
    memory = cluster.load(args.cluster).memory
    job, chosen = load_settled(args, memory)
    rank = args.rank or 0
    if not 0 <= rank < job.layout.world_size:
        raise ConfigError(f"--rank {rank}: the layout has ranks 0 to {job.layout.world_size - 1}", "command line")
    done = dry_run(job, rank)
    short = short_of(memory, [done.host_bytes], job.layout.world_size)
    lines = [report(done), *([f"does NOT fit: {short}"] if short else []), *chosen]
    return done.as_json() | {"unset_options": chosen}, "\n".join(lines)
