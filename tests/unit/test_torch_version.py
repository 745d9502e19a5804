"""Which PyTorch titan takes: the range, the versions that its tests were run on, and what it says of others."""

import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan import cli, launch, packages

ROOT = Path(__file__).parents[2]
PLAN = ("plan", "--config", str(ROOT / "configs" / "debug.toml"), "--cluster", "h100")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretends that a version of PyTorch is installed."""
    monkeypatch.delenv(packages.TORCH_CHOSEN, raising=False)
    return lambda version: monkeypatch.setattr(packages, "installed_version", lambda _: version)


def test_the_range_is_that_of_the_package_and_what_was_run_lies_in_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, newest) = packages.TORCH
    after = f"{newest[0]}.{newest[1] + 1}"
    assert f"torch>={oldest[0]}.{oldest[1]},<{after}" in project["dependencies"]
    releases = [tuple(map(int, version.split(".")[:2])) for version in packages.TORCH_RUN]
    assert releases[0] == oldest and releases[-1] == newest and releases == sorted(set(releases))
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == [packages.TORCH_RUN[0]]


@pytest.mark.parametrize("version", ["2.12.1+cu130", "2.16.0", "1.13.1", "3.0.0a0+git1"])
@pytest.mark.parametrize("main", [lambda: cli.main(PLAN), lambda: launch.main([])], ids=["titan", "run_train.sh"])
def test_another_version_is_refused_in_one_sentence(version: str, main, installed, capsys) -> None:
    installed(version)
    assert main() == 2
    bare = version.partition("+")[0]
    assert capsys.readouterr().err == (
        f"error: PyTorch {version} is installed, but titan needs 2.13 to 2.15; install one ({sys.executable} -m pip "
        f"install torch=={packages.TORCH_RUN[-1]}), or set TITAN_TORCH={bare} to run on this one all the same\n"
    )


def test_pip_is_not_looked_for_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setuptools would have the process import another distutils from then on, and warn where it has one."""
    asked: list[str] = []
    finder = SimpleNamespace(find_spec=lambda name, *_: asked.append(name))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    for version, words in (("26.0", [sys.executable, "-m", "pip"]), (None, ["python3", "-m", "pip", "--python"])):
        monkeypatch.setattr(packages, "version", lambda _, version=version: version)
        assert packages.install("hf").startswith(shlex.join(words) + " ")
    assert "pip" not in asked


def test_so_is_a_python_without_pytorch(installed, capsys) -> None:
    installed("")
    assert cli.main(PLAN) == 2
    assert "error: no PyTorch is installed, but titan needs 2.13 to 2.15; install one (" in capsys.readouterr().err


def test_one_that_was_asked_for_runs_with_a_remark(installed, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    installed("2.11.0+cu130")
    monkeypatch.setenv(packages.TORCH_CHOSEN, "2.12.1")
    with pytest.raises(packages.PluginError, match=r"set TITAN_TORCH=2\.11\.0"):
        packages.check_torch()
    monkeypatch.setenv(packages.TORCH_CHOSEN, "2.11.0")
    packages.check_torch()
    assert cli.main(PLAN) == 0
    assert capsys.readouterr().err.count("titan's tests were not run on PyTorch 2.11.0, but on 2.13.0, ") == 1


@pytest.mark.parametrize("version, told", [("2.15.0+cu132", 0), ("2.13.0", 0), ("2.14.0", 1), ("2.15.1+rocm7", 1)])
def test_one_in_the_range_that_was_not_run_is_said_once(version: str, told: int, installed, capsys) -> None:
    installed(version)
    assert cli.main(PLAN) == 0
    assert capsys.readouterr().err.count("titan's tests were not run on PyTorch") == told


def test_a_source_build_is_of_its_release(installed) -> None:
    installed("2.14.0a0+5228986c39.nv26.05")
    assert packages.torch_release() == (2, 14)
    packages.check_torch()


def test_what_is_for_the_gpu_machine_alone_is_marked_and_counted() -> None:
    """It goes when that machine has a PyTorch of the range."""
    folders = ("titan", "plugins", "planner", "inference", "testing", "bench", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sh")]
    marks = sum(file.read_text().count("Only for PyTorch 2.11") for file in files)
    words = ("no", "one", "two", "three", "four", "five")
    _, _, said = (ROOT / "docs" / "versions.md").read_text().partition('"Only for PyTorch 2.11"')
    assert words[marks] in re.findall(r"\w+", said.partition(". ")[0])
