"""Runs many fresh jobs of gloo ranks under load and counts jobs that die of heap corruption, for each setting.

    python -m bench.heap [--kind train] [--jobs 80] [--steps 25] [--recorder on off] [--workers 2 1]
                         [--allocator glibc] [--load 3] [--table.key value ...]

A job of kind "train" is a tiny llama on tp 2 x pp 2 with sequence parallelism; further arguments override its TOML. A
job of kind "gathers" is one rank whose step is 100 concurrent all-gathers. Settings alternate; Ctrl-C stops early and
keeps the counts. The results hold the stacks of each dead rank, with the native stack if gdb and core files are
available (`ulimit -c unlimited`). Exit code 1: a job died with one worker thread.
"""

import argparse
import io
import itertools
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bench import results
from titan.ranks import process
from titan.testing.jobs import run_job, train_job
from titan.testing.ranks import RankError, run_ranks

ALLOCATORS = {"glibc": {}, "checked": {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}}
ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600.0
SHOWN, WIDTH = 40, 160
"""Lines of a rank's stacks that the results keep, and characters of each."""


@dataclass(frozen=True)
class Setting:
    """What differs between jobs.

    recorder: PyTorch's flight recorder, "on" or "off".  workers: threads per Gloo group; PyTorch has 2.
    """

    recorder: str
    workers: int

    def take(self, folder: str) -> None:
        """Apply the setting in this rank; `folder` receives its core file."""
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000" if self.recorder == "on" else "0"
        if self.workers == 2:
            patch.object(process, "complete_in_order").start()
        os.chdir(folder)
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))


@dataclass
class Row:
    """Counts of the jobs of a setting: jobs, steps done, seconds, and cause and stacks of each death."""

    setting: Setting
    jobs: int = 0
    steps: int = 0
    seconds: float = 0.0
    deaths: list[dict[str, str]] = field(default_factory=list)

    def described(self) -> dict[str, Any]:
        """The row for the results file: setting and counts."""
        return {**asdict(self.setting), **{key: value for key, value in vars(self).items() if key != "setting"}}


def main() -> int:
    """Run the jobs, print a row per setting, write the results; returns the exit code."""
    words, keys = _parser().parse_known_args()
    rows = [Row(Setting(*chosen)) for chosen in itertools.product(words.recorder, words.workers)]
    os.environ.update(ALLOCATORS[words.allocator])  # for the process that ranks are forked from
    bar = tqdm(total=words.jobs * len(rows), unit="job", disable=None)
    with suppress(KeyboardInterrupt), _load(words.load), bar:
        for _, row in itertools.product(range(words.jobs), rows):
            _run(row, words.kind, words.steps, keys)
            bar.update()
    print("recorder  workers  jobs  steps done  died  seconds")
    for row in rows:
        print(
            f"{row.setting.recorder:<8}  {row.setting.workers:<7}  {row.jobs:<4}  {row.steps:<10}  "
            f"{len(row.deaths):<4}  {row.seconds:.0f}"
        )
    asked = {key: value for key, value in vars(words).items() if key not in ("recorder", "workers")}
    libc = " ".join(platform.libc_ver())
    print(
        results.write(
            f"heap-{words.kind}", {**asked, "keys": keys, "libc": libc, "rows": [row.described() for row in rows]}
        )
    )
    return 1 if any(row.deaths for row in rows if row.setting.workers == 1) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("train", "gathers"), default="train", help="kind of job; default: train")
    parser.add_argument("--jobs", type=int, default=80, help="jobs per setting; default: 80")
    parser.add_argument("--steps", type=int, default=25, help="steps per job; default: 25")
    parser.add_argument("--recorder", nargs="+", choices=("on", "off"), default=["on", "off"], help="flight recorder")
    parser.add_argument("--workers", nargs="+", type=int, choices=(1, 2), default=[2, 1], help="threads per group")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="glibc", help='"checked": MALLOC_CHECK_=3')
    parser.add_argument("--load", type=int, default=3, help="number of busy processes besides; default: 3")
    return parser


@contextmanager
def _load(count: int) -> Iterator[None]:
    spin = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _run(row: Row, kind: str, steps: int, keys: list[str]) -> None:
    began, printed = time.monotonic(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with redirect_stdout(printed):
                if kind == "train":
                    mesh = "--mesh.tp", "2", "--mesh.pp", "2", "--train.steps", str(steps)
                    train_job(Path(folder), 4, *mesh, *keys, timeout=TIMEOUT_S, run=partial(_train, row.setting))
                else:
                    run_ranks(_gather, 1, row.setting, folder, steps, timeout=TIMEOUT_S, init=False)
            row.steps += steps
        except RankError as error:
            row.deaths.append(_told(f"{error}\n{printed.getvalue()}", Path(folder)))
    row.jobs += 1
    row.seconds += time.monotonic() - began


def _told(said: str, folder: Path) -> dict[str, str]:
    """Why a job died, the stacks of the rank that did, and its native one."""
    lines = said.splitlines()
    found = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not found or "did not end within" in lines[0]:
        return {"cause": lines[0], "stacks": _portable(lines[:SHOWN]), "native": ""}
    last_words, signal = lines[found[0] - 1 : found[0] + 1]
    cause = last_words if "()" in last_words else signal
    stacks = itertools.takewhile(lambda line: not line.startswith("--- rank"), lines[found[0] :])
    return {"cause": cause, "stacks": _portable(list(stacks)[:SHOWN]), "native": _native_stacks(folder)}


def _native_stacks(folder: Path) -> str:
    cores = sorted(folder.glob("core*"))
    if not cores or not shutil.which("gdb"):
        return ""
    command = ["gdb", "-batch", "-ex", "bt", sys.executable]
    said = [subprocess.run([*command, core], capture_output=True, text=True).stdout.splitlines() for core in cores]
    # gdb shows the innermost frame once more when it opens a core file.
    return "\n\n".join(_portable([line for line in lines if line.startswith("#")][1:]) for lines in said)


def _portable(lines: list[str]) -> str:
    """Without the folders of this machine, and without the ends of long lines."""
    text = "\n".join(lines)
    for folder in (Path(torch.__file__).parents[1], ROOT, Path(sys.base_prefix)):
        text = text.replace(f"{folder}{os.sep}", "")
    return "\n".join(line[:WIDTH] for line in text.splitlines())


# --- in a rank ----------------------------------------------------------------------------------------------------


def _train(setting: Setting, folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    setting.take(folder)
    return run_job(folder, words, config)


def _gather(setting: Setting, folder: str, steps: int) -> None:
    setting.take(folder)
    process.enter(process.here("cpu"), TIMEOUT_S)
    assert dist.group.WORLD is not None
    collectives, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    for _ in range(steps):
        begun = [collectives.all_gather_into_tensor(torch.ones(4), 1, group) for _ in range(100)]
        for tensor in begun:
            collectives.wait_tensor(tensor)


if __name__ == "__main__":
    sys.exit(main())
