"""The planted faults can still be planted, and the command says which test failed, or that none did."""

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.faults import FAULTS, __main__, trial
from tests.faults.trial import ROOT, Ran, Verdict, verdict
from tests.sweeps import swept_case
from titan.testing.faults import FAILED, Fault

FEWEST = 40
SWEEP = "tests/unit/test_search.py::test_the_best_are_the_best_of_all_with_compiled_layouts"


@cache
def _functions(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE))


def _misses(test: str) -> str:
    """What is wrong with the id of a test; its parameters are not looked at."""
    file, _, function = test.partition("::")
    if not (ROOT / file).is_file():
        return "no such file"
    return "" if not function or function.partition("[")[0] in _functions(ROOT / file) else "no such test"


def test_every_fault_can_be_planted_and_names_tests_that_exist() -> None:
    wrong = []
    for fault in FAULTS:
        try:
            assert fault.planted(ROOT) != (ROOT / fault.file).read_text(encoding="utf-8"), fault.name
        except ValueError as error:
            wrong.append(str(error))
        wrong += [f"{fault.name}: {test}: {what}" for test in fault.tests if (what := _misses(test))]
    assert not wrong, "\n".join(wrong)


def _missing(tests: Sequence[str], run: Sequence[str]) -> list[str]:
    return [test for test in tests if not any(f"{case}[".startswith((f"{test}[", f"{test}::")) for case in run)]


def test_make_test_runs_the_tests_of_every_fault(request: pytest.FixtureRequest) -> None:
    tests = [SWEEP, *sorted({test for fault in FAULTS for test in fault.tests})]
    run = [item.nodeid for item in request.session.items if not item.get_closest_marker("gpu")]
    if _missing(tests, run) != [SWEEP]:  # a part of the tests runs here
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
        done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        run = [line for line in done.stdout.splitlines() if "::" in line]
    assert _missing(tests, run) == [SWEEP]


def test_faults_are_many_and_differ_and_each_has_a_test() -> None:
    assert len(FAULTS) >= FEWEST
    page = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    assert str(len(FAULTS)) in re.findall(r"\d+", page.partition("python -m tests.faults`")[2].partition("\n\n")[0])
    counts = re.findall(r"^\| [\w ]+ \| (\d+) \|", page.partition("| part | faults |")[2].partition("\n\n")[0], re.M)
    assert sum(map(int, counts)) == len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len({(f.place, f.old, f.new, f.nth) for f in FAULTS}) == len(FAULTS)
    assert all(fault.tests and fault.file.split("/")[0] in trial.FOLDERS for fault in FAULTS)


def _fault(old: str, new: str) -> Fault:
    return Fault("another value", "titan/value.py", old, new, ("tests/test_value.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one module, `VALUE = 1`, and one test of it."""
    root = tmp_path / "checkout"
    for folder in ("titan", "plugins", "planner", "inference", "testing", "configs", "tests"):
        (root / folder).mkdir(parents=True)
    for package in ("titan", "plugins", "tests"):
        (root / package / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "faults", root / "tests" / "faults")
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "titan" / "value.py").write_text("VALUE = 1  # one\n")
    test = "import titan.plugins\nfrom titan.value import VALUE\n\ndef test_value():\n    assert VALUE == 1\n"
    (root / "tests" / "test_value.py").write_text(test)
    return root


NO_MODULE = "pytest ended with exit code 2, and no test failed"


@pytest.mark.parametrize(
    ("old", "new", "by", "why"),
    [
        ("VALUE = 1", "VALUE = 2", "tests/test_value.py::test_value", ""),
        swept_case(("VALUE = 1", "VALUE = 2 - 1", "", "all tests pass")),
        swept_case(("VALUE = 1", "OTHER = 1", "", NO_MODULE)),  # no module to import is no failed test
    ],
)
def test_a_fault_is_caught_by_a_test_that_fails(old: str, new: str, by: str, why: str, tree: Path) -> None:
    before = (tree / "titan" / "value.py").read_text()
    found = trial.judge(_fault(old, new), trial.copied(tree.parent / "copy", tree), tree.parent)
    assert (found.by, found.why.partition(":")[0]) == (by, why), found.why
    assert (tree / "titan" / "value.py").read_text() == before


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_outlives_its_tests_is_ended(tree: Path) -> None:
    root = trial.copied(tree.parent / "copy", tree)
    left = "import pathlib, subprocess\n\ndef test_value():\n    "
    left += "sleeping = subprocess.Popen(['sleep', '600'], start_new_session=True)\n    "
    left += "pathlib.Path('pid').write_text(str(sleeping.pid))\n"
    (root / "tests" / "test_value.py").write_text(left)
    assert trial.run_tests(root, ["tests/test_value.py"]).code == 0
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(int((root / "pid").read_text()))
        assert select.select([ended], [], [], 10)[0], "it lives on"
        os.close(ended)


@pytest.mark.sweep
def test_packages_from_elsewhere_are_refused(tree: Path) -> None:
    ran = trial.run_tests(tree, ["tests/test_value.py"])  # without its link, titan.plugins is that of the environment
    assert ran.code not in (0, FAILED) and "titan.plugins was imported from" in ran.output


def test_a_hang_and_an_end_without_a_failed_test_catch_nothing() -> None:
    fault = _fault("VALUE = 1", "VALUE = 2")
    assert verdict(fault, Ran(None, (), "stuck"), 1.0).why == "the tests did not end in time:\nstuck"
    assert not verdict(fault, Ran(1, (), "killed by a time limit"), 1.0).caught
    assert not verdict(fault, Ran(5, (), "no tests ran"), 1.0).caught


def test_code_that_is_not_there_once_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"another value: titan/value\.py: 'ONE = 3': the module has it 0 times"):
        _fault("ONE = 3", "ONE = 4").planted(tree)
    with pytest.raises(ValueError, match=r"another value: titan/value\.py: 'return' outside function"):
        _fault("VALUE = 1", "return").planted(tree)


def test_the_command_names_what_escapes_and_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    escaped = FAULTS[1].name
    monkeypatch.setattr(trial, "copied", lambda to: to)
    monkeypatch.setattr(trial, "without_faults", lambda tests, source: "")
    monkeypatch.setattr(
        trial,
        "judge",
        lambda fault, *_: Verdict(fault, "" if fault.name == escaped else fault.tests[0], 1.0, "all tests pass"),
    )
    assert __main__.main(["--jobs", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"{len(FAULTS) - 1} of {len(FAULTS)} caught")
    assert f"{escaped}: all tests pass" in printed.err
    assert __main__.main(["--only", FAULTS[0].name, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["faults"]
    assert row["name"] == FAULTS[0].name and row["by"] == FAULTS[0].tests[0]
    monkeypatch.setattr(trial, "without_faults", lambda tests, source: "FAILED tests/x.py::test_y")
    assert __main__.main(["--only", FAULTS[0].name]) == 1
    assert "tests fail without a fault" in capsys.readouterr().out
    assert __main__.main(["--only", "no fault has this name"]) == 2
    assert __main__.main(["--only", ""]) == __main__.main(["--jobs", "0"]) == 2
