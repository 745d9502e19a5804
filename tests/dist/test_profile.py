"""Recording changes no number of a run; each rank writes a trace of the steps asked for, whenever the run ends."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import LLAMA, SAVING, mesh
from tests.signals import job
from tests.sweeps import but_sweep
from titan import train
from titan.config import load_job
from titan.planner.dryrun import dry_run
from titan.testing.jobs import Outcome, train_job
from titan.testing.ranks import run_ranks

FROM_3 = ("--plugins.profile.from_step", "3", "--plugins.profile.steps", "2")
EACH = ("--train.steps", "6", "--metrics.every", "1")
LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "one rank": (1, [], []),
    "dp_shard 2, tp 2": (4, mesh(dp_shard=2, tp=2), ["tp", "dp"]),
    "pp 2, bytes counted": (2, [*mesh(pp=2), "--plugins.bytes_sent.enabled", "true"], ["pp"]),
    "compiled": (1, ["--plugins.compile.enabled", "true"], []),
}
"""Name -> number of ranks, words, rows of what is sent."""


def traces(outcome: Outcome) -> dict[str, Any]:
    """Name of each file in `profile/` of a run -> the JSON in it."""
    ending = ".pt.trace.json.gz"
    files = sorted((outcome.folder / "profile").glob("*"))
    assert all(file.name.endswith(ending) for file in files), files
    return {file.name.removesuffix(ending): json.loads(gzip.decompress(file.read_bytes())) for file in files}


def steps_in(trace: Any) -> list[str]:
    return sorted(event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#"))


def logged(outcome: Outcome, rank: int = 0) -> str:
    return (outcome.folder / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "dp_shard 2, tp 2", "compiled"))
def test_the_same_curve_to_the_bit_and_a_row_of_seconds(layout: str, tmp_path: Path) -> None:
    ranks, words, sent = LAYOUTS[layout]
    plain = train_job(tmp_path, ranks, *EACH, *words, name="plain")
    found = train_job(tmp_path, ranks, *EACH, *words, *FROM_3)
    assert (found.loss, found.grad_norm) == (plain.loss, plain.grad_norm)
    assert all(found.weights[name].equal(weight) for name, weight in plain.weights.items())
    written = traces(found)
    assert sorted(written) == [f"rank-{rank}_steps-3-4" for rank in range(ranks)]
    for trace in written.values():
        assert steps_in(trace) == ["ProfilerStep#3", "ProfilerStep#4"]
        phases = [event["name"] for event in trace["traceEvents"] if event["name"].startswith("titan: ")]
        for phase in ("data", "forward and backward", "gradients", "optimizer"):
            assert phases.count(f"titan: {phase}") == 2
    seconds = {key: value for key, value in found.rows[4].items() if key.startswith("profile_")}
    assert not any(key.startswith("profile_") for step in (1, 2, 3, 5, 6) for key in found.rows[step])
    step_s = seconds.pop("profile_step_s")
    assert sum(seconds.values()) == pytest.approx(step_s)
    for row in ("compute", "optimizer", "data", "other", *sent):
        assert seconds[f"profile_{row}_s"] > 0, row
    for rank in range(ranks):
        said = logged(found, rank)
        assert said.count("profile: wrote") == 1 and "no memory snapshot: a CPU keeps no history" in said
        assert f"profile: seconds per step, rank {rank}, steps 3-4; no prediction" in said
        assert said.count("\nwaiting for data") == 1


def test_ranks_that_are_asked_for(tmp_path: Path) -> None:
    found = train_job(tmp_path, 2, *EACH, *mesh(dp_shard=2), *FROM_3, "--plugins.profile.ranks", "1")
    assert list(traces(found)) == ["rank-1_steps-3-4"] and found.rows[4]["profile_step_s"] > 0
    assert "profile:" not in logged(found)


def test_the_window_counts_the_steps_of_the_run(tmp_path: Path) -> None:
    """Resumed in the window, before its last step and behind it; and with a window that no step reaches."""
    train_job(tmp_path, 1, *SAVING, "--train.steps", "3", *FROM_3)
    found = train_job(tmp_path, 1, *SAVING, "--train.steps", "4", *FROM_3)
    assert sorted(traces(found)) == ["rank-0_steps-3-3", "rank-0_steps-4-4"]
    found = train_job(tmp_path, 1, *SAVING, "--train.steps", "5", *FROM_3)
    late = "steps 3 to 4 were done before this run resumed after step 4: nothing is recorded; set from_step to a later"
    assert len(traces(found)) == 2 and f"[plugins.profile] {late} step" in logged(found)
    found = train_job(tmp_path, 1, "--train.steps", "2", *FROM_3, name="short")
    said = "[plugins.profile] from_step = 3, but train.steps = 2: nothing is recorded; set from_step lower"
    assert not (found.folder / "profile").exists() and said in logged(found)


def test_from_the_first_step(tmp_path: Path) -> None:
    found = train_job(tmp_path, 1, "--train.steps", "2", "--plugins.profile.from_step", "1")
    assert {name: steps_in(trace) for name, trace in traces(found).items()} == {
        "rank-0_steps-1-2": ["ProfilerStep#1", "ProfilerStep#2"]
    }


def test_preempted_in_the_window(tmp_path: Path) -> None:
    """What is recorded is written, with its table; the prediction is that of the cluster asked for."""
    long = ("--plugins.profile.from_step", "2", "--plugins.profile.steps", "8", "--plugins.profile.cluster", "h100")
    argv = job(tmp_path, *long, "--mesh.dp_shard", "2", step=4)
    assert set(run_ranks(train.main, 2, argv, init=False, timeout=200)) == {75}
    found = Outcome({}, {}, tmp_path / "run")
    last = max(int(path.name[-8:]) for path in (found.folder / "checkpoints").glob("step-????????"))
    assert sorted(traces(found)) == [f"rank-{rank}_steps-2-{last}" for rank in (0, 1)]
    said = logged(found)
    assert f"profile: seconds per step, rank 0, steps 2-{last}; predicted: the rank that ends last, H100 SXM" in said
    assert "predicted, s" in said


def test_files_that_cannot_be_written_end_no_run(tmp_path: Path) -> None:
    """Rank 0 does not record, and would wait for rank 1 if that ended."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("no folder")
    found = train_job(tmp_path, 2, *EACH, *mesh(dp_shard=2), *FROM_3, "--plugins.profile.ranks", "1")
    assert max(found.rows) == 6 and "profile_step_s" not in found.rows[4]
    said = f"[plugins.profile] cannot write or read {found.folder}/profile/rank-1_steps-3-4.*: FileExistsError: "
    assert logged(found, 1).count(said) == 1


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    argv = job(tmp_path, "--plugins.profile.cluster", "h1000")
    assert run_ranks(train.main, 1, argv, init=False, timeout=200) == [2]
    assert "h1000: no such file or cluster (did you mean 'h100'?)" in logged(Outcome({}, {}, tmp_path / "run"))


def test_a_dry_run_records_nothing(tmp_path: Path) -> None:
    words = ["--run.dir", str(tmp_path), "--data.path", str(tmp_path)]
    plain = dry_run(load_job(LLAMA, words, 1), 0)
    found = dry_run(load_job(LLAMA, [*words, "--plugins.profile.from_step", "1"], 1), 0)
    assert found.as_json() == plain.as_json() and not list(tmp_path.glob("**/profile"))
