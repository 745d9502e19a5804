"""`titan plan`: predict memory, step time and cost of a job before it runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from titan.config import Job, load_job, said_of, without_effect
from titan.config.groups import listed
from titan.config.load import QUICKSTART
from titan.errors import EXIT_DONE, ConfigError, ConfigIssue
from titan.paths import check_output
from titan.planner.machine.cluster import MEMORY_LIMIT
from titan.planner.report import STUDIES
from titan.ranks.meeting.launch_env import cores

HELP = "predict memory, step time and cost of a job on a cluster, and search for its best layout"
CLUSTER = "a100-80gb"
FORMER_FLAGS = {
    "--exact": "--dry-run", "--model-only": "--formulas", "--clusters": "--list-clusters", "--write": "--output",
}  # fmt: skip
MOST_WORKERS = 4
"""Processes of a search. More would find the same layouts, but each prunes less."""


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
    parser.add_argument("--list-clusters", action="store_true", help="list the built-in clusters")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default: those of the job's layout")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--search", action="store_true", help="find the best layouts on --world-size ranks")
    kind.add_argument("--dry-run", action="store_true", help="build and step one rank on meta tensors")
    kind.add_argument("--formulas", action="store_true", help="closed-form estimates of parameters, memory and FLOPs")
    kind.add_argument("--study", metavar="NAME", help="predict a series of jobs: " + ", ".join(STUDIES))
    search = parser.add_argument_group("with --search")
    search.add_argument(
        "--objective", choices=("time", "price", "energy"), default="time", help="what to minimize; default: time"
    )
    search.add_argument("--top", type=int, default=10, metavar="K", help="number of layouts to show; default: 10")
    search.add_argument("--explain", action="store_true", help="compare step time by component with the best layout")
    search.add_argument("--output", type=Path, metavar="FILE", help="write the job with the best layout as a TOML")
    search.add_argument(
        "--in-place", action="store_true", help="write the best layout into the file of --config, and keep its comments"
    )
    exact = parser.add_argument_group("with --dry-run")
    exact.add_argument("--rank", type=int, metavar="R", help="rank to build; default: 0")
    alone = parser.add_argument_group("with --formulas")
    alone.add_argument("--devices", type=int, metavar="N", help="number of devices; default: those of the layout")
    alone.add_argument("--peak-tflops", type=float, metavar="F", help="peak TFLOP/s per device, for training times")
    alone.add_argument("--utilisation", type=float, default=0.45, metavar="U", help="share of the peak; default: 0.45")
    _add_fabric(parser.add_argument_group("with --study fabric"))
    parser.add_argument("--tokens", type=float, metavar="T", help="training tokens; adds total time, price and energy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot memory, step time and schedule, or the study")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw what each rank holds and sends, as .svg")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(takes_overrides=True)


def _add_fabric(fabric: argparse._ArgumentGroup) -> None:
    fabric.add_argument(
        "--against", type=Path, action="append", default=[], metavar="FILE",
        help="TOML of a job that reaches the same loss by sending less; may be repeated",
    )  # fmt: skip
    fabric.add_argument(
        "--steps-ratio", action="append", default=[], metavar="NAME=R",
        help="measured steps to the same loss of FILE NAME.toml, relative to the job of --config; default: 1",
    )  # fmt: skip
    fabric.add_argument(
        "--steps-ratios", type=Path, metavar="FILE",
        help="JSON of runs with their losses, as bench.comm writes it; R above may then be the name of a run, which is "
        "by default that of the job",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the chosen mode and print its report; returns the exit code."""
    does = (
        (args.list_clusters, _clusters),
        (args.formulas, _model_only),
        (args.dry_run, _exact),
        (args.search, _search),
        (args.study, _study),
    )
    _check(args)
    chosen = next((do for asked, do in does if asked), _plan)
    report, text = chosen(args)
    if args.config is not None or not (args.formulas or args.list_clusters):
        for sentence in said_of(args.config, args.overrides):
            print(sentence, file=sys.stderr)
    print(json.dumps(report) if args.json else text)
    return EXIT_DONE


