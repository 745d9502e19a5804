"""`titan train`: the main job on this machine's ranks."""

import argparse

HELP = "train a model; the same as ./run_train.sh (see titan train --help)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `titan.launch` takes."""
    from titan.train import USAGE

    parser.usage = USAGE.removeprefix("usage: ")
    parser.add_argument("--config", metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Launch the ranks and wait for them."""
    from titan import launch

    return launch.main([*(("--config", args.config) if args.config else ()), *args.overrides])
