"""`titan tune`: the best layout of a job on the machine at hand, by trying."""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.errors import EXIT_DONE, EXIT_FAILED, ConfigError, ConfigIssue, TitanError
from titan.ranks.launch_env import find_place, rank_environment

if TYPE_CHECKING:
    from titan.planner.search.space import Base, Choice, Space
    from titan.planner.step.predict import Planner
    from titan.tuning.results import Results

HELP = "find the layout of a job that is fastest on the machine at hand, by short runs"
FORMER_FLAGS = {"--write": "--output"}
DESCRIPTION = f"""{HELP}.

  NPROC=8 titan tune --config configs/llama7b.toml --cluster here.toml --output best.toml
  titan tune --config mine.toml --trials 40 --objective tokens-per-joule --steps 20 --mesh.pp 1
  titan tune --config mine.toml --world-size 64 --launch "srun --ntasks-per-node 8 titan train"

Degrees of all axes, micro batches, and what plugins offer to be chosen (schedules, recompute, ZeRO stages), as in
titan plan --search; what is given on the command line stays fixed. Each trial is a real run of --warmup + --steps steps
in processes of its own, without checkpoints and validation; medians over the latter count. The first half of the trials
are the best layouts that the planner finds for --cluster (titan doctor --output measures one), the others what a
Bayesian search (optuna; the extra "tune") makes of the results. Failed trials (memory, timeout, non-finite, launch,
refused) count in it as the worst so far, so it keeps away from what is like them. No layout is run twice.

Each trial is a line of --results once it is done. The same command goes on from there, also after a kill, and with more
--trials searches further; a file of another job is refused. A failed trial is run again once its line is deleted.
"""
EPILOG = """environment: NPROC (ranks on this node; default: its GPUs, else 1)

exit codes: 0 done, 1 no trial worked or Ctrl-C (what has been measured is printed all the same), 2 wrong input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The job, how trials are measured, and what is written."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    parser.add_argument("--cluster", metavar="C", help="a name or file, for the planner; default: begin at random")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default: those that training would start")
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="in all, with earlier ones; default: 20")
    parser.add_argument(
        "--objective", choices=("tflops", "tokens", "tokens-per-joule"), default="tflops",
        help="model TFLOP/s a device, tokens/s, or tokens per joule of the GPUs of this node; default: tflops",
    )  # fmt: skip
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps left out; default: 2")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps measured; default: 5")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of a trial, start included; default: 300"
    )
    parser.add_argument(
        "--launch", metavar="WORDS", help="start a trial with this and its arguments; for ranks on several nodes"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: tune.jsonl in the run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the job with the best layout as a TOML")
    parser.add_argument("--json", action="store_true", help="one JSON object: the trials, best first")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Search, and show what was found so far even if it is stopped."""
    from titan.planner.search.space import load_base
    from titan.tuning.results import Results
    from titan.tuning.search import searched

    _check(args)
    ranks = _ranks(args)
    base = load_base(args.config, args.overrides)
    planner = _planner(args)
    widest = planner.cluster.ranks_per_node if planner is not None else 0 if args.launch else ranks
    how = {"warmup": args.warmup, "steps": args.steps, "power": args.objective == "tokens-per-joule"}
    results = Results(args.results or base.job.folder / "tune.jsonl", searched(base, ranks, **how))
    stopped = not _search(args, base, base.space(ranks, widest), planner, results)
    shown = _show(args, results)
    return EXIT_FAILED if stopped or not shown else EXIT_DONE