def _check(args: argparse.Namespace) -> None:
    """Refuse options that no mode takes."""
    if args.in_place and not args.search:
        raise ConfigError([ConfigIssue("command line", "--in-place: no layout is searched; add --search")])
    if args.rank is not None and not args.dry_run:
        raise ConfigError([ConfigIssue("command line", "--rank: no rank is built; add --dry-run")])
    modes = ("search", "dry_run", "formulas", "study", "list_clusters")
    if args.draw is not None and (other := next((name for name in modes if getattr(args, name)), "")):
        what = f"--draw with --{other.replace('_', '-')}: --draw goes with one predicted job; leave one of them out"
        raise ConfigError([ConfigIssue("command line", what)])
    compares = {"against": args.against, "steps-ratio": args.steps_ratio, "steps-ratios": args.steps_ratios}
    for name, values in compares.items():
        if values and args.study != "fabric":
            what = f"--{name}: no jobs are compared; add --study fabric"
            raise ConfigError([ConfigIssue("command line", what)])
    if args.in_place and None not in (args.output, args.config) and args.output.resolve() == args.config.resolve():
        what = "--in-place and --output name the same file; leave one of them out"
        raise ConfigError([ConfigIssue("command line", what)])
    if args.output is not None and not args.search:
        raise ConfigError([ConfigIssue("command line", "--output: no layout is searched; add --search")])
    check_output(args.output, "--output")
    for name, value in (("world-size", args.world_size), ("top", args.top)):
        if value is not None and value < 1:
            raise ConfigError([ConfigIssue("command line", f"--{name} {value}: must be at least 1")])


def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from titan.planner.machine import cluster
    from titan.planner.report import render
    from titan.planner.search.unset_options import settle
    from titan.planner.step.layout import costs_of
    from titan.planner.step.predict import Planner

    where = cluster.load(args.cluster)
    job, chosen = settle(load_job(args.config, args.overrides, args.world_size), where.memory)
    _say_without_effect(job)
    prediction = Planner(where).predict(costs_of(job), job.layout, keep=args.plot is not None)
    budget = _budget(prediction, args.tokens)
    if args.plot is not None:
        from titan.planner.report import plots

        plots.draw_prediction(prediction, where, args.plot)
    if args.draw is not None:
        from titan.planner.picture.draw import draw_layout

        draw_layout(job, where, args.draw)
    report = prediction.as_json() | {"cluster": where.name} | ({"budget": budget} if budget else {})
    report |= {"unset_options": chosen}
    text = render.prediction_text(prediction, where, str(job.layout), budget)
    return report, "\n".join([*render.active_text(job.spec), text, *listed(job.optimizer), *chosen])


def _say_without_effect(job: Job) -> None:
    for sentence in without_effect(job):
        print(sentence, file=sys.stderr)


def _budget(prediction: Any, tokens: float | None) -> dict[str, float] | None:
    """Totals for a number of training tokens; the price is in the currency of the cluster file."""
    if tokens is None:
        return None
    if not tokens > 0:
        raise ConfigError([ConfigIssue("command line", f"--tokens {tokens:g}: must be above 0")])
    steps = tokens / prediction.tokens
    hours = steps * prediction.step_time_s / 3600
    return {
        "tokens": tokens,
        "days": hours / 24,
        "device_hours": hours * prediction.world_size,
        "energy_mwh": steps * prediction.energy_j / 3.6e9,
        "price": steps * prediction.price,
    }


