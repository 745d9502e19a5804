"""Runs tests in a copy of the checkout, as it is or with a fault planted, and reads what pytest says of them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import ROOT, Fault

LIMIT_S = 400.0
"""Longest run of the tests of one fault; `tests/conftest.py` ends a test that hangs before."""

FAILED = 1
"""pytest's exit code when tests ran and some failed."""

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "*.egg-info", "build", "runs", "outputs", "gpu-bundle", "results"
)
_LINE = re.compile(r"(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """What pytest did. code: its exit code, or None past the limit.  failed: ids of tests that failed."""

    code: int | None
    failed: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Verdict:
    """Whether a fault was caught. by: the id of the test that failed first.  why: where none did, what happened."""

    fault: Fault
    by: str
    seconds: float
    why: str = ""

    @property
    def caught(self) -> bool:
        """Whether a test has failed with the fault."""
        return bool(self.by)


def copied(to: Path, source: Path = ROOT) -> Path:
    """Copy a checkout; returns the copy. Times stay, so that compiled modules beside the sources remain valid."""
    shutil.copytree(source, to, ignore=_NOT_COPIED, symlinks=True)
    for name in ("plugins", "configs"):
        # Installed, these folders are packages below titan. The links take precedence over those of the environment.
        link = to / "titan" / name
        if not link.is_symlink():
            link.symlink_to(Path("..", name))
    return to


def run_tests(root: Path, tests: Iterable[str], *words: str, limit_s: float = LIMIT_S) -> Ran:
    """Run tests in a copy of the checkout with the copy's own packages."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    command += ["-p", "tests.faults.inside", *words, *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "1000"}
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # its session: pytest and what its tests have started
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
        finally:
            _end_leftovers(root)
        file.seek(0)
        output = file.read()
    return Ran(code, tuple(_LINE.findall(output)), output)


def _end_leftovers(root: Path) -> None:
    """Kill processes that work in this copy: with some faults, ranks outlive the tests. Needs /proc, as on Linux."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink().is_relative_to(root):
                os.kill(int(place.name), signal.SIGKILL)


def judge(fault: Fault, source: Path, folder: Path) -> Verdict:
    """Plant a fault in a copy of its own, made of `source`, below `folder`, and run its tests there."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        root = copied(Path(place, "titan"), source)
        fault.plant(root)
        ran = run_tests(root, fault.tests, "-x")
    return verdict(fault, ran, time.perf_counter() - began)


def verdict(fault: Fault, ran: Ran, seconds: float) -> Verdict:
    """What a run of the tests of a fault says: a fault is caught by a test that fails, and by nothing else."""
    if ran.code == FAILED and ran.failed:
        return Verdict(fault, ran.failed[0], seconds)
    ended = {None: "tests did not end in time", 0: "all its tests pass"}.get(ran.code, f"pytest exit code {ran.code}")
    return Verdict(fault, "", seconds, ended if ran.code == 0 else f"{ended}:\n{_last_lines(ran.output)}")


def without_faults(tests: Sequence[str], source: Path) -> str:
    """Run tests as they are; what is wrong with them, empty if they pass."""
    ran = run_tests(source, tests, limit_s=LIMIT_S * 10)
    return "" if ran.code == 0 else _last_lines(ran.output)


def _last_lines(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-20:])
