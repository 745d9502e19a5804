"""`run_train.sh`, `scripts/python.sh` and the Makefile, with Pythons that only write down how they were called."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import ROOT, executable

TOOLS = ("bash", "cat", "chmod", "cksum", "cp", "cut", "dirname", "env", "flock", "make", "mkdir", "paste", "rm", "sed")
TOOLS += ("basename", "kill", "sh", "sort", "tr", "true")

SAYS_ITS_WORDS = '#!/bin/sh\n[ "$1" = - ] || { echo "$PWD"; printf "<%s>" "$@"; exit 75; }\n'
"""A Python that has titan."""

FAKE_PYTHON = """\
#!/bin/sh
# Answers like a Python {version}; writes every other call to the file $CALLS.
case "$1" in
    -c) case "$2" in *version.split*) echo {version} at "$0"; exit 0 ;; *) exit {too_old} ;; esac ;;
    -) exit {lacks_titan} ;;
esac
case "$*" in
    *"-m pip --version") exit 0 ;;
    "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; exit 0 ;;
esac
echo "$*" >>"$CALLS"
exit "${{FAILS:-0}}"
"""


@dataclass
class House:
    """A copy of the repository's scripts, and a machine with few tools, a Python 3.11 and those a test puts there."""

    root: Path
    bin: Path
    calls_file: Path

    def python(self, name: str = "python3", version: str = "3.11.7", lacks_titan: int = 1) -> Path:
        """Put a Python on the PATH, in the place of one of that name."""
        too_old = int(version.startswith(("2.", "3.9", "3.10", "3.14")))
        text = FAKE_PYTHON.format(version=version, too_old=too_old, lacks_titan=lacks_titan)
        return executable(self.bin / name, text)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "CALLS": str(self.calls_file), **more}

    def run(self, *command: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**env)
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    def calls(self) -> list[str]:
        """What the Pythons were called with since the last look."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return text.splitlines()

    @property
    def setup(self) -> Path:
        return self.root / "scripts" / "python.sh"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    root, machine = tmp_path / "a house", tmp_path / "bin"
    machine.mkdir()
    for tool in TOOLS:
        if (found := shutil.which(tool)) is not None:
            (machine / tool).symlink_to(found)
    for name in ("run_train.sh", "Makefile", "pyproject.toml", "constraints.txt", "scripts/python.sh"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    house = House(root, machine, tmp_path / "calls")
    house.python()
    yield house


def _install(house: House, extras: str = "", constraints: str = "constraints.txt") -> str:
    constraint = f"--constraint {house.root}/{constraints}"
    return f"-m pip install -qq --disable-pip-version-check {constraint} --editable {house.root}{extras}"


@pytest.mark.parametrize("name", ["run_train.sh", "scripts/python.sh", ".ci/run"])
def test_scripts_parse_and_can_be_run(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / name], check=True)
    assert os.access(ROOT / name, os.X_OK)


def test_sets_up_once_and_then_starts_at_once(house: House) -> None:
    first, second = house.run(house.setup), house.run(house.setup)
    assert first.stdout == second.stdout == f"{house.root}/.venv/bin/python\n"
    assert (first.stderr, second.stderr) == ("setting up .venv (once, about a minute)\n", "")
    assert house.calls() == [_install(house)]


def test_a_new_extra_is_added_to_those_installed(house: House) -> None:
    house.run(house.setup)
    house.run(house.setup, "dev", "float8")
    house.run(house.setup, "float8")
    house.run(house.setup)
    assert house.calls() == [_install(house), _install(house, "[dev,float8]")]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_what_is_changed_is_installed_again_with_its_extras(name: str, house: House) -> None:
    house.run(house.setup, "dev")
    (house.root / name).write_text("[project]\n")
    house.run(house.setup)
    assert house.calls() == [_install(house, "[dev]")] * 2


def test_another_pytorch_has_an_environment_of_its_own(house: House) -> None:
    house.run(house.setup)
    other = house.run(house.setup, "dev", TITAN_TORCH="2.15.0")
    assert other.stdout == f"{house.root}/.venv-2.15.0/bin/python\n"
    assert other.stderr == "setting up .venv-2.15.0 (once, about a minute)\n"
    assert house.calls() == [_install(house), _install(house, "[dev]", ".venv-2.15.0/constraints.txt")]
    pinned = (house.root / ".venv-2.15.0" / "constraints.txt").read_text()
    assert pinned == (ROOT / "constraints.txt").read_text().replace("torch==2.13.0\n", "torch==2.15.0\n")
    assert house.run(house.setup, TITAN_TORCH="2.15.0").stdout == other.stdout and not house.calls()


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0", "2.9.0", "2.15", "02.15.0", "../2.15.0", "newest"])
def test_a_pytorch_outside_the_range_is_one_clear_line(version: str, house: House) -> None:
    done = house.run(house.setup, TITAN_TORCH=version)
    assert (done.returncode, done.stdout, house.calls()) == (2, "", [])
    assert done.stderr.startswith(f"error: TITAN_TORCH={version}: ") and done.stderr.count("\n") == 1
    told = "titan needs PyTorch >=2.13,<2.16" if version in ("2.12.1", "2.16.0", "2.9.0") else "such as 2.15.0"
    assert told in done.stderr


def test_a_moved_repository_is_installed_again(house: House) -> None:
    house.run(house.setup)
    house.root = house.root.rename(house.root.with_name("elsewhere"))
    house.calls()
    house.run(house.setup)
    assert house.calls() == [_install(house)]


def test_a_broken_setup_says_so_and_is_done_again(house: House) -> None:
    broken = house.run(house.setup, FAILS="1")
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "error: setting up .venv failed" in broken.stderr
    house.run(house.setup)
    assert house.calls() == [_install(house)] * 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here: first calls at once are not kept apart")
def test_two_first_calls_at_once_install_once(house: House) -> None:
    both = [subprocess.Popen([house.setup], env=house.environment(), stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert {process.communicate()[0] for process in both} == {f"{house.root}/.venv/bin/python\n"}
    assert house.calls() == [_install(house)]


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here: first calls at once are not kept apart")
def test_a_first_call_says_that_it_waits_for_another(house: House) -> None:
    folder = os.open(house.root, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    process = subprocess.Popen([house.setup], env=house.environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)  # it would take less: this Python only writes down how it is called
        assert house.calls() == []
    finally:
        os.close(folder)
    assert said == f"waiting for another process that sets up an environment in {house.root}\n"
    assert "setting up .venv" in process.communicate()[1]
    assert (process.returncode, house.calls()) == (0, [_install(house)])


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "NNODES", "PET_NNODES"])
def test_a_job_of_many_processes_does_not_set_up(house: House, name: str) -> None:
    """256 nodes would install into one folder at once. What is set up before is found by all."""
    done = house.run(house.setup, **{name: "256"})
    assert (done.returncode, done.stdout, house.calls()) == (2, "", [])
    what = f"error: {house.root}/.venv is not set up, and 256 processes of this job start at once; run scripts/"
    assert done.stderr.startswith(what) and done.stderr.count("\n") == 1
    assert house.run(house.setup, **{name: "1"}).returncode == 0
    assert house.run(house.setup, **{name: "256"}).stdout == f"{house.root}/.venv/bin/python\n"


@pytest.fixture
def reader(house: House) -> Iterator[House]:
    """A house in a folder that everybody may read, for a user who may not write it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for path in (house.root, house.bin):
            shutil.copytree(path, place / path.name, symlinks=True)
        yield House(place / house.root.name, place / house.bin.name, place / "calls")


