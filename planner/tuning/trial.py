"""A trial: a few steps of the real job at one layout, in its own processes, started as a user would start them.

Only its metrics are kept. The kind of a failure is derived from exit code, metrics and output.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts import Tracker
from titan.contracts.plugin import registry
from titan.errors import EXIT_DONE, EXIT_WRONG_INPUT, ConfigError
from titan.planner.search.space import Choice
from titan.planner.tuning.results import Failed, Measured

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL of a trial, and for its ranks to exit."""

READ_EVERY_S = 0.1
LONGEST_REASON = 200

OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|Cannot allocate memory|not enough memory", re.IGNORECASE
)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

Power = Callable[[], float]
"""Returns the present power of all of this node's devices together, in watts."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs trials of a job, one after the other.

    config, overrides: the job, as for training.  ranks: of each trial.  folder: scratch folder, emptied for each trial;
    shared by all nodes if there are several.  warmup, steps: steps before the measurement, and measured steps.
    timeout_s: time limit per trial.  launcher: command that starts the ranks; empty: ranks on this node.
    power: reads the power; None: not measured.
    """

    config: Path | None
    overrides: Sequence[str]
    ranks: int
    folder: Path
    warmup: int
    steps: int
    timeout_s: float
    launcher: Sequence[str] = ()
    power: Power | None = None

    def __call__(self, choice: Choice) -> Measured | Failed:
        """Train at a layout; returns medians over the measured steps, or the failure."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            return self._judge(*self._live(choice))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _words(self, choice: Choice) -> list[str]:
        settings: dict[str, Any] = {
            "run.dir": self.folder,
            "run.name": "run",
            "run.sample_prompt": "",
            "run.max_minutes": 0,
            "train.steps": self.warmup + self.steps,
            "train.non_finite": "stop",
            "checkpoint.enabled": "false",
            "checkpoint.resume": "never",
            "checkpoint.init_from": "",
            "validation.every": 0,
            "metrics.every": 1,
        }
        # Trackers that are on by default write to the run's folder; the others may upload.
        trackers = {f"metrics.{p.name}.enabled": str(p.default).lower() for p in registry.of_kind(Tracker.kind)}
        config = ["--config", str(self.config)] if self.config else []
        own = [f"--{key}={value}" for key, value in (settings | trackers).items()]
        return [*config, *self.overrides, *choice.words(), *own]

    def _live(self, choice: Choice) -> tuple[int | None, str, list[tuple[float, float]]]:
        """Exit code (None: time limit), output, and (unix seconds, watts) readings."""
        environment = {key: value for key, value in os.environ.items() if key != "MAX_RESTARTS"}
        if not self.launcher:
            environment |= {"NPROC": str(self.ranks), "NNODES": "1"}
        process = subprocess.Popen(
            [*(self.launcher or (sys.executable, "-P", "-m", "titan.launch")), *self._words(choice)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        readings: list[tuple[float, float]] = []
        end = time.monotonic() + self.timeout_s
        try:
            while (left := end - time.monotonic()) > 0:
                try:
                    # The output ends when the last of its ranks has ended too.
                    said, _ = process.communicate(timeout=min(left, READ_EVERY_S) if self.power else left)
                    return process.returncode, said, readings
                except subprocess.TimeoutExpired:
                    if self.power:
                        readings.append((time.time(), self.power()))
            return None, "", readings
        finally:
            _end(process)

    def _judge(self, code: int | None, said: str, readings: Sequence[tuple[float, float]]) -> Measured | Failed:
        path = self.folder / "run" / "metrics.jsonl"
        rows = (
            [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"]
            if path.exists()
            else []
        )
        if any(row["loss"] is None or row["grad_norm"] is None for row in rows):
            return Failed("non-finite", f"NaN or inf at step {rows[-1]['step']}")
        if code is None:
            return Failed("timeout", f"not done after {self.timeout_s:g} s (--timeout); {len(rows)} steps done")
        rows = [row for row in rows if row["step"] > self.warmup]
        if code != EXIT_DONE or len(rows) < self.steps:
            return failure(code, said + "".join(log.read_text() for log in sorted(path.parent.glob("logs/*"))))
        watts = mean_power(readings, rows[0]["time"] - rows[0]["step_time_s"], rows[-1]["time"])
        keys = ("step_time_s", "tokens_per_s", "model_tflops_per_device", "peak_memory_gib")
        return Measured(**{key: statistics.median(row[key] for row in rows) for key in keys}, watts=watts)


def failure(code: int, said: str) -> Failed:
    """The failure of a process, from its exit code and its output."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [f"exit code {code}, no output"]
    # The first error is the cause: the other ranks fail because of it, and the launcher summarizes.
    reason = next((line for line in lines if re.search(r"\berror\b|Error:", line)), lines[-1])
    if code == EXIT_WRONG_INPUT:
        return Failed("refused", reason[:LONGEST_REASON])
    exhausted = [line for line in lines if OUT_OF_MEMORY.search(line)]
    if exhausted or code in KILLED:
        return Failed("memory", (exhausted or [f"killed (exit code {code})"])[0][:LONGEST_REASON])
    return Failed("launch", reason[:LONGEST_REASON])


def _end(process: "subprocess.Popen[str]") -> None:
    """End the launcher and its ranks: SIGTERM, then SIGKILL; the ranks end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                continue
    process.poll()
    assert process.stdout is not None
    process.stdout.close()


def mean_power(readings: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """Mean of the readings between two unix times; the nearest reading if none is between; None without readings."""
    if not readings:
        return None
    inside = [watts for at, watts in readings if begin <= at <= end]
    return statistics.fmean(inside or [min(readings, key=lambda reading: abs(reading[0] - end))[1]])


def power_meter(ranks: int) -> Power:
    """A reader of the power of this node's first `ranks` GPUs.

    Raises:
        ConfigError: no GPU, or its power cannot be read.
    """
    import torch

    devices = range(min(ranks, torch.cuda.device_count()))
    try:
        if not devices:
            raise RuntimeError("no GPU")
        torch.cuda.power_draw(0)
    except Exception as error:
        reason = str(error).splitlines()[0]
        what = f"tokens-per-joule: cannot read the power of the GPUs ({reason}); choose another objective"
        raise ConfigError(what, "--objective") from None
    milli = 1 if torch.version.hip else 1000  # torch says mW, but hands on the W of AMD's library
    return lambda: sum(torch.cuda.power_draw(device) for device in devices) / milli
