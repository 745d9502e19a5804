"""Plugins by people whom titan never meets: packages that are built, installed and tested away from the repository."""

import re
from pathlib import Path

import pytest

from tests.wheels import ROOT, Environment, build

PACKAGE = ROOT / "examples" / "plugin_package"
FILES = ("pyproject.toml", "README.md", "src", "tests")

pytestmark = [pytest.mark.sweep, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """titan alone, from its wheel."""
    wheel = build(tmp_path_factory.mktemp("titan"))
    return Environment(tmp_path_factory.mktemp("environment"), [wheel])


def passed(environment: Environment, tests: Path) -> str:
    done = environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", at=tests, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_example_is_installed_and_passes_its_tests(installed: Environment, tmp_path: Path) -> None:
    copy = tmp_path / "example"
    copy.mkdir()
    installed.install(build(copy, PACKAGE, FILES))
    where = installed.run("python", "-c", "import titan, titan_example; print(titan.__file__)", at=tmp_path).stdout
    assert where.startswith(str(installed.folder)), where
    listed = installed.run("titan", "plugins", at=tmp_path).stdout
    assert all(f"  {name} " in listed for name in ("shift", "crew", "nesterov", "best")), listed
    assert " passed" in passed(installed, copy)


def test_a_page_is_followed_from_an_empty_folder(installed: Environment, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "plugins.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert lines[0].startswith("titan plugins new ")
    for line in lines:
        short = line.replace("--train.steps 50", "--train.steps 3")
        done = installed.run("bash", "-c", short, at=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_a_new_package_is_installed_and_passes_its_test(installed: Environment, tmp_path: Path) -> None:
    words = ("plugins", "new", "my_average", "--kind", "technique", "--package", "mine")
    done = installed.run("titan", *words, at=tmp_path)
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "copy"
    copy.mkdir()
    installed.install(build(copy, tmp_path / "mine", ("pyproject.toml", "src", "tests")))
    assert " passed" in passed(installed, copy)
