"""`titan tune` without runs: what is proposed, kept, told to the sampler, shown and written; and one trial.

A made-up machine stands in for trials, a function from layout to outcome; a made-up launcher for what starts one.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("optuna")

from tests.jobs import LLAMA
from titan import cli
from titan.config import load_job
from titan.errors import ConfigError
from titan.packages import install
from titan.planner.commands import tune as command
from titan.planner.search.space import Base, Choice, load_base
from titan.planner.tuning import proposal, trial
from titan.planner.tuning.proposal import Proposer, imputed, parameters_of
from titan.planner.tuning.results import Failed, Measured, Results, Trial
from titan.planner.tuning.search import searched, table, tune
from titan.planner.tuning.trial import Runner, failure

OBJECTIVE = "tokens"


def base(*words: str) -> Base:
    return load_base(LLAMA, ["--data.path", "nowhere", *words])


def measured(tokens_per_s: float) -> Measured:
    return Measured(
        step_time_s=128 / tokens_per_s,
        tokens_per_s=tokens_per_s,
        model_tflops_per_device=tokens_per_s / 1e6,
        peak_memory_gib=1.0,
    )


class Machine:
    """Large micro batches are fast, tensor slices slow; state that is not sharded does not fit."""

    def __init__(self) -> None:
        self.ran: list[Choice] = []

    def __call__(self, choice: Choice) -> Measured | Failed:
        self.ran.append(choice)
        if choice.layout.degree("dp_shard") == 1:
            return Failed("memory", "out of memory")
        return measured(100.0 * choice.micro_batch / choice.layout.degree("tp"))


def go_on(
    path: Path,
    trials: int,
    *words: str,
    run: Callable[[Choice], Any] | None = None,
    ranks: int = 4,
    first: Sequence[Choice] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    job = base(*words)
    results, proposer = Results(path, searched(job, ranks)), Proposer(job.space(ranks, ranks), first, OBJECTIVE)
    tune(results, proposer, run or Machine(), OBJECTIVE, trials, lambda _: None, tell)
    return results


def test_no_layout_is_run_twice_and_all_of_them_work(tmp_path: Path) -> None:
    machine = Machine()
    go_on(tmp_path / "r.jsonl", 30, run=machine)
    assert len({str(sorted(choice.values().items())) for choice in machine.ran}) == len(machine.ran) == 30
    for choice in machine.ran:
        load_job(LLAMA, ["--data.path", "nowhere", *choice.words()], 4)


def test_a_small_space_is_tried_to_its_end(tmp_path: Path) -> None:
    told: list[str] = []
    words = ("--plugins.activation_checkpoint.enabled", "false", "--plugins.compile.enabled", "false")
    words += ("--mesh.pp", "1", "--mesh.dp_shard", "1")
    results = go_on(tmp_path / "r.jsonl", 50, *words, ranks=2, tell=told.append)
    by_degrees = [(t.layout["mesh.dp_replicate"], t.layout["mesh.tp"]) for t in results.trials]
    # A global batch of 8: micro batches of 1, 2, 4, 8 on one batch rank, of 1, 2, 4 on each of two.
    assert sorted(by_degrees) == [(1, 2)] * 4 + [(2, 1)] * 3
    assert told[-1] == "all 7 layouts of the search space have been tried"


def test_the_planners_best_come_first(tmp_path: Path) -> None:
    space, machine = base().space(4, 4), Machine()
    [layout] = [layout for layout in space.layouts() if layout.degree("dp_shard") == 4]
    first = [Choice(layout, 1, (*chosen, *staged[0])) for chosen, staged in space.options(layout)][:6]
    go_on(tmp_path / "r.jsonl", 8, run=machine, first=first)
    assert len(first) == 6 and machine.ran[:6] == first and machine.ran[6] not in first


def test_the_search_learns(tmp_path: Path) -> None:
    """It finds better layouts, and fails less often, than drawing at random."""
    found = {}
    for at_random in (5, 1000):
        with patch.object(proposal, "AT_RANDOM", at_random):
            outcomes = [t.outcome for t in go_on(tmp_path / f"{at_random}.jsonl", 40).trials]
        speeds = [outcome.tokens_per_s for outcome in outcomes if isinstance(outcome, Measured)]
        found[at_random] = sum(speeds) / 40, 40 - len(speeds)
    assert found[5][0] > 1.4 * found[1000][0] and found[5][1] < 0.7 * found[1000][1], found


def test_failures_count_as_the_worst_and_parameters_are_tables() -> None:
    layout = {"mesh.a": 2, "plugins.b.enabled": True, "plugins.b.c": 1, "plugins.b.d": "x", "plugins.e.enabled": False}
    assert parameters_of(layout) == {"mesh.a": 2, "plugins.b": "c=1 d=x", "plugins.e": "off"}
    failed = Trial("x", {}, Failed("memory", ""))
    fast, slow = (Trial("x", {}, measured(speed)) for speed in (30, 10))
    assert imputed([failed, fast, failed, slow, failed], "tokens") == [10, 30, 10, 10, 10]
    assert imputed([failed, failed], "tokens") == [0, 0]


def test_a_search_goes_on_as_if_it_had_never_been_killed(tmp_path: Path) -> None:
    """Cut off at any line, whole or torn, it makes the same file again."""
    path = tmp_path / "whole.jsonl"
    go_on(path, 9)
    whole = path.read_bytes()
    ends = [0, *(match.end() for match in re.finditer(rb"\n", whole))]
    assert len(ends) == 11
    for number, end in enumerate(ends):
        for kept in (whole[:end], whole[: end + 17], whole[: max(0, end - 1)])[: 3 if number in (1, 7, 10) else 1]:
            cut, machine = tmp_path / "cut.jsonl", Machine()
            cut.write_bytes(kept)
            go_on(cut, 9, run=machine)
            assert cut.read_bytes() == whole
            assert len(machine.ran) == 9 - max(0, kept.count(b"\n") - 1)


def test_results_of_another_search_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    go_on(path, 1)
    go_on(path, 1, "--train.steps", "99", "--checkpoint.every", "7", "--run.name", "other")
    for words, said in (
        (["--train.global_batch_size", "16"], "job.train.global_batch_size was 8, is 16"),
        (["--mesh.tp", "2"], 'fixed was [], is ["mesh.tp"]; degrees.tp was null, is 2'),
    ):
        with pytest.raises(ConfigError, match=re.escape(said) + ".*give another --results"):
            go_on(path, 1, *words)
    with pytest.raises(ConfigError, match="ranks was 4, is 2"):
        go_on(path, 1, ranks=2)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ((r"\n\Z", "\n{\n"), "line 3 is not a trial"),
        ((r"\n\Z", "\n[]\n"), "line 3 is not a trial"),
        ((r"\n\Z", '\n{"name": "x"}\n'), "line 3 is not a trial"),
        ((r"\n\Z", '\n{"name": "x", "layout": {}, "failed": {"odd": 1}}\n'), "line 3 is not a trial"),
        (('"train.micro_batch_size": ', r"\g<0>9"), r"train\.micro_batch_size = 9\d, not in this search space"),
    ],
)
def test_a_file_that_was_changed_is_refused(damage: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    go_on(path, 1)
    path.write_text(re.sub(*damage, path.read_text()))
    with pytest.raises(ConfigError, match=said):
        go_on(path, 2)


def test_table() -> None:
    given = [
        Trial("slow", {}, measured(64), 1.5),
        Trial("large", {}, Failed("memory", "why"), 1.0),
        Trial("fast", {}, measured(128)),
    ]
    assert [line.split() for line in table(given, "tokens").splitlines()[1:]] == [
        ["1", "128", "1", "-", "128", "1.00", "fast"],
        ["2", "64", "2", "1.5", "64", "1.00", "slow"],
        ["-", "memory", "-", "1", "-", "-", "large"],
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """What `titan tune` runs in a test's folder."""
    fake = Machine()
    monkeypatch.setattr(trial, "Runner", lambda **_: fake)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "NPROC", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    return fake


