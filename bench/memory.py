"""Peak memory of CPU training beside what `titan plan` and `titan plan --dry-run` say of the same jobs.

    python -m bench.memory [--steps 3] [--only TEXT]

The model is that of bench/overhead.toml, 8 x 512 tokens per step: on one rank in fp32, in bf16 and with recomputation;
on two ranks with FSDP, tensor parallelism and a pipeline. Measured is the most that a rank's process held in a step,
beyond what it held before the model was built; of several ranks, the largest counts. Each rank computes on one thread.
Writes all samples under bench/results. Reads /proc: Linux alone.

Plan and dry run are taken twice. As on a GPU, where a norm is one kernel: what the two commands print. And as on a CPU,
where PyTorch's norm saves more: what the measurement is to be compared with. Both count tensors. A process holds more:
what its allocator keeps after it is freed, and buffers of the libraries that compute and communicate.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from bench import results
from bench.arguments import count
from bench.gpu import jobs
from bench.peak import forget_peak, peak_mib, status_mib
from titan.config import load_job
from titan.planner.dryrun import dry_run
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import memories
from titan.ranks import process
from titan.ranks.meeting.launch_env import launched_world_size
from titan.ranks.meeting.rendezvous import listen
from titan.training import build, trainer

CONFIG = Path(__file__).parent / "overhead.toml"
WARM_UP = 2
WORDS, TOKENS = 4097, 1 << 18
"""Ids of the model's vocabulary; tokens of the shard."""

AGREEMENT = 0.03
"""Relative difference of the plan's peak memory from the dry run's, at most."""

GPU, CPU = "as on a GPU", "as on a CPU"
KINDS = {GPU: True, CPU: False}
"""Kind of device that is planned for -> whether a norm is one kernel there."""

SHARED = ("--train.global_batch_size", "8", "--validation.every", "0", "--tokenizer.name", "byte")
_RECOMPUTE = "--plugins.activation_checkpoint.mode"


class Case(NamedTuple):
    """A job: its ranks, and its words beyond `SHARED`."""

    ranks: int
    words: Sequence[str] = ()


CASES: Mapping[str, Case] = {
    "fp32": Case(1),
    "bf16": Case(1, ("--plugins.bf16.enabled", "true")),
    "selective recomputation": Case(1, (_RECOMPUTE, "selective")),
    "full recomputation": Case(1, (_RECOMPUTE, "full")),
    "fsdp 2": Case(2, ("--mesh.dp_shard", "2")),
    "tp 2": Case(2, ("--mesh.tp", "2")),
    "pp 2, 1F1B": Case(2, ("--mesh.pp", "2", "--plugins.pipeline.schedule", "1F1B", "--train.micro_batch_size", "2")),
}
"""The pipeline has four micro batches per step."""

Figure = tuple[str, str, str, bool | None]
"""What is asked, the target ("" without one), what was measured, and whether that meets the target."""


def main() -> None:
    """Predict and measure all jobs, print the figures, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=3, help=f"measured steps of each job, after {WARM_UP}")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs with this in their name")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        _rank(json.loads(args.rank_of), args.steps)
        return
    chosen = {name: case for name, case in CASES.items() if args.only in name}
    rows = {name: measure(case, args.steps) for name, case in tqdm(chosen.items(), disable=None)}
    found = {"steps": args.steps, "rows": rows}
    for what, target, measured, _ in figures(found):
        print(f"{what}: {measured}" + (f" ({target})" if target else ""))
    if not args.only:
        print(results.write("memory", found))


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Figure by figure: what was asked of a prediction, the target, what was measured, and whether it is met."""
    return [figure for name, row in found["rows"].items() for figure in _figures(name, row)]