def _lock(house: House) -> dict[str, Any]:
    """Take all right to write away; the arguments of `subprocess.run` for somebody without it."""
    for path in (house.root.parent, *house.root.parent.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o555)
    return {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}


def test_a_read_only_install_runs_when_set_up(reader: House) -> None:
    assert reader.run(reader.setup).returncode == 0
    (reader.root / ".venv" / "bin" / "python").write_text(SAYS_ITS_WORDS)
    other, words = _lock(reader), [reader.root / "run_train.sh", "--run.dir", "/scratch"]
    environment = reader.environment(SLURM_STEP_NUM_TASKS="256")
    done = subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, **other)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout == "/\n<-P><-m><titan.launch><--run.dir></scratch>"


def test_a_read_only_install_that_is_not_set_up_says_so(reader: House) -> None:
    other = _lock(reader)
    done = subprocess.run([reader.setup], env=reader.environment(), capture_output=True, text=True, **other)
    assert (done.returncode, done.stdout) == (2, "")
    what = f"error: {reader.root}/.venv is not set up, and {reader.root} is read-only; set it up where it can be"
    assert done.stderr.startswith(what) and done.stderr.count("\n") == 1


def test_an_active_environment_that_has_titan_is_used_unless_titan_python_names_another(house: House) -> None:
    python, mine = house.python(lacks_titan=0), house.python("mine", lacks_titan=0)
    assert house.run(house.setup).stdout == f"{python}\n"
    assert house.run(house.setup, TITAN_PYTHON=str(mine)).stdout == f"{mine}\n"
    assert not (house.root / ".venv").exists()