def _check(args: argparse.Namespace) -> None:
    least = {"trials": 1, "warmup": 0, "steps": 1, "world_size": 1}
    faults = [
        ConfigIssue("command line", f"--{name.replace('_', '-')} {value}: must be at least {bound}")
        for name, bound in least.items()
        if (value := getattr(args, name)) is not None and value < bound
    ]
    if not args.timeout > 0:
        faults.append(ConfigIssue("command line", f"--timeout {args.timeout:g}: must be above 0"))
    if args.launch is not None:
        if not args.world_size:
            faults.append(ConfigIssue("command line", "--launch needs --world-size, the ranks that it starts"))
        if args.objective == "tokens-per-joule":
            faults.append(
                ConfigIssue("command line", "--objective tokens-per-joule reads this node alone; not with --launch")
            )
    if faults:
        raise ConfigError(faults)


def _ranks(args: argparse.Namespace) -> int:
    """Ranks of a trial: what is asked for, or those that training would start here."""
    if args.launch is not None:
        return int(args.world_size)
    if rank_environment(os.environ) is not None:
        raise ConfigError(
            [ConfigIssue("environment", "titan tune starts its ranks itself; not under torchrun or srun")]
        )
    if args.world_size:
        return int(args.world_size)
    place = find_place(os.environ)
    if place.nodes > 1:
        what = f"there are {place.nodes} nodes; give --world-size and --launch, words that start ranks on all of them"
        raise ConfigError([ConfigIssue("environment", what)])
    return place.ranks


def _planner(args: argparse.Namespace) -> "Planner | None":
    if args.cluster is None:
        return None
    from titan.planner.machine import cluster
    from titan.planner.step.predict import Planner

    return Planner(cluster.load(args.cluster))


def _search(
    args: argparse.Namespace, base: "Base", space: "Space", planner: "Planner | None", results: "Results"
) -> bool:
    """Add trials; whether it came to its end."""
    from titan.tuning import trial
    from titan.tuning.proposal import Proposer
    from titan.tuning.search import predictor, tune

    power = trial.power_meter(space.ranks) if args.objective == "tokens-per-joule" else None
    proposer = Proposer(space, _candidates(args, base, space, planner), args.objective)
    runner = trial.Runner(
        config=args.config, overrides=base.overrides, ranks=space.ranks, folder=results.path.with_suffix(".trial"),
        warmup=args.warmup, steps=args.steps, timeout_s=args.timeout, power=power,
        launcher=shlex.split(args.launch or ""),
    )  # fmt: skip
    if results.trials:
        _tell(f"{len(results.trials)} trials are in {results.path} already")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the trial at hand ends with us
    try:
        tune(results, proposer, runner, args.objective, args.trials, predictor(space, planner), _tell)
        return True
    except KeyboardInterrupt:
        _tell("stopped; the same command goes on")
        return False
    finally:
        signal.signal(signal.SIGTERM, before)


def _candidates(args: argparse.Namespace, base: "Base", space: "Space", planner: "Planner | None") -> "list[Choice]":
    """The planner's best layouts, for the first half of the trials."""
    from titan.planner.report import render
    from titan.planner.search.best_first import search

    if planner is None:
        _tell("without --cluster the search begins at random; titan doctor --output measures one")
        return []
    found = search(base.job, planner, [space], keep=(args.trials + 1) // 2)
    if not found.best:
        _tell(render.nothing_fits(found, planner.cluster))
    return [each.choice for each in found.best]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(args: argparse.Namespace, results: "Results") -> bool:
    """Print the trials and write the TOML; whether there is a best one.

    Raises:
        TitanError: all of them failed.
    """
    from titan.planner.report.export_toml import write_toml
    from titan.tuning.search import failures, report, table

    found: dict[str, Any] = report(results.trials, args.objective)
    if args.json:
        print(json.dumps(found | {"results": str(results.path)}))
    elif results.trials:
        print(table(results.trials, args.objective))
    if found["best"] is None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in failures(results.trials).items())
        if results.trials:
            raise TitanError(f"no trial has worked ({kinds}); {results.path} has the reason of each")
        return False
    if args.output is not None:
        write_toml(args.output, args.config, args.overrides, found["best"])
        _tell(f"written to {args.output}; train with ./run_train.sh --config {args.output}")
    return True
