"""What `tests/conftest.py` and `make test` do for every test, what is swept, what tests cost, how commands are run."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.results import about
from tests.commands import run_titan
from tests.cost.__main__ import WORKERS, _summed
from tests.cost.clock import Clock
from tests.cost.summary import summary
from tests.jobs import LLAMA
from tests.sweeps import but_sweep, sweep_but

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests import conftest
from tests.conftest import *

conftest.LIMIT = 1.0
"""

HANGS = """
import threading

def test_that_hangs():
    threading.Event().wait()
"""

OTHERS = """
import pytest

def test_that_passes():
    pass

@pytest.mark.sweep
def test_of_a_sweep():
    raise AssertionError("runs with -m sweep alone")
"""


def _options() -> list[str]:
    """The options that the Makefile gives to pytest."""
    (line,) = re.findall(r"^in_two = (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return str(line).split()


@pytest.mark.sweep
def test_a_test_that_hangs_is_named_with_its_stacks_and_ends_the_session(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "test_others.py").write_text(OTHERS)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), *_options(), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "Timeout (0:00:01)!" in done.stderr, done.stdout + done.stderr
    assert "in test_that_hangs" in done.stderr
    assert re.search(r"worker 'gw\d' crashed while running '.*test_that_hangs'", done.stdout)
    assert "1 failed, 1 passed" in done.stdout and done.returncode != 0


def test_cases_of_a_sweep_are_marked_and_the_others_are_not() -> None:
    first, second = but_sweep([(1, {"a": 2}), (3, {})], (3, {}))
    assert first == (1, {"a": 2})
    assert second.values == (3, {}) and [mark.name for mark in second.marks] == ["sweep"]
    assert sweep_but("ab", "a") == but_sweep("ab", "b")


@pytest.mark.parametrize(("swept", "said"), [(("c",), "no case of the test"), (("a", "b"), "at least one case")])
def test_a_sweep_of_no_case_or_of_every_case_is_refused(swept: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        but_sweep("ab", *swept)


@pytest.mark.parametrize(("kept", "said"), [(("c",), "no case of the test"), ((), "at least one case")])
def test_what_is_kept_of_a_sweep_is_a_case_and_not_nothing(kept: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        sweep_but("ab", *kept)


def test_each_moment_counts_for_the_innermost_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[0] / 2)
    clock = Clock()

    def work(seconds: float) -> None:
        now[0] += seconds

    save = clock.wrapped(work, "saves")
    work(1)
    with clock.counting("steps"):
        work(2)
        save(4)
        work(8)
    with pytest.raises(KeyError), clock.counting("build"):
        work(16)
        raise KeyError
    work(32)
    assert clock.take() == {"rest": [33, 16.5], "steps": [10, 5], "saves": [4, 2], "build": [16, 8]}
    work(64)
    assert clock.take() == {"rest": [64, 32]}


def test_ranks_count_for_the_test_that_started_them() -> None:
    lines: list[dict[str, Any]] = [
        {"test": "a.py::one", "wall": 3.0, "spent": {"waiting for ranks": [2.0, 0.1]}, "commands_cpu": 0.0},
        *({"test": "a.py::one", "rank": str(rank), "spent": {"steps": [2.0, 1.5]}} for rank in (0, 1)),
        {"test": "b.py::two", "wall": 5.0, "spent": {"commands": [4.0, 0.0], "rest": [1.0, 1.0]}, "commands_cpu": 2.0},
    ]
    found = _summed(lines, 6.0, 0.25)
    assert list(found["files"].items()) == [("b.py", [5.0, 3.0, 1]), ("a.py", [3.0, 3.1, 1])]
    assert found["worker_s"] == 8 and found["cpu_s"] == 6.1 and found["tests"] == 2 and found["idle"] == 0.25
    assert found["kinds"]["steps"] == [4.0, 3.0] and found["kinds"]["commands"] == [4.0, 2.0]


COMMITTED = {**about(), "files": {"a.py": [100.0, 90.0, 6], "b.py": [20.0, 9.0, 4]}, "tests": 10, "pace_ms": 50.0}


def test_a_session_ends_with_its_dearest_files_beside_the_committed_seconds() -> None:
    said = summary({"b.py": 30.0, "a.py": 110.0}, 10, COMMITTED, 60.0)
    assert said == [
        "a.py   110.0 s, committed   100.0 s",
        "b.py    30.0 s, committed    20.0 s",
        "10 tests 140 s, committed 10 tests 120 s",
        "the machine took 1.20 times as long for the same as when that was measured",
    ]


def test_growth_by_more_than_a_fifth_is_said() -> None:
    seconds = {"a.py": 121.0, "new.py": 25.0}
    *_, said = summary(seconds, 11, COMMITTED, 50.0)
    assert said.startswith("the tests take 1.22 times the committed seconds, more than 1.2 at this speed")
    assert not any("cheaper" in line for line in summary(seconds, 11, COMMITTED, 52.0))


def test_a_part_of_the_tests_is_not_compared_with_all() -> None:
    assert summary({"a.py": 1000.0}, 8, COMMITTED, 50.0)[1:] == [
        "8 of some 10 tests: the total is compared when all run"
    ]


def test_seconds_of_another_machine_are_not_called_growth() -> None:
    said = summary({"a.py": 1000.0}, 10, {**COMMITTED, "device": "another"}, 50.0)
    assert said[-1].startswith("committed was measured on another machine") and "cheaper" not in "".join(said)


def test_it_runs_the_tests_as_make_does() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"in_two = {' '.join(WORKERS)} " in makefile


def test_a_command_stands_in_its_folder_and_its_streams_are_apart(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{LLAMA}"\n[run]\nname = "mine"\n')
    done = run_titan(["config", "mine.toml", "--json", "--data.path", "x"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and '"name": "mine"' in done.stdout
    refused = run_titan(["config", "none.toml"], tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "") and "none.toml" in refused.stderr


def test_variables_reach_a_command_and_nothing_of_it_comes_back(tmp_path: Path) -> None:
    words = ["train", "--config", str(LLAMA), "--data.path", "nowhere"]
    assert "NPROC = 'none'" in run_titan(words, tmp_path, {"NPROC": "none"}).stderr
    assert "nowhere" in run_titan(words, tmp_path).stderr


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_titan(["plan", "--list-clusters"], tmp_path, timeout=0.0)
