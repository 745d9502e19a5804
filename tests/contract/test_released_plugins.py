"""Plugins written for earlier versions (tests/released/*/plugins) train, plan and pass today's contract suite.

One line of theirs has to be changed, as titan says when it refuses it: the facts of an axis.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_titan
from titan.contracts.plugin import registry
from titan.testing.contract import OF_OPTIONS, Subject
from titan.testing.jobs import train_job

ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests" / "configs" / "outside.toml"
RELEASED = ROOT / "tests" / "released" / "26471e7" / "plugins"


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The former plugins, with the facts of their axis."""
    folder = tmp_path_factory.mktemp("former")
    for path in RELEASED.glob("*.py"):
        text = path.read_text().replace('role="batch"', 'data="dealt", weights="copies"')
        (folder / path.name).write_text(text)
    return folder


def test_a_role_is_refused_with_what_to_write() -> None:
    done = run_titan(("plugins", "--path", str(RELEASED)), Path.cwd())
    said = """mesh axis 'crew': role = 'batch': an axis states facts now; write data="dealt", weights="copies"""
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_they_train_on_the_curve_of_todays(tmp_path: Path, former: Path) -> None:
    words = ("--plugins.path", str(former))
    before = train_job(tmp_path, 2, *words, "--mesh.crew", "2", config=OUTSIDE, name="former")
    today = train_job(tmp_path, 2, "--mesh.toy_dp", "2", config=OUTSIDE, name="today")
    assert {step: row["loss"] for step, row in before.rows.items()} == {s: r["loss"] for s, r in today.rows.items()}
    ledgers = [(tmp_path / name / "ledger.txt").read_text() for name in ("former", "today")]
    assert ledgers[0] == ledgers[1]


def titan(*words: str) -> subprocess.CompletedProcess[str]:
    done = run_titan(words, Path.cwd())
    assert done.returncode == 0, done.stderr
    return done


def test_they_are_planned_as_todays_and_each_former_name_is_reported_once(former: Path) -> None:
    words = ("plan", "--config", str(OUTSIDE), "--data.path", "x", "--json")
    before = titan(*words, "--plugins.path", str(former), "--mesh.crew", "2")
    today = titan(*words, "--mesh.toy_dp", "2")
    assert today.stderr == ""
    layout = json.loads(today.stdout.replace("toy_dp", "crew"))
    assert json.loads(before.stdout) == layout
    report = re.compile(r"warning: .*/(\w+)\.py:\d+: (.*) is now (.*); titan 1\.0 drops the former name")
    said = [report.fullmatch(line) for line in before.stderr.splitlines()]
    found = {line[2]: (line[1], line[3]) for line in said if line}
    assert len(found) == len(said), before.stderr
    assert found.items() >= {
        "ModelPlan": ("averager", "ModelSpec"), "Model.plan": ("averager", "spec"),
        "Lookup": ("averager", "EmbeddingOp"),
        "module titan.plan": ("averager", "titan.contracts.base.spec"), "World": ("crew", "BuildContext"),
        "Axis(depth=)": ("crew", "topology_order="), "ModelSpec(stem=)": ("averager", "embeddings="),
        "Costs(traffic=)": ("crew", "collectives="), "CollectiveCost(numbers=)": ("crew", "numel="),
    }.items()  # fmt: skip


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, former: Path) -> list[type[registry.Plugin]]:
    """The former plugins, which other tests do not see."""
    registry.load_plugins()
    known = {key: plugin for key, plugin in registry._plugins.items() if plugin.__module__.startswith("titan.plugins.")}
    monkeypatch.setattr(registry, "_plugins", known)
    monkeypatch.setattr(registry, "_opened", set(registry._opened))
    before = list(known.values())
    registry.load_plugins([former])
    return [plugin for plugin in registry.every() if plugin not in before]


def test_they_pass_the_contract_suite(plugins: list[type[registry.Plugin]], tmp_path: Path) -> None:
    assert sorted(plugin.name for plugin in plugins) == ["averager", "crew", "heavyball", "ledger"]
    for plugin in plugins:
        for check in OF_OPTIONS:
            check(Subject(plugin), tmp_path)


def test_they_are_listed(former: Path) -> None:
    said = titan("plugins", "--path", str(former)).stdout
    assert all(f" {name} " in f" {' '.join(said.split())} " for name in ("averager", "crew", "heavyball", "ledger"))
