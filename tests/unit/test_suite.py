"""What `tests/conftest.py` and `make test` do for every test, and which cases are sweeps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
