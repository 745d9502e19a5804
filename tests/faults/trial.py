"""Runs tests in a copy of the checkout, as it is or with a fault planted, and reads what pytest says of them."""

import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.testing import faults
from titan.testing.faults import LIMIT_S, Fault, Ran, last_lines

ROOT = Path(__file__).resolve().parents[2]
"""The checkout that this module is part of."""

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "*.egg-info", "build", "runs", "outputs", "gpu-bundle", "results"
)


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


FOLDERS = ("titan", "plugins", "planner", "inference", "testing", "configs")
"""What is installed: the package titan, and the folders that are packages below it."""


def copied(to: Path, source: Path = ROOT) -> Path:
    """Copy a checkout; returns the copy. Times stay, so that compiled modules beside the sources remain valid."""
    shutil.copytree(source, to, ignore=_NOT_COPIED, symlinks=True)
    for name in FOLDERS[1:]:
        # Installed, these folders are packages below titan. The links take precedence over those of the environment.
        link = to / "titan" / name
        if not link.is_symlink():
            link.symlink_to(Path("..", name))
    return to


def run_tests(root: Path, tests: Iterable[str], *words: str, limit_s: float = LIMIT_S) -> Ran:
    """Run tests in a copy of the checkout with the copy's own packages."""
    own = {"PYTHONPATH": str(root)}
    return faults.run_tests(root, tests, "-p", "tests.faults.inside", *words, environment=own, limit_s=limit_s)


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
    if ran.is_failure:
        return Verdict(fault, ran.failed[0], seconds)
    return Verdict(fault, "", seconds, ran.how if ran.code == 0 else f"{ran.how}:\n{last_lines(ran.output)}")


def without_faults(tests: Sequence[str], source: Path) -> str:
    """Run tests as they are; what is wrong with them, empty if they pass."""
    ran = run_tests(source, tests, limit_s=LIMIT_S * 10)
    return "" if ran.code == 0 else last_lines(ran.output)