WORDS = ["tune", "--config", str(LLAMA), "--data.path", "nowhere"]


def test_the_command(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--world-size", "4", "--objective", "tokens", "--trials", "9", "--json"]
    assert cli.main([*words, "--output", "best.toml"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    values = [each["value"] for each in report["trials"] if "value" in each]
    assert len(report["trials"]) == len(machine.ran) == 9 and values == sorted(values, reverse=True)
    assert re.findall(r"^trial (\d+)/9  .*; (?:best|all failed) so far", err, re.M) == [str(n) for n in range(1, 10)]
    best = max((c for c in machine.ran if c.layout.degree("dp_shard") > 1), key=lambda c: Machine()(c).value("tokens"))
    written = load_job(Path("best.toml"), (), 4)
    assert (str(written.layout), written.micro_batch) == (str(best.layout), best.micro_batch)
    assert report["best"].items() >= {f"mesh.{a}": d for a, d in best.layout.degrees.items()}.items()
    assert cli.main(words) == 0 and len(machine.ran) == 9


def test_the_command_begins_with_what_the_planner_finds(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "h100", "--world-size", "4", "--trials", "4", "--objective", "tokens"]
    assert cli.main([*WORDS, *words, "--json", "--plugins.bf16.enabled", "true"]) == 0
    predicted = [each["predicted_step_time_s"] for each in json.loads(capsys.readouterr().out)["trials"]]
    assert all(predicted)
    first = Path("runs/llama/tune.jsonl").read_text().splitlines()[1:3]
    assert [json.loads(line)["predicted_step_time_s"] for line in first] == sorted(predicted)[:2]


@pytest.mark.parametrize("kind", ["ctrl-c", "SIGTERM"])
def test_ctrl_c_shows_what_there_is_and_leaves_the_file_valid(
    kind: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(choice: Choice) -> Measured | Failed:
        if len(machine.ran) == 4 and kind == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        elif len(machine.ran) == 4:
            raise KeyboardInterrupt  # SIGINT itself may be ignored here, as in what a shell starts in the background
        return machine(choice)

    with patch.object(trial, "Runner", lambda **_: interrupted):
        assert cli.main([*WORDS, "--world-size", "4", "--trials", "9"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 5 and "stopped; the same command resumes the search" in err
    assert cli.main([*WORDS, "--world-size", "4", "--trials", "4"]) == 0 and len(machine.ran) == 4


def test_when_nothing_works_or_optuna_is_missing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(trial, "Runner", lambda **_: lambda choice: Failed("launch", "no network")):
        assert cli.main([*WORDS, "--trials", "2", "--output", "best.toml"]) == 1
    assert "error: all trials failed (2 launch)" in capsys.readouterr().err and not Path("best.toml").exists()
    with patch.dict(sys.modules, {"optuna": None}):
        assert cli.main([*WORDS, "--trials", "1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(install("tune"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "0"], "--trials 0: must be at least 1"),
        (["--timeout", "0"], "--timeout 0: must be above 0"),
        (["--launch", "srun titan train"], "--launch needs --world-size"),
        (["--launch", "x", "--world-size", "2", "--objective", "tokens-per-joule"], "measures this node only"),
        (["--objective", "tokens-per-joule", "--run.device", "cpu"], "cannot read the power of the GPUs"),
        (["--cluster", "h1000"], "no such file or cluster"),
        (["--mesh.tpp", "2"], "--mesh.tpp 2: no plugin owns"),
    ],
)
def test_wrong_input(words: list[str], said: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with patch("torch.cuda.device_count", lambda: 0):
        assert cli.main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err and machine.ran == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without torchrun or srun"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "x"}, "spans 2 nodes; give --world-size, and --launch"),
    ],
)
def test_ranks_that_it_cannot_start(environment: dict[str, str], said: str, machine: Machine) -> None:
    with patch.dict(os.environ, environment), pytest.raises(ConfigError, match=said):
        command._ranks(argparse.Namespace(launch=None, world_size=None))


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


def runner(folder: Path, mode: str = "well", overrides: Sequence[str] = (), timeout_s: float = 30.0) -> Runner:
    launcher = [sys.executable, "-c", f"MODE = {mode!r}\n{FAKE_LAUNCHER}"]
    return Runner(
        config=LLAMA,
        overrides=overrides,
        ranks=1,
        folder=folder / "trial",
        warmup=2,
        steps=3,
        timeout_s=timeout_s,
        launcher=launcher,
    )


def any_choice() -> Choice:
    [layout] = base().space(1, 1).layouts()
    return Choice(layout, 1)


def test_medians_without_the_warm_up(tmp_path: Path) -> None:
    found = runner(tmp_path)(any_choice())
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


def test_power_is_that_of_the_measured_steps() -> None:
    readings = [(1.0, 50.0), (2.0, 300.0), (3.0, 400.0), (9.0, 70.0)]
    assert trial.mean_power(readings, 1.5, 4.0) == 350.0
    assert trial.mean_power(readings, 2.1, 2.2) == 300.0
    assert trial.mean_power([], 0.0, 1.0) is None
    assert replace(measured(700.0), watts=350.0).value("tokens-per-joule") == 2.0


def test_what_a_trial_sets_is_not_given_twice(tmp_path: Path) -> None:
    given = base("--run.sample_prompt", "The").overrides
    words = runner(tmp_path, overrides=given)._words(any_choice())[2:]
    assert load_job(LLAMA, words, 1).run.sample_prompt == "" and "--run.sample_prompt=The" in words
