"""`titan doctor`: measure the ranks of this machine or allocation, and report outliers."""

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan.errors import ConfigError, TitanError
from titan.paths import check_output
from titan.ranks import launcher
from titan.ranks.meeting.launch_env import LaunchEnv
from titan.ranks.meeting.same_job import Statement, versions

if TYPE_CHECKING:
    from titan.planner.doctor.examination import Examination

HELP = "measure devices and links, report outliers, and write a cluster file for titan plan"
TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan doctor`: duration and outputs."""
    from titan.planner.doctor.report import RULE

    parser.description = f"""{HELP}.

  titan doctor
  NPROC=8 titan doctor --output here.toml && titan plan --config llama7b --cluster here.toml --world-size 8
  srun --ntasks-per-node 8 titan doctor --seconds 120 --json > doctor.json

All ranks measure at the same time; they start as in titan eval. Devices: matrix products by size and dtype, attention,
memory bandwidth, launch overhead, host-to-device copies, disk writes. Links: all-reduce, all-gather, reduce-scatter and
all-to-all over all ranks, within each node and across nodes, and ping-pong messages between pairs of ranks. Results are
medians of repeats, without warm-up.

{RULE}

The cluster file describes the median rank: measured points of matrix products, efficiency of attention and elementwise
operations, and one link per network level, with latency and bandwidth from a linear fit over message sizes. On CPUs the
ranks share the cores, so the file is valid only for the number of ranks measured.

Exit codes: 0 all measured, with or without outliers; 1 a measurement failed; 2 wrong input."""
    parser.add_argument("--seconds", type=float, default=25.0, metavar="S", help="approximate duration; default: 25")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="folder to measure writes in; default: runs/, if any")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a cluster file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the times of each rank")


def run(args: argparse.Namespace) -> int:
    """Measure this process, or start the NPROC ranks and measure them; returns the exit code."""
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds:g}: must be above 0", "command line")
    if args.disk is None:
        args.disk = Path("runs") if Path("runs").is_dir() else None
    elif not args.disk.is_dir():
        raise ConfigError(f"--disk {args.disk}: no such folder", "command line")
    check_output(args.output, "--output")
    place: LaunchEnv | None = launcher.place_asked_for()
    if place is None:
        return _as_rank(args, [])
    return launcher.start(functools.partial(_as_rank, args), [], place, _statement(args))


def _statement(args: argparse.Namespace) -> "Statement":
    return Statement({"doctor": {"seconds": args.seconds}}, {}, versions())


def _as_rank(args: argparse.Namespace, _: list[str]) -> int:
    from titan.ranks import process, watchdog

    watchdog.answer_to_quit()
    return process.run_as_rank(functools.partial(_examine, args))


def _examine(args: argparse.Namespace, rank: int) -> None:
    from titan.planner.doctor.examination import examine
    from titan.ranks import process

    try:
        me = process.here("auto")
        process.enter(me, TIMEOUT_S, _statement(args))
        found = examine(me, args.seconds, args.disk)
        if found is not None:
            _hand_out(found, args)
    except OSError as error:
        raise TitanError(f"{error.filename or 'a file'}: {error.strerror or error}") from error


def _hand_out(found: "Examination", args: argparse.Namespace) -> None:
    import tomlkit

    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(tomlkit.dumps(found.cluster), encoding="utf-8")
        print(f"wrote {args.output}", file=sys.stderr)
    if args.json:
        print(json.dumps(found.json(), allow_nan=False))
        return
    print(f"{found.device}; ranks: {len(found.ranks)}, {found.per_node} per node; torch {found.torch}\n")
    print(f"{'':<56}{'median':>10}{'slowest':>10}{'fastest':>10}{'spread':>8}")
    for row in found.rows:
        times = row.seconds.values()
        numbers = "".join(f"{row.shown(seconds):10.4g}" for seconds in (row.middle, max(times), min(times)))
        print(f"{row.name:<48}{row.unit:>8}{numbers}{statistics.median(row.spreads.values()):8.0%}")
    print("\n" + ("\n".join(map(str, found.findings)) or "No outliers."))
