"""Plugins that titan/ and plugins/ never name train, at parity between layouts, and resume."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.jobs import mesh
from tests.sweeps import swept_case
from titan.testing.jobs import assert_same_curve, train_job, write_text

ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests" / "configs" / "outside.toml"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return train_job(tmp_path_factory.mktemp("alone"), 1, config=OUTSIDE)


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [
        (2, {"toy_dp": 2}),
        *map(swept_case, [(4, {"toy_dp": 4}), (4, {"toy_dp": 2, "dp_shard": 2})]),
        (4, {"toy_dp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_parity(world_size: int, degrees: dict[str, int], alone, tmp_path: Path) -> None:
    assert_same_curve(alone, train_job(tmp_path, world_size, *mesh(**degrees), config=OUTSIDE))


def test_resumes_on_another_layout(alone, tmp_path: Path) -> None:
    saving = ("--checkpoint.enabled", "true")
    train_job(tmp_path, 2, "--mesh.toy_dp", "2", *saving, "--train.steps", "3", config=OUTSIDE)
    assert_same_curve(alone, train_job(tmp_path, 4, "--mesh.toy_dp", "4", *saving, config=OUTSIDE))


def titan(*words: object) -> str:
    done = run_titan([str(word) for word in words], ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_cost_is_planned_with() -> None:
    found = json.loads(titan("plan", "--config", OUTSIDE, "--mesh.toy_dp", 2, "--data.path", "x", "--json"))
    parameters = found["stages"][0]["memory_gib"]["parameters"] * 2**30 / 4
    # An all-reduce between two ranks sends all gradients once, at the NVLink rate of the default cluster at most.
    assert found["time_s"]["dp"] > 4 * parameters / 300e9


def test_a_written_job_finds_its_plugins(tmp_path: Path) -> None:
    best = tmp_path / "elsewhere" / "best.toml"
    fixed = ("--mesh.toy_dp", 2, "--data.path", "x")
    titan("plan", "--config", OUTSIDE, "--search", "--world-size", 2, *fixed, "--output", best)
    job = json.loads(titan("config", best, "--json"))
    assert job["mesh"]["toy_dp"] == 2 and job["model"]["name"] == "averager"


@pytest.mark.sweep
def test_what_a_run_prints_at_its_end_can_be_pasted_elsewhere(tmp_path: Path) -> None:
    folder, here = tmp_path / "a b", tmp_path / "here"
    (folder / "plugins").mkdir(parents=True)
    here.mkdir()
    for name in ("averager", "heavyball", "ledger"):
        shutil.copy(ROOT / "tests" / "plugins" / f"{name}.py", folder / "plugins")
    write_text(folder / "text")
    job = OUTSIDE.read_text().replace("../plugins", "plugins").replace("base.toml", str(OUTSIDE.with_name("base.toml")))
    (folder / "job.toml").write_text(job)
    words = ["--run.dir", "runs", "--data.cache", "cache", "--data.path", "text/*.txt"]
    words += ["--run.sample_prompt", "it's -- here", "--metrics.tensorboard.enabled", "true"]
    words += ["--checkpoint.enabled", "true", "--train.steps", "1"]
    command = [sys.executable, "-P", "-m", "titan.launch", "--config", "job.toml", *words]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, timeout=120)
    done = run(command, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stderr.splitlines() if " " in line.strip())
    for line, said in ((lines["generate"], "it's -- here"), (lines["evaluate"], "perplexity")):
        pasted = run(["bash", "-c", line], cwd=here)
        assert pasted.returncode == 0 and said in pasted.stdout, (line, pasted.stderr)
    curves = lines["curves"].split()[0]
    assert os.access(curves, os.X_OK) or shutil.which(curves, path=environment["PATH"])


def test_tracker_wrote(alone) -> None:
    lines = (alone.folder / "ledger.txt").read_text().splitlines()
    assert lines == [f"{step} {row['loss']}" for step, row in sorted(alone.rows.items())]


@pytest.mark.parametrize("name", ["averager", "toy_dp", "frills", "heavyball", "ledger"])
def test_nobody_inside_knows(name: str) -> None:
    for room in ("titan", "plugins", "planner", "inference", "testing"):
        for file in (ROOT / room).rglob("*.py"):
            assert name not in file.read_text().lower(), file
