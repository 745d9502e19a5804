"""Start the ranks of this node, monitor them, and exit with the exit code of the run.

`./run_train.sh` ends here. Started by Slurm or torchrun once per rank, this process is the rank; for a world of one
rank it trains in this very process; otherwise, or when ranks may have to start again, it is the parent of the node's.

`torchrun -m titan.train ...` works too, but its agent kills ranks 30 s after a signal, whether their checkpoint is
written or not, and forgets what they exited with.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from titan.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError, TitanError
from titan.packages import check_torch
from titan.ranks.meeting import launch_env, signals
from titan.terminal import report, stand_in_for_closed, take_traceback_flag
from titan.usage import USAGE

HELP = "train a model; the same as ./run_train.sh (see titan train --help)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `titan train` to its parser."""
    parser.usage = USAGE.removeprefix("usage: ")
    parser.add_argument("--config", metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Launch the ranks and wait for them."""
    return main([*(("--config", args.config) if args.config else ()), *args.overrides])


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this node's ranks; the run's exit code. Arguments are those of `titan train`."""
    stand_in_for_closed()
    words = take_traceback_flag(sys.argv[1:] if argv is None else argv)
    try:
        check_torch()
        if {"-h", "--help"} & set(words):
            return _train(words)
        with signals.listening():  # first of all: what is imported now takes seconds
            code = _start(words)
            if code == EXIT_PREEMPTED:
                signals.hear_no_more()
            return code
    except TitanError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_FAILED


def _start(words: list[str]) -> int:
    if (mine := launch_env.rank_environment(os.environ)) is not None:
        os.environ.update(mine)
        return _train_here(words, first=os.environ["RANK"] == "0")
    place, restarts = launch_env.find_place(os.environ), launch_env.max_restarts(os.environ)
    launch_env.drop_rank_variables(os.environ)
    if place.world_size == 1 and not restarts:
        return _train_here(words, first=True)
    os.environ[launch_env.STARTED] = str(time.monotonic())
    from titan.config import load_job, split_arguments
    from titan.ranks.launcher import start
    from titan.ranks.meeting.same_job import statement_of

    job = load_job(*split_arguments(words), place.world_size)
    if restarts and not job.checkpoint.goes_on:
        what = 'restarts need checkpoints; set [checkpoint] enabled = true and resume = "auto"'
        raise ConfigError(f"MAX_RESTARTS = {restarts}: {what}", "environment")
    logs, limit_s = job.folder / "logs", job.comm.init_timeout_s
    return start(_train, words, place, statement_of(job), restarts, logs, ("titan.train",), limit_s)


def _train(words: list[str]) -> int:
    from titan.train import main as train

    return train(words)


def _train_here(words: list[str], first: bool) -> int:  # the first rank of a run asks Slurm to run it again
    from titan.ranks.launcher import again_by_slurm

    return again_by_slurm(_train(words), signals.heard(), first)


if __name__ == "__main__":
    sys.exit(main())
