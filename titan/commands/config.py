"""`titan config`: the resolved job of a TOML, with every default filled in, or the JSON Schema of all TOMLs."""

import argparse
import json
import sys
from pathlib import Path

import tomlkit
import torch

from titan.config import load_job, said_of
from titan.config.schema import schema
from titan.config.unset_options import with_options
from titan.errors import ConfigError
from titan.machine import total_gib
from titan.training.foresight import choose

HELP = "print the resolved job of a TOML with all defaults, or the JSON Schema for editors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config file (by position or as --config), overrides, and the output's form."""
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="TOML of the job; default: configs/quickstart.toml")
    add("--config", type=Path, metavar="FILE", help="the same as FILE, for symmetry with other commands")
    add("--world-size", type=int, metavar="N", help="number of ranks; default: as many as the layout needs")
    memory = "name or file of a cluster, whose memory decides options that are not set; default: this machine's GPU"
    add("--cluster", metavar="C", help=memory)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of TOML")
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of a job, with all known plugins")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Print the resolved job, or the JSON Schema, on stdout; the exit code."""
    if args.schema:
        print(json.dumps(schema(), indent=2))
        return 0
    if args.config and args.file:
        what = f"{args.file}: expected --table.key value; --config {args.config} names the file"
        raise ConfigError(what, "command line")
    path = args.config or args.file
    job = load_job(path, args.overrides, args.world_size)
    has_gpu = job.run.device != "cpu" and torch.cuda.is_available()
    values, chosen = choose(job, total_gib(torch.device("cuda", 0)) if has_gpu else None, args.cluster)
    table = with_options(job, values).table
    for sentence in (*said_of(path, args.overrides), *chosen):
        print(sentence, file=sys.stderr)
    print(json.dumps(table, indent=2) if args.json else tomlkit.dumps(table), end="\n" if args.json else "")
    return 0
