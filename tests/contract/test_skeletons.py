"""What `titan plugins new` writes passes the test that it writes beside it, and nothing is overwritten."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.commands import run_titan
from titan.testing.commands.skeleton import KINDS, SKELETONS, skeleton

SHOWN = ("model", "technique", "optimizer")
"""Kinds that pages of the documentation train with, in tests/dist/test_docs.py: here their command is read alone."""


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


def test_each_kind_has_a_skeleton_and_a_test() -> None:
    for part in ("plugin", "test"):
        assert {path.stem for path in (SKELETONS / part).glob("*.py")} == {*KINDS, "__init__"}


@pytest.mark.sweep
def test_skeletons_pass_their_tests(commands: dict[str, list[str]]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(command, cwd=commands[""][0], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SHOWN)
def test_the_printed_command_is_a_job(kind: str, commands: dict[str, list[str]]) -> None:
    _, train, *words = commands[kind]
    read = run_titan(["config", *words], Path(commands[""][0]))
    assert train == "train" and read.returncode == 0, read.stderr
    assert f"my_{kind}" in read.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SHOWN])
def test_the_printed_command_trains(kind: str, commands: dict[str, list[str]]) -> None:
    program, *words = commands[kind]
    short = ("--train.steps", "2", "--run.name", kind, "--data.cache", "cache")
    run = run_titan([*words, *short], Path(commands[""][0]))
    assert Path(program).name == "titan" and run.returncode == 0, run.stderr
    assert f"my_{kind}" in Path(commands[""][0], "runs", kind, "config.toml").read_text()


def test_a_package_is_complete(tmp_path: Path) -> None:
    done = run_titan(["plugins", "new", "my_clamp", "--kind", "technique", "--package", "clamp"], tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "clamp/pyproject.toml",
        "clamp/src/titan_my_clamp/__init__.py",
        "clamp/src/titan_my_clamp/my_clamp.py",
        "clamp/tests/test_my_clamp.py",
    ]
    assert 'my_clamp = "titan_my_clamp.my_clamp"' in (tmp_path / "clamp" / "pyproject.toml").read_text()
    assert "PLUGINS = ()" in (tmp_path / "clamp" / "tests" / "test_my_clamp.py").read_text()
    commands = [line.partition(" -m ")[2] for line in done.stdout.splitlines()[-2:]]
    assert commands == ["pip install -e clamp", "pytest clamp"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_package_takes_another_plugin(ending: str, tmp_path: Path) -> None:
    new = ("plugins", "new")
    assert run_titan([*new, "first", "--kind", "loss", "--package", "mine"], tmp_path).returncode == 0
    project = tmp_path / "mine" / "pyproject.toml"
    before = project.read_bytes().replace(b"\n", ending.encode())
    project.write_bytes(before)
    done = run_titan([*new, "second", "--kind", "tracker", "--package", "mine"], tmp_path)
    assert done.returncode == 0, done.stderr
    own, test = "mine/src/titan_first/second.py", "mine/tests/test_second.py"
    assert done.stdout.splitlines()[:3] == [
        f"wrote {own}",
        f"wrote {test}",
        "added second to the entry points in mine/pyproject.toml",
    ]
    assert "class Second(Tracker)" in (tmp_path / own).read_text() and (tmp_path / test).is_file()
    after = project.read_bytes()
    line = f'second = "titan_first.second"{ending}'.encode()
    assert after.replace(line, b"") == before and after != before
    entries = tomllib.loads(after.decode())["project"]["entry-points"]["titan.plugins"]
    assert entries == {"first": "titan_first.first", "second": "titan_first.second"}
    again = run_titan([*new, "second", "--kind", "tracker", "--package", "mine"], tmp_path)
    assert again.returncode == 2 and "has an entry second in [project.entry-points" in again.stderr


@pytest.mark.parametrize(
    ("project", "said"),
    [
        ("[project]\nname = 'x'\n", "mine/pyproject.toml: has no entries in a table [project.entry-points."),
        ("[project.entry-points.'titan.plugins']\na = 'gone.a'\n", "there is no folder mine/src/gone"),
        ("[project", "mine/pyproject.toml: is no TOML"),
    ],
)
def test_a_package_of_another_form_is_left_as_it_is(project: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text(project)
    done = run_titan(["plugins", "new", "second", "--kind", "loss", "--package", "mine"], tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "pyproject.toml"]
    assert (tmp_path / "mine" / "pyproject.toml").read_text() == project


def test_a_name_that_a_plugin_of_the_path_has_is_taken(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(skeleton("plugin", "loss", "mine"))
    done = run_titan(["plugins", "new", "mine", "--kind", "loss", "--path", "plugins"], tmp_path)
    assert done.returncode == 2 and "plugin name 'mine' is taken by the loss Mine" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plugins"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("new", "NAME is missing: titan plugins new NAME --kind KIND [--package DIR]"),
        ("new x", "--kind is missing: titan plugins new NAME --kind KIND"),
        ("new x --kind los", "invalid choice: 'los' (choose from"),
        ("new Bad-name --kind loss", "plugin name 'Bad-name' must be lower-case letters"),
        ("new class --kind loss", "plugin name 'class' must be"),
        ("new ../x --kind loss", "plugin name '../x' must be"),
        ("new new --kind loss", "plugin name 'new' is what `titan plugins` takes for"),
        ("new true --kind loss", "would give the class True, a name that its file uses for something else"),
        ("new feed_forward --kind model", "would give the class FeedForward"),
        ("new test_x --kind loss", "begins with test_, so pytest would take the plugin for a test"),
        ("new every --kind tracker", "'every' is a key of [metrics], where a tracker has its table"),
        ("new path --kind technique", "'path' is a key of [plugins], where a technique has its table"),
        ("new numpy --kind loss", "is the name of a Python module that is installed"),
        ("new linear --kind lr_schedule", "is taken by the lr_schedule Linear of titan.plugins.schedules.linear"),
        ("cosine --kind lr_schedule", "NAME, --kind and --package follow new"),
    ],
)
def test_what_cannot_be_written_is_refused(words: str, said: str, tmp_path: Path) -> None:
    done = run_titan(["plugins", *words.split()], tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


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
