"""Faults planted in a copy of a package, to see that a test notices them.

    assert_caught(ROOT, "src/mine/scale.py::Scale.__call__", "x * scale", "x / scale", "tests/test_scale.py")

A fault is a small change of one function. A test that passes with the fault, or fails without it, catches nothing.
"""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from titan.packages import install
from titan.testing.syntax import Piece, replaced, unknown_names

LIMIT_S = 400.0
"""Longest run of the tests of one fault."""

FAILED = 1
"""pytest's exit code when tests ran and some failed."""

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "build", "runs")
_LINE = re.compile(r"^(?:SUB)?(?:FAILED|ERROR)\S* (?!collecting)(.+?)(?: - .*)?$", re.MULTILINE)
_INSIDE = "TITAN_FAULT"
"""Variable of the environment of tests that `run_tests` runs."""


@dataclass(frozen=True)
class Fault:
    """A change of a source file that a test must notice.

    name: what is wrong then.  place: a source file below the root of the package, and a function in it, as in
    "src/mine/scale.py::Scale.__call__".  old: code in that function; its names stand for any names.  new: its
    replacement.  tests: ids of the tests that notice it, the narrowest there are; each passes without it.
    nth: which of how many pieces of this syntax in the function. `titan.testing.syntax` says more of `old` and `new`.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    nth: tuple[int, int] = (1, 1)

    @property
    def file(self) -> str:
        """The source file, below the root of the package."""
        return self.place.partition("::")[0]

    def planted(self, root: Path) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: there is no such file below the root, the function does not have the old code exactly once, or
                the new code makes no module, changes nothing or has an unknown name.
        """
        try:
            function, piece = self.place.partition("::")[2], Piece(self.old, self.new, *self.nth)
            source = _source(root, self.file)
            changed = replaced(source, function, piece)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{self.name}: {self.file}: {error}") from None
        if more := unknown_names(changed) - unknown_names(source):
            raise ValueError(f"{self.name}: {self.file} has nothing that is called {' or '.join(sorted(more))}")
        return changed

    def plant(self, root: Path) -> None:
        """Write the fault into a copy of the package."""
        changed = self.planted(root)
        (root / self.file).write_text(changed, encoding="utf-8")


def _source(root: Path, file: str) -> str:
    """The text of a file below the root, to which no link leads from elsewhere: it is to be written to."""
    path = (root / file).resolve()
    if not (path.is_file() and path.is_relative_to(root.resolve())):
        raise ValueError(f"no such file lies below {root}; a place is a file and a function, as in mine.py::Mine.step")
    with tokenize.open(path) as text:  # in its own encoding
        return text.read()


def assert_caught(package: Path, place: str, old: str, new: str, test: str) -> None:
    """Assert that a test passes as the package is, and fails where `new` replaces `old` in one of its functions.

    Both runs are in a copy of the package, whose modules come before those that are installed. In both, the file has no
    comments, and its lines are those of `ast.unparse`. Folders named build or runs are not copied.

    Args:
        package: folder of the package, or of a single plugin file and its test. Modules lie in it or in its src/.
        place: the source file, below the folder, and the function, as in "mine.py::Mine.step"; "mine.py::Mine" and
            "mine.py::" for lines of a class and of the module that are in no function. Where the file has no function
            of that name, the one whose names fit best is taken, with a warning.
        old: an expression or statements that the function has once. Their names stand for any names, and a body of
            `...` for any body.
        new: the replacement, with the names of `old`; empty to delete statements.
        test: id of a test, below the folder, as for pytest; not of one that calls this.

    Raises:
        AssertionError: the test fails without the fault, or does not fail with it; holds the end of pytest's output.
        ValueError: see `Fault.planted`; or the test lies elsewhere.
        ModuleNotFoundError: pytest is not installed.
    """
    if find_spec("pytest") is None:
        raise ModuleNotFoundError(f"assert_caught runs pytest, which is not installed; run {install('testing')}")
    if _INSIDE in os.environ:
        raise AssertionError("a test that calls assert_caught is run by assert_caught; give it the id of another test")
    package = Path(package).resolve()  # "." has no name
    fault = Fault(f"{old!r} replaced by {new!r}", place, old, new, (test,))
    fault.planted(package)
    if not (package / test.partition("::")[0]).resolve().is_relative_to(package):
        raise ValueError(f"{test} does not lie below {package}")
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as place:
        root = Path(shutil.copytree(package, Path(place, package.name), ignore=_NOT_COPIED, symlinks=True))
        path = os.pathsep.join(filter(None, [str(root / "src"), str(root), os.environ.get("PYTHONPATH")]))
        # No compiled modules: one of the same second and size would be taken for that of the changed source.
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        (root / fault.file).write_text(ast.unparse(ast.parse(_source(root, fault.file))), encoding="utf-8")
        sound = run_tests(root, fault.tests, environment=own)
        assert sound.code == 0, f"without a fault, {sound.how}:\n{last_lines(sound.output)}"
        fault.plant(root)
        ran = run_tests(root, fault.tests, "-x", environment=own)
    assert ran.is_failure, f"{test} is to fail with {fault.name}, but {ran.how}:\n{last_lines(ran.output)}"


@dataclass(frozen=True)
class Ran:
    """What pytest did. code: its exit code, or None past the limit.  failed: ids of tests that failed."""

    code: int | None
    failed: tuple[str, ...]
    output: str

    @property
    def is_failure(self) -> bool:
        """Whether a test has failed."""
        return self.code == FAILED and bool(self.failed)

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.is_failure:
            return f"{self.failed[0]} fails"
        if self.code is not None and self.code < 0:
            return f"pytest was killed by {signal.Signals(-self.code).name}"
        endings = {None: "the tests did not end in time", 0: "all tests pass"}
        return endings.get(self.code, f"pytest ended with exit code {self.code}, and no test failed")


def run_tests(
    root: Path, tests: Iterable[str], *words: str, environment: Mapping[str, str], limit_s: float = LIMIT_S
) -> Ran:
    """Run tests in a copy of a package, and end what they leave behind.

    words: further arguments of pytest.  environment: variables over those of this process.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "--color=no", "-p", "no:cacheprovider"]
    command += [*words, *tests]
    variables = {**os.environ, "COLUMNS": "1000", _INSIDE: "1", **environment}
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, cwd=root, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
            end_leftovers(root)
        file.seek(0)
        output = file.read()
    return Ran(code, tuple(_LINE.findall(output)), output)


def end_leftovers(root: Path) -> None:
    """Kill processes that work below a folder: with some faults, ranks outlive the tests. Needs /proc, as on Linux."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink().is_relative_to(root):
                os.kill(int(place.name), signal.SIGKILL)


def last_lines(output: str) -> str:
    """The end of pytest's output, where it says what failed."""
    return "\n".join(re.sub(r"([ =!_-])\1{2,}", r"\1\1", line) for line in output.strip().splitlines()[-20:])
