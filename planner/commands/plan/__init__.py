"""`titan plan`: predict memory, step time and cost of a job before it runs. One parser, and a module per mode."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from titan.config import said_of
from titan.errors import EXIT_DONE, ConfigError
from titan.paths import check_output
from titan.planner.machine.cluster import MEMORY_LIMIT
from titan.planner.report import STUDIES

HELP = "predict memory, step time and cost of a job on a cluster, and search for its best layout"
CLUSTER = "a100-80gb"
MODES = ("list_clusters", "formulas", "dry_run", "search", "study")
"""Flags, each with a module of this package; without any, `predict`. `run(args)` of it returns the report, as JSON and
as text. Imported when used."""

_ORDINARY = {"cluster": CLUSTER, "objective": "time", "top": 10, "utilisation": 0.45}
_TAKEN = {
    **dict.fromkeys(
        ("objective", "top", "explain", "output", "in-place"), ("search", "no layout is searched; add --search")
    ),
    "rank": ("dry_run", "no rank is built; add --dry-run"),
    "devices": ("formulas", "the ranks of a layout are counted by --world-size; add --formulas"),
    **dict.fromkeys(("peak-tflops", "utilisation"), ("formulas", "--cluster says what devices reach; add --formulas")),
    "draw": ("predict", "only one predicted job is drawn; leave out what asks for another report"),
    "plot": ("predict study", "only one predicted job or a study is plotted"),
    "tokens": ("predict formulas", "only one predicted job and --formulas say what tokens take"),
    "world-size": ("predict dry_run search study", "closed-form estimates count --devices"),
    "cluster": ("predict dry_run search study", "only a job with a layout is on a cluster"),
    **dict.fromkeys(("against", "steps-ratio", "steps-ratios"), ("study", "no jobs are compared; add --study fabric")),
}
"""Flags that only some modes take: these, and what to say with another one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan plan`: job, cluster, mode, output."""
    parser.description = f"""{HELP}.

  titan plan --config configs/llama65b.toml                       memory per pipeline stage, step time by component
  titan plan --config configs/llama65b.toml --cluster h100 --mesh.tp 4 --mesh.dp_shard 128
  titan plan --config configs/llama65b.toml --search --world-size 2048 --output best.toml
  titan plan --config configs/llama65b.toml --dry-run --rank 2047 memory of one rank, op by op
  titan plan --formulas --model.name gpt --model.preset 175b      closed-form estimates of the model
  titan plan --config configs/gpt175b.toml --study tp --plot throughput.png
  titan plan --config configs/debug3d.toml --draw layout.svg      which rank holds what, and sends what to whom

Nothing is trained and no data is read: a laptop predicts runs on thousands of GPUs. --cluster takes the name of a
built-in cluster (titan plan --list-clusters) or a file; titan doctor measures this machine and writes such a file.

--search covers every layout of --world-size ranks: degrees of all mesh axes, micro batch sizes, and the options that
plugins offer (pipeline schedules, recomputation, ZeRO stages). Keys given on the command line stay fixed. Techniques
that change the loss curve are not searched; include one with --plugins.NAME.enabled true. A layout whose predicted
peak exceeds {100 * MEMORY_LIMIT:g} % of the memory of a device is not proposed.

--dry-run builds and steps one rank on meta tensors, without allocating memory.

docs/planning.md explains the model behind the predictions, docs/validation.md compares them with published runs."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    parser.add_argument(
        "--cluster", default=CLUSTER, metavar="C", help=f"name or file of a cluster; default: {CLUSTER}"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default: those of the job's layout")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--list-clusters", action="store_true", help="list the built-in clusters")
    kind.add_argument("--search", action="store_true", help="find the best layouts on --world-size ranks")
    kind.add_argument("--dry-run", action="store_true", help="build and step one rank on meta tensors")
    kind.add_argument("--formulas", action="store_true", help="closed-form estimates of parameters, memory and FLOPs")
    kind.add_argument("--study", metavar="NAME", help="predict a series of jobs: " + ", ".join(STUDIES))
    _add_search(parser.add_argument_group("with --search"))
    exact = parser.add_argument_group("with --dry-run")
    exact.add_argument("--rank", type=int, metavar="R", help="rank to build; default: 0")
    alone = parser.add_argument_group("with --formulas")
    alone.add_argument("--devices", type=int, metavar="N", help="number of devices; default: those of the layout")
    alone.add_argument("--peak-tflops", type=float, metavar="F", help="peak TFLOP/s per device, for training times")
    alone.add_argument(
        "--utilisation",
        type=float,
        default=_ORDINARY["utilisation"],
        metavar="U",
        help="share of the peak; default: 0.45",
    )
    _add_fabric(parser.add_argument_group("with --study fabric"))
    parser.add_argument("--tokens", type=float, metavar="T", help="training tokens; adds total time, price and energy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot memory, step time and schedule, or the study")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw what each rank holds and sends, as .svg")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(takes_overrides=True)


def _add_search(search: argparse._ArgumentGroup) -> None:
    search.add_argument(
        "--objective",
        choices=("time", "price", "energy"),
        default=_ORDINARY["objective"],
        help="what to minimize; default: time",
    )
    search.add_argument(
        "--top", type=int, default=_ORDINARY["top"], metavar="K", help="number of layouts to show; default: 10"
    )
    search.add_argument("--explain", action="store_true", help="compare step time by component with the best layout")
    search.add_argument("--output", type=Path, metavar="FILE", help="write the job with the best layout as a TOML")
    search.add_argument(
        "--in-place", action="store_true", help="write the best layout into the file of --config, and keep its comments"
    )


def _add_fabric(fabric: argparse._ArgumentGroup) -> None:
    fabric.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="TOML of a job that reaches the same loss by sending less; may be repeated",
    )
    fabric.add_argument(
        "--steps-ratio",
        action="append",
        default=[],
        metavar="NAME=R",
        help="measured steps to the same loss of FILE NAME.toml, relative to the job of --config; default: 1",
    )
    fabric.add_argument(
        "--steps-ratios",
        type=Path,
        metavar="FILE",
        help="JSON of runs with their losses, as bench.comm writes it; R above may then be the name of a run, which is "
        "by default that of the job",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen mode and print its report; returns the exit code."""
    mode = next((name for name in MODES if getattr(args, name)), "predict")
    _check(args, mode)
    report, text = importlib.import_module(f"{__name__}.{mode}").run(args)
    if args.config is not None or mode not in ("formulas", "list_clusters"):
        for sentence in said_of(args.config, args.overrides):
            print(sentence, file=sys.stderr)
    print(json.dumps(report) if args.json else text)
    return EXIT_DONE


def _check(args: argparse.Namespace, mode: str) -> None:
    """Refuse options that the mode does not take."""
    for flag, (modes, sentence) in _TAKEN.items():
        if _given(args, flag) and (mode not in modes.split() or (modes == "study" and args.study != "fabric")):
            raise ConfigError(f"--{flag}: {sentence}", "command line")
    if args.in_place and None not in (args.output, args.config) and args.output.resolve() == args.config.resolve():
        raise ConfigError("--in-place and --output name the same file; leave one of them out", "command line")
    check_output(args.output, "--output")
    for name, value in (("world-size", args.world_size), ("top", args.top)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1", "command line")


def _given(args: argparse.Namespace, flag: str) -> bool:
    value = getattr(args, flag.replace("-", "_"))
    return value is not None and value is not False and value not in ([], _ORDINARY.get(flag))
