"""`titan tune`: find the fastest layout of a job on this machine by short trial runs."""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.errors import EXIT_DONE, EXIT_FAILED, ConfigError, ConfigIssue, TitanError
from titan.paths import check_output
from titan.ranks.meeting.launch_env import find_place, rank_environment

if TYPE_CHECKING:
    from titan.planner.search.space import Base, Choice, Space
    from titan.planner.step.predict import Planner
    from titan.planner.tuning.results import Results

HELP = "find the fastest layout of a job on this machine by short trial runs"
DESCRIPTION = f"""{HELP}.

  NPROC=8 titan tune --config configs/llama7b.toml --cluster here.toml --output best.toml
  titan tune --config mine.toml --trials 40 --objective tokens-per-joule --steps 20 --mesh.pp 1
  titan tune --config mine.toml --world-size 64 --launch "srun --ntasks-per-node 8 titan train"

The search space is that of titan plan --search: degrees of all mesh axes, micro batch sizes, and the options that
plugins offer (pipeline schedules, recomputation, ZeRO stages). Keys given on the command line stay fixed. Each trial is
a real run of --warmup + --steps steps in its own processes, without checkpoints or validation; its result is the median
over the measured steps. The first half of the trials are the planner's best layouts for --cluster (titan doctor
measures one). A Bayesian search (optuna; the extra "tune") proposes the others. It counts failed trials (memory,
timeout, non-finite, launch, refused) as the worst result so far, and so avoids similar layouts. No layout runs twice.

Each finished trial appends a line to --results. The same command resumes from that file, also after a kill; a larger
--trials extends the search. A file of another job is refused. To repeat a failed trial, delete its line.
"""
EPILOG = """environment: NPROC (ranks on this node; default: number of GPUs, else 1)

exit codes: 0 done; 1 all trials failed, or Ctrl-C (results so far are printed); 2 wrong input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan tune`: job, measurement, outputs."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    parser.add_argument("--cluster", metavar="C", help="cluster for the planner; default: random start")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default: as titan train would start")
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="total, --results included; default: 20")
    parser.add_argument(
        "--objective",
        choices=("tflops", "tokens", "tokens-per-joule"),
        default="tflops",
        help="model TFLOP/s per device, tokens/s, or tokens per joule of this node's GPUs; default: tflops",
    )
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="warm-up steps per trial; default: 2")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps per trial; default: 5")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="time limit per trial, with startup; default: 300"
    )
    parser.add_argument(
        "--launch", metavar="WORDS", help="command that starts a trial, followed by its arguments; for several nodes"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="results; default: tune.jsonl in the run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the job with the best layout as a TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the trials, best first")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Run the search and print its results, also after Ctrl-C; returns the exit code."""
    from titan.planner.search.space import load_base
    from titan.planner.tuning.results import Results
    from titan.planner.tuning.search import searched

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
    check_output(args.output, "--output")
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
                ConfigIssue("command line", "--objective tokens-per-joule measures this node only; remove --launch")
            )
    if faults:
        raise ConfigError(faults)


def _ranks(args: argparse.Namespace) -> int:
    """Ranks per trial: --world-size, or those that titan train would start here."""
    if args.launch is not None:
        return int(args.world_size)
    if rank_environment(os.environ) is not None:
        raise ConfigError("titan tune starts its ranks itself; run it without torchrun or srun", "environment")
    if args.world_size:
        return int(args.world_size)
    place = find_place(os.environ)
    if place.nodes > 1:
        what = f"the job spans {place.nodes} nodes; give --world-size, and --launch to start ranks on all of them"
        raise ConfigError(what, "environment")
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
    """Run trials; False: interrupted."""
    from titan.planner.tuning import trial
    from titan.planner.tuning.proposal import Proposer
    from titan.planner.tuning.search import predictor, tune

    power = trial.power_meter(space.ranks) if args.objective == "tokens-per-joule" else None
    proposer = Proposer(space, _candidates(args, base, space, planner), args.objective)
    runner = trial.Runner(
        config=args.config,
        overrides=base.overrides,
        ranks=space.ranks,
        folder=results.path.with_suffix(".trial"),
        warmup=args.warmup,
        steps=args.steps,
        timeout_s=args.timeout,
        power=power,
        launcher=shlex.split(args.launch or ""),
    )
    if results.trials:
        _tell(f"resuming: {len(results.trials)} trials in {results.path}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the trial at hand ends with us
    try:
        tune(results, proposer, runner, args.objective, args.trials, predictor(space, planner), _tell)
        return True
    except KeyboardInterrupt:
        _tell("stopped; the same command resumes the search")
        return False
    finally:
        signal.signal(signal.SIGTERM, before)


def _candidates(args: argparse.Namespace, base: "Base", space: "Space", planner: "Planner | None") -> "list[Choice]":
    """The planner's best layouts, for the first half of the trials."""
    from titan.planner.report import render
    from titan.planner.search.best_first import search

    if planner is None:
        _tell("no --cluster: the search starts with random layouts; titan doctor measures a cluster")
        return []
    found = search(base.job, planner, [space], keep=(args.trials + 1) // 2)
    if not found.best:
        _tell(render.nothing_found(found, planner.cluster, space))
    return [each.choice for each in found.best]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(args: argparse.Namespace, results: "Results") -> bool:
    """Print the trials and write the TOML; False: there are no trials.

    Raises:
        TitanError: all trials failed.
    """
    from titan.planner.report.export_toml import write_toml
    from titan.planner.tuning.search import failures, report, table

    found: dict[str, Any] = report(results.trials, args.objective)
    if args.json:
        print(json.dumps(found | {"results": str(results.path)}))
    elif results.trials:
        print(table(results.trials, args.objective))
    if found["best"] is None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in failures(results.trials).items())
        if results.trials:
            raise TitanError(f"all trials failed ({kinds}); the reasons are in {results.path}")
        return False
    if args.output is not None:
        write_toml(args.output, args.config, args.overrides, found["best"])
        _tell(f"wrote {args.output}; train with titan train --config {args.output}")
    return True
