"""Plugins written for earlier versions (tests/released/*/plugins) train, plan and pass today's contract suite."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.contract import test_every_plugin as suite
from tests.jobs import train_job
from titan.contracts.base import registry

ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests" / "configs" / "outside.toml"
FORMER = ROOT / "tests" / "released" / "26471e7" / "plugins"
WORDS = ("--plugins.path", str(FORMER))


def test_they_train_on_the_curve_of_todays(tmp_path: Path) -> None:
    former = train_job(tmp_path, 2, *WORDS, "--mesh.crew", "2", config=OUTSIDE, name="former")
    today = train_job(tmp_path, 2, "--mesh.toy_dp", "2", config=OUTSIDE, name="today")
    assert {step: row["loss"] for step, row in former.rows.items()} == {s: r["loss"] for s, r in today.rows.items()}
    ledgers = [(tmp_path / name / "ledger.txt").read_text() for name in ("former", "today")]
    assert ledgers[0] == ledgers[1]


def titan(*words: str) -> subprocess.CompletedProcess[str]:
    done = run_titan(words, Path.cwd())
    assert done.returncode == 0, done.stderr
    return done


def test_they_are_planned_as_todays_and_each_former_name_is_reported_once() -> None:
    words = ("plan", "--config", str(OUTSIDE), "--data.path", "x", "--json")
    former = titan(*words, *WORDS, "--mesh.crew", "2")
    today = titan(*words, "--mesh.toy_dp", "2")
    assert today.stderr == ""
    layout = json.loads(today.stdout.replace("toy_dp", "crew"))
    assert json.loads(former.stdout) == layout
    report = re.compile(r"warning: .*/(\w+)\.py:\d+: (.*) is now (.*); titan 1\.0 drops the former name")
    said = [report.fullmatch(line) for line in former.stderr.splitlines()]
    found = {line[2]: (line[1], line[3]) for line in said if line}
    assert len(found) == len(said), former.stderr
    assert found.items() >= {
        "ModelPlan": ("averager", "ModelSpec"), "Model.plan": ("averager", "spec"),
        "Lookup": ("averager", "EmbeddingOp"),
        "module titan.plan": ("averager", "titan.contracts.base.spec"), "World": ("crew", "BuildContext"),
        "Axis(depth=)": ("crew", "topology_order="), "ModelSpec(stem=)": ("averager", "embeddings="),
        "Costs(traffic=)": ("crew", "collectives="), "CollectiveCost(numbers=)": ("crew", "numel="),
    }.items()  # fmt: skip


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[type[registry.Plugin]]:
    """The former plugins, which other tests do not see."""
    registry.load_plugins()
    known = {key: plugin for key, plugin in registry._plugins.items() if plugin.__module__.startswith("titan.plugins.")}
    monkeypatch.setattr(registry, "_plugins", known)
    monkeypatch.setattr(registry, "_opened", set(registry._opened))
    before = list(known.values())
    registry.load_plugins([FORMER])
    return [plugin for plugin in registry.every() if plugin not in before]


def test_they_pass_the_contract_suite(plugins: list[type[registry.Plugin]]) -> None:
    assert sorted(plugin.name for plugin in plugins) == ["averager", "crew", "heavyball", "ledger"]
    for plugin in plugins:
        suite.test_options_are_documented_and_survive_a_round_trip(plugin)
        suite.test_options_are_frozen(plugin)
        suite.test_bad_values_are_refused(plugin)
        suite.test_unknown_options_are_refused(plugin)


def test_they_are_listed() -> None:
    said = titan("plugins", "--path", str(FORMER)).stdout
    assert all(f" {name} " in f" {' '.join(said.split())} " for name in ("averager", "crew", "heavyball", "ledger"))
