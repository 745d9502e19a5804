"""Measure how long planning takes: one prediction, one more layout, a search of 2,048 GPUs, a dry run of one rank.

    python -m bench.plan_latency [--repeats 5]

Each command runs in its own process, one after the other, and is timed from start to exit. The first run of each is
discarded. Prints medians and writes all samples under bench/results. `import torch` is timed as a reference: on a slow
or busy machine, compare with it.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import results
from titan.planner.machine import cluster
from titan.planner.search.space import Choice, load_base
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

TITAN = [sys.executable, "-m", "titan.cli", "plan", "--config", "llama65b.toml"]
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "titan plan": TITAN,
    "titan plan --search, 2,048 GPUs": [*TITAN, "--search", "--world-size", "2048"],
    "titan plan --dry-run, rank 0 of 2,048": [*TITAN, "--dry-run"],
}
LAYOUTS = 400


def main() -> None:
    """Time all commands, print a table and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each command; default: 5")
    repeats = parser.parse_args().repeats
    samples = {name: [_run(command) for _ in range(repeats + 1)][1:] for name, command in COMMANDS.items()}
    further = _further_layouts()
    for name, runs in samples.items():
        wall, cpu, gib = (statistics.median(run[i] for run in runs) for i in range(3))
        print(f"{name:<40}{wall:8.2f} s  {cpu:8.2f} s of CPU time  {gib:6.2f} GiB peak")
    print(f"{'one more layout':<40}{statistics.median(further) * 1e3:8.2f} ms")
    print(results.write("planning", {"samples": samples, "further_layout_s": further}))


def _run(command: Sequence[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak GiB of a process."""
    started = time.perf_counter()
    with Path(os.devnull).open("w") as nowhere:
        out = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), number) for number in (1, 2)]
        process = os.posix_spawn(command[0], command, os.environ, file_actions=out)
        _, status, usage = os.wait4(process, 0)
    assert status == 0, command
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def _further_layouts() -> list[float]:
    """Seconds per prediction of random layouts of 2,048 GPUs, with memory and schedule."""
    base, where = load_base(Path("llama65b.toml"), []), cluster.load("a100-80gb")
    planner, space, draw = Planner(where), base.space(2048, where.ranks_per_node), random.Random(0)
    groups = [(layout, b) for layout in space.layouts() for b in space.micro_batches(layout)]
    taken = []
    while len(taken) < LAYOUTS:
        layout, micro_batch = draw.choice(groups)
        plain, staged = draw.choice(list(itertools.islice(space.options(layout), 99)))
        started = time.perf_counter()
        job = space.job_of(Choice(layout, micro_batch, (*plain, *draw.choice(staged))))
        if job is not None and space.allows(job):
            planner.predict(costs_of(job), layout)
            taken.append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    main()