def _figures(name: str, row: Mapping[str, Any]) -> Iterator[Figure]:
    for kind in KINDS:
        planned, exact = (max(row[key][kind]) for key in ("planned_mib", "dry_run_mib"))
        apart = planned / exact - 1
        measured = f"{100 * apart:+.1f} % ({planned:,.0f} and {exact:,.0f} MiB)"
        yield (
            f"{name}: plan against dry run, {kind}",
            f"within {100 * AGREEMENT:g} %",
            measured,
            abs(apart) <= AGREEMENT,
        )
    held = max(statistics.median(steps) for steps in row["measured_mib"])
    ratios = " and ".join(f"{held / max(row[key][CPU]):.2f}" for key in ("planned_mib", "dry_run_mib"))
    yield f"{name}: measured, relative to plan and dry run", "", f"{ratios} ({held:,.0f} MiB)", None


def measure(case: Case, steps: int, shared: Sequence[str] = SHARED) -> dict[str, Any]:
    """The peak memory of a job in MiB, by rank: predicted of each kind of device, and measured in each step."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        data = ("--data.name", "shards", "--data.path", str(jobs.tokens(Path(folder), WORDS, TOKENS)))
        words = [*shared, *data, "--run.dir", folder, "--run.device", "cpu", *case.words]
        planned, exact = predicted(words, case.ranks)
        return {"planned_mib": planned, "dry_run_mib": exact, "measured_mib": _measured(words, case.ranks, steps)}


Predicted = dict[str, list[float]]
"""Kind of device -> MiB of each rank."""


def predicted(words: Sequence[str], ranks: int) -> tuple[Predicted, Predicted]:
    """Peak memory by the plan, without what it adds for an allocator, and by the dry run."""
    job = load_job(CONFIG, words, ranks)
    costs, places = costs_of(job), [job.layout.index_of(rank, "layers") for rank in range(ranks)]
    planned, exact = {}, {}
    for kind, fused in KINDS.items():
        by_place = memories(costs, job.layout, DeviceMemory(0.0, fused_norms=fused))
        planned[kind] = [by_place[at].allocated / 2**20 for at in places]
        # A job of its own for each rank, as in a run: techniques have state.
        runs = [dry_run(load_job(CONFIG, words, ranks), rank, fused) for rank in range(ranks)]
        exact[kind] = [run.peak_bytes / 2**20 for run in runs]
    return planned, exact


def _measured(words: Sequence[str], ranks: int, steps: int) -> list[list[float]]:
    """MiB of each measured step of each rank, from processes of their own."""
    command = [sys.executable, "-m", "bench.memory", "--steps", str(steps), "--rank-of", json.dumps(list(words))]
    with _started(command, ranks) as children:
        answers = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            sys.exit("a rank failed")
    return [json.loads(answer) for answer in answers]


@contextmanager
def _started(command: Sequence[str], ranks: int) -> "Iterator[list[subprocess.Popen[str]]]":
    """The ranks of a job, which are ended with the context."""
    with listen(0) as probe:
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            own = {key: str(value) for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


# --- a rank -------------------------------------------------------------------------------------------------------


def _rank(words: Sequence[str], steps: int) -> None:
    """Train, and write the peak of each measured step to stdout, in MiB."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no answer
    torch.set_num_threads(1)
    answers.write(json.dumps(peaks(words, steps)))
    answers.close()


def peaks(words: Sequence[str], steps: int) -> list[float]:
    """Train this rank of a job; MiB of its process in each measured step, beyond those before the model was built."""
    job = load_job(CONFIG, words, launched_world_size())
    rank = process.join(job)
    before = status_mib("VmRSS")
    run = build.build(job, rank)
    gc.disable()  # as in training
    try:
        return [_peak_of_a_step(run) - before for _ in range(WARM_UP + steps)][WARM_UP:]
    finally:
        gc.enable()
        trainer.close(run)
        process.leave()


def _peak_of_a_step(run: build.Run) -> float:
    batch = next(run.loader)
    forget_peak()
    float(trainer.step(run, batch).grad_norm)
    return peak_mib()


if __name__ == "__main__":
    main()