def test_titan_python_without_titan_is_one_clear_line(house: House) -> None:
    mine = house.python("mine")
    done = house.run(house.setup, "dev", TITAN_PYTHON=str(mine))
    what = f"error: TITAN_PYTHON={mine} has no titan with dev; run: {mine} -m pip install -e '{house.root}[dev]'"
    assert done.returncode == 2 and done.stderr.startswith(what) and done.stderr.count("\n") == 1


def test_an_old_python_is_one_clear_line_unless_there_is_a_newer_one_beside_it(house: House) -> None:
    old = house.python(version="3.9.2")
    done = house.run(house.setup)
    said = f"error: titan needs Python 3.11 to 3.13; found 3.9.2 at {old}\n"
    assert (done.returncode, done.stderr) == (2, said)
    house.python(version="3.14.0")
    assert house.run(house.setup).stderr == said.replace("3.9.2", "3.14.0")
    house.python("python3.12", version="3.12.1")
    assert house.run(house.setup).returncode == 0


def test_a_real_python_is_asked_whether_it_has_titan(house: House, tmp_path: Path) -> None:
    real = {"TITAN_PYTHON": sys.executable, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    assert house.run(house.setup, "dev", **real).stdout == f"{sys.executable}\n"
    venv.create(tmp_path / "bare", symlinks=True)
    bare = house.run(house.setup, cwd=ROOT, TITAN_PYTHON=str(tmp_path / "bare" / "bin" / "python"))
    assert bare.returncode == 2, "the titan/ that lies in the working directory is no installed titan"


def test_run_train_keeps_the_working_directory_and_the_arguments(house: House, tmp_path: Path) -> None:
    mine = executable(house.bin / "mine", SAYS_ITS_WORDS)
    done = house.run(house.root / "run_train.sh", "--run.name", "two words", cwd=tmp_path, TITAN_PYTHON=str(mine))
    assert done.returncode == 75
    assert done.stdout == f"{tmp_path}\n<-P><-m><titan.launch><--run.name><two words>"


WAITED = """\
#!{bash}
# A Python that gets a signal while it is looked for, as does the script that looks for it, and another at its start.
[ "$1" = - ] && exec kill -USR1 $$ $PPID
kill -TERM $$
exec {python} -c "import os, signal; print(*signal.sigpending(), os.environ.get('TITAN_BLOCKED'))"
"""


def test_signals_wait_until_titan_listens(house: House) -> None:
    mine = executable(house.bin / "mine", WAITED.format(bash=shutil.which("bash"), python=sys.executable))
    done = house.run(house.root / "run_train.sh", TITAN_PYTHON=str(mine))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{signal.SIGTERM.value} None\n", "")


def test_run_train_as_a_batch_script_finds_the_repository(house: House, tmp_path: Path) -> None:
    mine = house.python("mine", lacks_titan=0)
    copy = shutil.copy(house.root / "run_train.sh", tmp_path / "slurm_script")
    done = house.run(copy, cwd=tmp_path, TITAN_PYTHON=str(mine), SLURM_SUBMIT_DIR=str(house.root))
    assert done.returncode == 0
    assert house.calls() == ["-P -m titan.launch"]


def test_make_passes_arguments_on(house: House) -> None:
    for target in ("test", "sweep"):
        house.run("make", target, "ARGS=-k mesh", cwd=house.root)
    *installed, tests, sweeps = house.calls()
    assert installed == [_install(house, "[dev,float8,hf,plot,tune,wandb]")]
    assert tests.startswith("-m pytest -n 2 ") and tests.endswith(" -p tests.cost.summary -k mesh")
    assert sweeps == tests.replace(" -k", " -m sweep -k")


def test_make_lists_its_targets(house: House) -> None:
    listed = house.run("make", cwd=house.root).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [
        "help",
        "test",
        "sweep",
        "check",
        "matrix",
        "format",
        "bench",
    ]


def test_ci_runs_the_readmes_command_and_then_the_sweeps() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-3:] == ["make test", "make sweep", "make check"]
    assert "make test" in (ROOT / "README.md").read_text()
