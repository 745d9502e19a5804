"""The job of a command line, with the options that a cluster's memory decides."""

import argparse
import sys

from titan.config import Job, load_job, without_effect
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.search.unset_options import settle


def load_settled(args: argparse.Namespace, memory: DeviceMemory) -> tuple[Job, list[str]]:
    """The job, and one sentence per option that memory decided; says on stderr which options have no effect.

    Raises:
        ConfigError: the job is invalid.
    """
    job, chosen = settle(load_job(args.config, args.overrides, args.world_size), memory)
    for sentence in without_effect(job):
        print(sentence, file=sys.stderr)
    return job, chosen