def _search(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from tqdm import tqdm

    from titan.planner.machine import cluster
    from titan.planner.report import render
    from titan.planner.search.best_first import search
    from titan.planner.search.space import load_base
    from titan.planner.step.predict import Planner

    text_before = _to_replace(args.config) if args.in_place else ""
    where, base = cluster.load(args.cluster), load_base(args.config, args.overrides)
    ranks = args.world_size or load_job(args.config, args.overrides).layout.world_size
    with tqdm(desc="layouts", disable=None, leave=False, file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        space = base.space(ranks, where.ranks_per_node)
        result = search(
            base.job,
            Planner(where),
            [space],
            keep=args.top,
            objective=args.objective,
            progress=progress,
            workers=min(MOST_WORKERS, cores()),
        )
    if not result.best:
        raise ConfigError([ConfigIssue("", render.nothing_found(result, where, space))])
    text = render.search_text(result, where, ranks)
    if space.left_out:
        text += f"\n\n{render.left_out_text(space.left_out)}"
    best = result.best[0]
    if args.explain:
        text += "\n\n" + render.explained(result.best)
    if args.output is not None:
        text += "\n\n" + _write(args, best.choice.values())
    if args.in_place:
        try:
            text += "\n\n" + _write_in_place(args, text_before, best.choice.values())
        except ConfigError:
            print(text, file=sys.stderr)  # the layouts that a long search has found are no less right
            raise
    layouts = [found.prediction.as_json() | {"layout": found.choice.values()} for found in result.best]
    return best.prediction.as_json() | {
        "layouts": layouts,
        "left_out": list(space.left_out),
        "cluster": where.name,
    }, text


def _write(args: argparse.Namespace, values: dict[str, Any]) -> str:
    """Write the job with these layout keys as a TOML; returns the line to print."""
    from titan.planner.report.export_toml import write_toml

    write_toml(args.output, args.config, args.overrides, values)
    return f"wrote {args.output}; train with ./run_train.sh --config {args.output}"


def _to_replace(config: Path | None) -> str:
    """The text of the job's own TOML, which must be a file that can be replaced; a search can take long."""
    from titan.planner.report.replace_file import text_to_replace

    if config is None or not config.is_file():
        given = "needs --config FILE" if config is None else f"--config {config} is not a file"
        what = f"--in-place: {given}; give the path of the TOML to write"
        raise ConfigError([ConfigIssue("command line", what)])
    return text_to_replace(config)


def _write_in_place(args: argparse.Namespace, text: str, values: dict[str, Any]) -> str:
    """Write these layout keys into the job's own TOML, which had this text; returns the line to print."""
    from titan.planner.report.export_toml import write_layout

    changes = write_layout(args.config, text, args.overrides, values)
    return f"wrote into {args.config}: {', '.join(changes) or 'nothing, because it has this layout'}"


def _study(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from titan.planner.machine import cluster
    from titan.planner.report import fabric, plots, studies
    from titan.planner.report.steps_ratios import steps_ratios
    from titan.planner.report.study import Study

    where = cluster.load(args.cluster)
    if args.study == "fabric":
        ratios = steps_ratios(args.steps_ratio, args.steps_ratios, [path.stem for path in args.against])
        study: Study = fabric.run(
            args.config or QUICKSTART, args.against, ratios, args.overrides, where, args.world_size
        )
    else:
        study = studies.run(args.study, args.config, args.overrides, where, args.world_size)
    if args.plot is not None:
        plots.draw_study(study, args.plot)
    return study.as_json(), study.text()


def _exact(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from titan.planner.dryrun import dry_run, report
    from titan.planner.machine import cluster
    from titan.planner.machine.host import short_of
    from titan.planner.search.unset_options import settle

    memory = cluster.load(args.cluster).memory
    job, chosen = settle(load_job(args.config, args.overrides, args.world_size), memory)
    rank = args.rank or 0
    if not 0 <= rank < job.layout.world_size:
        what = f"--rank {rank}: the layout has ranks 0 to {job.layout.world_size - 1}"
        raise ConfigError([ConfigIssue("command line", what)])
    _say_without_effect(job)
    run = dry_run(job, rank)
    short = short_of(memory, [run.host_bytes], job.layout.world_size)
    said = [f"does NOT fit: {short}"] if short else []
    return run.as_json() | {"unset_options": chosen}, "\n".join([report(run), *said, *chosen])


def _model_only(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from titan.planner.report import closed_form
    from titan.planner.step.layout import costs_of

    job: Job = load_job(args.config, args.overrides) if args.config else closed_form.alone(args.overrides)
    report = closed_form.report(
        job, tokens=args.tokens, devices=args.devices, peak_tflops=args.peak_tflops, utilisation=args.utilisation,
        held=costs_of(job).state,
    )  # fmt: skip
    return report, closed_form.text(report)


def _clusters(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from titan.planner.machine import cluster
    from titan.planner.report import render

    found = {name: cluster.load(name) for name in cluster.names()}
    rows = [[name, c.device.name, f"{c.device.memory_gib:g} GiB", c.name] for name, c in found.items()]
    return {"clusters": {name: vars(c.device) for name, c in found.items()}}, "\n".join(render.columns(rows, left=4))
