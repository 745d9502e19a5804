"""What `titan plugins new` writes passes the test that it writes beside it, and nothing is overwritten."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.sweeps import but_sweep
from titan.skeletons.write import FOLDER, KINDS

RUNS = "curve or layouts or run or row or average or documents"
"""Words in the names of tests that train."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Kind -> the command that trains with a new plugin of it; their files and tests are in the folder `[""]`."""
    folder = tmp_path_factory.mktemp("written")
    printed = {"": [str(folder)]}
    for kind in KINDS:
        done = run_titan(["plugins", "new", f"my_{kind}", "--kind", kind], folder)
        assert done.returncode == 0, done.stderr
        test, train = done.stdout.splitlines()[-2:]
        assert test == f"{sys.executable} -m pytest test_my_{kind}.py"
        printed[kind] = shlex.split(train)
    return printed


def passed(folder: str, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_each_kind_has_a_skeleton_and_a_test() -> None:
    for part in ("plugin", "test"):
        assert {path.stem for path in (FOLDER / part).glob("*.py")} == {*KINDS, "__init__"}


def test_skeletons_pass_their_tests_without_training(commands: dict[str, list[str]]) -> None:
    said = passed(commands[""][0], "-k", f"not ({RUNS})")
    assert re.search(r"^[4-9]\d passed, \d\d deselected", said, re.MULTILINE), said


@pytest.mark.sweep
def test_skeletons_pass_their_tests(commands: dict[str, list[str]]) -> None:
    passed(commands[""][0])


@pytest.mark.parametrize("kind", but_sweep(KINDS, *(set(KINDS) - {"technique", "dataset"})))
def test_the_printed_command_trains(kind: str, commands: dict[str, list[str]]) -> None:
    program, *words = commands[kind]
    short = ("--train.steps", "2", "--run.name", kind, "--data.cache", "cache")
    run = run_titan([*words, *short], Path(commands[""][0]))
    assert program == "titan" and run.returncode == 0, run.stderr
    log = (Path(commands[""][0]) / "runs" / kind / "config.toml").read_text()
    assert f"my_{kind}" in log


def test_a_package_is_complete(tmp_path: Path) -> None:
    done = run_titan(["plugins", "new", "my_clamp", "--kind", "technique", "--package", "clamp"], tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "clamp/pyproject.toml", "clamp/src/titan_my_clamp/__init__.py", "clamp/src/titan_my_clamp/my_clamp.py",
        "clamp/tests/test_my_clamp.py",
    ]  # fmt: skip
    assert 'my_clamp = "titan_my_clamp.my_clamp"' in (tmp_path / "clamp" / "pyproject.toml").read_text()
    assert "PLUGINS = ()" in (tmp_path / "clamp" / "tests" / "test_my_clamp.py").read_text()
    commands = [line.partition(" -m ")[2] for line in done.stdout.splitlines()[-2:]]
    assert commands == ["pip install -e clamp", "pytest clamp"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "NAME is missing: titan plugins new NAME --kind KIND [--package DIR]"),
        (["x"], "--kind is missing: titan plugins new NAME --kind KIND"),
        (["x", "--kind", "los"], "invalid choice: 'los' (choose from"),
        (["Bad-name", "--kind", "loss"], "plugin name 'Bad-name' must be lower-case letters"),
        (["class", "--kind", "loss"], "plugin name 'class' must be"),
        (["../x", "--kind", "loss"], "plugin name '../x' must be"),
        (["test_x", "--kind", "loss"], "begins with test_, so pytest would take the plugin for a test"),
        (["every", "--kind", "tracker"], "'every' is a key of [metrics], where a tracker has its table"),
        (["path", "--kind", "technique"], "'path' is a key of [plugins], where a technique has its table"),
        (["numpy", "--kind", "loss"], "is the name of a Python module that is installed"),
        (["linear", "--kind", "lr_schedule"], "is taken by the lr_schedule Linear of titan.plugins.schedules.linear"),
    ],
)
def test_what_cannot_be_written_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = run_titan(["plugins", "new", *words], tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_words_of_a_new_plugin_without_new_are_refused(tmp_path: Path) -> None:
    done = run_titan(["plugins", "cosine", "--kind", "lr_schedule"], tmp_path)
    assert done.returncode == 2 and "NAME, --kind and --package follow new" in done.stderr


@pytest.mark.parametrize("file", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("# work of days")
    done = run_titan(["plugins", "new", "mine", "--kind", "loss"], tmp_path)
    assert done.returncode == 2 and f"{file}: exists, and is not overwritten" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "# work of days"


def test_files_as_json(tmp_path: Path) -> None:
    done = run_titan(["plugins", "new", "mine", "--kind", "loss", "--json"], tmp_path)
    assert json.loads(done.stdout) == {"files": ["mine.py", "test_mine.py"]}
