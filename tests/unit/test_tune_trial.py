"""One trial of `titan tune`: started by a made-up launcher, measured, and named by what made it fail."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("optuna")

from tests.jobs import LLAMA
from tests.unit.test_tune import base
from titan.config import load_job
from titan.planner.search.space import Choice
from titan.planner.tuning import trial
from titan.planner.tuning.results import Failed, Measured
from titan.planner.tuning.trial import Runner, failure


@pytest.mark.parametrize(
    ("code", "said", "kind", "why"),
    [
        (2, "error: job.toml: [train] steps: missing\nerror: x", "refused", "error: job.toml: [train] steps: missing"),
        (1, "a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nerror: rank 1 failed", "memory", "torch.OutOfMem"),
        (1, "error: rank 3 was killed by SIGKILL (out of memory?)", "memory", "error: rank 3 was killed"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory: you tried", "memory", "RuntimeError"),
        (-9, "", "memory", "killed (exit code -9)"),
        (137, "step 1/7", "memory", "killed (exit code 137)"),
        (1, "Traceback\nRuntimeError: Connection refused\nerror: rank 0 failed", "launch", "RuntimeError: Connection"),
        (1, "", "launch", "exit code 1, no output"),
        (0, "all well", "launch", "all well"),
    ],
)
def test_failures_have_types(code: int, said: str, kind: str, why: str) -> None:
    found = failure(code, said)
    assert found.kind == kind and found.why.startswith(why)


FAKE_LAUNCHER = """
import json, os, signal, sys, time
words = dict(w[2:].split("=", 1) for w in sys.argv[1:] if "=" in w)
folder = os.path.join(words["run.dir"], words["run.name"])
os.makedirs(folder)
rows = open(os.path.join(folder, "metrics.jsonl"), "w", buffering=1)
for step in range(1, int(words["train.steps"]) + 1):
    rows.write(json.dumps({
        "step": step, "loss": None if MODE == "nan" and step == 3 else 1.0, "grad_norm": 1.0, "time": 0.0,
        "step_time_s": 10.0 if step <= 2 else step / 100, "tokens_per_s": 100.0 / step, "peak_memory_gib": 0.5,
        "model_tflops_per_device": 1.0 / step,
    }) + "\\n")
    if MODE == "nan" and step == 3:
        sys.exit(1)
    if MODE == "hang" and step == 2:
        rows.write('{"step"')
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        signal.pause()
"""


def runner(folder: Path, mode: str, timeout_s: float = 30.0) -> Runner:
    launcher = [sys.executable, "-c", f"MODE = {mode!r}\n{FAKE_LAUNCHER}"]
    return Runner(
        config=LLAMA, overrides=(), ranks=1, folder=folder / "trial", warmup=2, steps=3, timeout_s=timeout_s,
        launcher=launcher,
    )  # fmt: skip


def any_choice() -> Choice:
    space = base().space(1, 1)
    [layout] = space.layouts()
    return Choice(layout, 1)


def test_medians_without_the_warm_up(tmp_path: Path) -> None:
    found = runner(tmp_path, "well")(any_choice())
    assert found == Measured(
        step_time_s=0.04, tokens_per_s=25.0, model_tflops_per_device=0.25, peak_memory_gib=0.5, watts=None
    )
    assert list(tmp_path.iterdir()) == []


def test_nan_is_a_failure_of_its_own(tmp_path: Path) -> None:
    assert runner(tmp_path, "nan")(any_choice()) == Failed("non-finite", "NaN or inf at step 3")


def test_a_trial_that_hangs_is_killed(tmp_path: Path) -> None:
    with patch.object(trial, "GRACE_S", 0.2):
        found = runner(tmp_path, "hang", timeout_s=3.0)(any_choice())
    assert found == Failed("timeout", "not done after 3 s (--timeout); 2 steps done")
    assert list(tmp_path.iterdir()) == []


def test_power_is_that_of_the_measured_steps(tmp_path: Path) -> None:
    readings = [(1.0, 50.0), (2.0, 300.0), (3.0, 400.0), (9.0, 70.0)]
    assert trial._mean_power(readings, 1.5, 4.0) == 350.0
    assert trial._mean_power(readings, 2.1, 2.2) == 300.0
    assert trial._mean_power([], 0.0, 1.0) is None
    assert Measured(
        step_time_s=1, tokens_per_s=700, model_tflops_per_device=1, peak_memory_gib=1, watts=350.0
    ).value("tokens-per-joule") == 2.0  # fmt: skip


def test_what_a_trial_sets_is_not_given_twice(tmp_path: Path) -> None:
    job = base("--run.sample_prompt", "The")
    run = Runner(
        config=LLAMA, overrides=job.overrides, ranks=1, folder=tmp_path / "t", warmup=1, steps=1, timeout_s=1.0
    )  # fmt: skip
    words = run._words(any_choice())[2:]
    assert load_job(LLAMA, words, 1).run.sample_prompt == "" and "--run.sample_prompt=The" in words
