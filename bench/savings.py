"""What each technique saves on this machine: time per step and peak memory, beside the plain way in the same run.

    python -m bench.savings [--steps 12] [--only TEXT] [--list]

Each row of a table below is a job on one rank; the first job of a table is the plain way. The jobs of a table run in
processes of their own, which take their steps in turns, each waiting while another computes. Prints the ratios of
median step times and of peak memory to those of the plain way, and writes all samples under bench/results.

Memory is what the process held at most in a measured step, beyond what it held before the model was built. Beside it
stand the step time and the memory that `titan plan` predicts for an H100, and the memory that `titan plan --dry-run`
finds, all as ratios to the plain way. Some techniques gain nothing here but by these: offload, where the device is the
host, and precisions that a CPU emulates.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.headlines import SAVINGS, savings
from bench.peak import forget_peak, peak_mib, status_mib
from titan.config import load_job
from titan.planner.dryrun import dry_run
from titan.planner.machine import cluster
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.ranks import process
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
WARM_UP = 2

Words = Sequence[str]


def words(**given: object) -> list[str]:
    """Overrides, with `__` for each dot of a key."""
    return [word for key, value in given.items() for word in (f"--{key.replace('__', '.')}", str(value))]


UNCLIPPED = words(train__grad_clip=0, train__global_batch_size=8, train__micro_batch_size=8)
BF16 = words(plugins__bf16__enabled="true")
COMPILED = [*UNCLIPPED, *BF16, *words(plugins__compile__enabled="true")]
SMALL = words(
    model__n_layers=1, model__vocab_size=4112, data__seq_len=64, train__global_batch_size=2, train__micro_batch_size=2
)  # float8 takes sizes that are multiples of 16


def recompute(mode: str, **more: object) -> list[str]:
    """Of a mode of recomputation."""
    keys = {"mode": mode, **more}
    return words(**{f"plugins__activation_checkpoint__{key}": value for key, value in keys.items()})


def pure(rounding: str) -> list[str]:
    """Of weights in bf16 alone."""
    return words(plugins__bf16__pure="true", plugins__bf16__rounding=rounding)


def float8(recipe: str, **more: object) -> list[str]:
    """Of float8, emulated."""
    keys = {"recipe": recipe, "emulate": "always", **more}
    return words(**{f"plugins__float8__{key}": value for key, value in keys.items()})


def offload(**kept: object) -> list[str]:
    """Of what is kept on the host."""
    return words(**{f"plugins__offload__{key}": str(value).lower() for key, value in kept.items()})


TABLES: Mapping[str, tuple[Words, Mapping[str, Words]]] = {
    "loss, 32,000 words": (
        [*UNCLIPPED, *words(model__vocab_size=32000)],
        {"all logits at once": words(loss__chunk_tokens=4096), "in chunks": []},
    ),
    "float32": (
        UNCLIPPED,
        {
            "plain": [],
            "activation_checkpoint, selective": recompute("selective"),
            "activation_checkpoint, every second": recompute("every_n", every=2),
            "activation_checkpoint, full": recompute("full"),
            "offload, optimizer": offload(optimizer=True),
            "offload, activations": offload(optimizer=False, activations=True),
            "offload, parameters": [*offload(parameters=True), *words(plugins__fsdp__enabled="true")],
        },
    ),
    "few tokens": (
        words(train__grad_clip=0, train__global_batch_size=1, train__micro_batch_size=1, data__seq_len=64),
        {
            "plain": [],
            "update_in_backward": words(plugins__update_in_backward__enabled="true"),
            "adamw_8bit": words(optimizer__name="adamw_8bit"),
        },
    ),
    "bf16, compiled": (
        COMPILED,
        {
            "plain": [],
            "attention": words(plugins__attention__enabled="true"),
            "activation_checkpoint, budget 0.5": recompute("budget", budget=0.5),
            "activation_checkpoint, budget 0": recompute("budget", budget=0),
            "pure, nearest": pure("nearest"),
            "pure, stochastic": pure("stochastic"),
            "pure, kahan": pure("kahan"),
        },
    ),
    "packed documents, 2,048 tokens": (
        words(
            data__seq_len=2048,
            model__max_seq_len=2048,
            train__global_batch_size=2,
            train__micro_batch_size=2,
            data__packing="document_mask",
            model__n_layers=4,
        ),
        {
            "a mask": [],
            "attention by document": words(plugins__attention__backend="documents"),
            "a mask, bf16": BF16,
            "attention, bf16": [*BF16, *words(plugins__attention__enabled="true")],
        },
    ),
    "optimizers": (
        words(train__global_batch_size=2, train__micro_batch_size=2, lr_schedule__name="constant"),
        {
            name: words(optimizer__name=name)
            for name in ("adamw", "sgd", "lion", "adafactor", "schedule_free_adamw", "adamw_8bit", "muon")
        },
    ),
    "precision that this CPU emulates": (
        [*SMALL],
        {
            "bf16": BF16,
            "fp16": words(plugins__fp16__enabled="true"),
            "float8, tensorwise": [*BF16, *float8("tensorwise")],
            "float8, tensorwise, head": [*BF16, *float8("tensorwise", head="true")],
            "float8, rowwise": [*BF16, *float8("rowwise")],
            "float8, rowwise_with_gw_hp": [*BF16, *float8("rowwise_with_gw_hp")],
            "mxfp8": [*BF16, *float8("mxfp8")],
        },
    ),
}
"""Table -> (words of all its jobs, job -> its own words)."""


def main() -> None:
    """Measure all tables, print them, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=12, help=f"measured steps of each job, after {WARM_UP}")
    parser.add_argument("--only", default="", metavar="TEXT", help="tables with this in their name")
    parser.add_argument("--list", action="store_true", help="print the tables and their jobs, measure nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        _job(json.loads(args.job))
        return
    chosen = {name: table for name, table in TABLES.items() if args.only in name}
    if not chosen:
        parser.error(f"--only {args.only}: no table has this in its name; they are {', '.join(TABLES)}")
    if args.list:
        for name, (_, jobs) in chosen.items():
            print(f"{name}: {', '.join(jobs)}")
        return
    for shared, jobs in chosen.values():
        for own in jobs.values():
            load_job(CONFIG, [*shared, *own], 1)  # a job that is refused ends the command before it has measured others
    measured = {name: _measure(name, *table, args.steps) for name, table in chosen.items()}
    for name, rows in measured.items():
        print(f"\n{name}\n" + "\n".join(lines(rows)))
    if not args.only:
        print(results.write("savings", {"steps": args.steps, "tables": measured}))


def lines(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each job of a table: ratios to the first one."""
    found = ["".join([" " * 40, *(f"{word:>15}" for word in SAVINGS)])]
    return found + [
        "".join([f"{job:40}", *(f"{ratio:15.2f}" for ratio in ratios)]) for job, ratios in savings(rows).items()
    ]


def _measure(name: str, shared: Words, jobs: Mapping[str, Words], steps: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = {job: _start([*shared, *own], Path(folder) / f"{at}") for at, (job, own) in enumerate(jobs.items())}
        try:
            for job, own in jobs.items():
                rows[job] = {"seconds": [], **_predicted([*shared, *own])}
                _answer(job, ranks[job])
            for number in tqdm(range(steps + WARM_UP), desc=name, disable=None):
                for job, rank in ranks.items():
                    _ask(rank, "reset" if number == WARM_UP else "step")
                    seconds = float(_answer(job, rank))
                    if number >= WARM_UP:
                        rows[job]["seconds"].append(seconds)
            for job, rank in ranks.items():
                _ask(rank, "peak")
                rows[job]["peak_mb"] = float(_answer(job, rank))
        finally:
            for rank in ranks.values():
                rank.kill()
                rank.wait()
    return rows


def _start(own: Words, folder: Path) -> "subprocess.Popen[str]":
    folder.mkdir()
    given = json.dumps([*own, "--run.dir", str(folder)])
    command = [sys.executable, "-m", "bench.savings", "--job", given]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(rank: "subprocess.Popen[str]", what: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(f"{what}\n")
    rank.stdin.flush()


def _answer(job: str, rank: "subprocess.Popen[str]") -> str:
    """The next line of a process; it ends with the benchmark where there is none."""
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        sys.exit(f"{job}: its process ended with {rank.wait()}")
    return line


def _predicted(own: Words) -> dict[str, float]:
    """Seconds on an H100, and GiB of a device, by the plan and by the dry run."""
    job = load_job(CONFIG, [*own], 1)
    step = Planner(cluster.load("h100")).predict(costs_of(job), job.layout)
    exact = dry_run(load_job(CONFIG, [*own], 1), 0)
    gc.enable()
    (memory,) = step.memory
    return {
        "planned_s": step.step_time_s,
        "planned_gib": memory.allocated / 2**30,
        "dry_run_gib": exact.peak_bytes / 2**30,
    }


# --- the process of a job -----------------------------------------------------------------------------------------


def _job(own: Words) -> None:
    """Build the job, then do what each line of stdin asks for, and answer with a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the run prints is no answer
    job = load_job(CONFIG, [*own], 1)
    before = status_mib("VmRSS")
    run = build.build(job, process.join(job))
    batches = iter(run.loader)
    answers.write("ready\n")
    for line in sys.stdin:
        what = line.strip()
        if what == "peak":
            answers.write(f"{(peak_mib() - before) * 1.024**2}\n")
            continue
        if what == "reset":
            forget_peak()
        batch = next(batches)
        began = time.perf_counter()
        float(trainer.step(run, batch).grad_norm)
        answers.write(f"{time.perf_counter() - began}\n")


if __name__ == "__main__":
    main()
