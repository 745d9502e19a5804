"""The tests that need a GPU, run by pytest in several processes."""

import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.records import Row
from bench.gpu.setting import Setting

TESTS = Path(__file__).parents[2] / "tests"
PROCESSES = 6


def gpu_tests(setting: Setting) -> Iterator[Row]:
    """Every test marked `gpu`; a rehearsal only collects them."""
    files = sorted(str(file) for file in TESTS.rglob("test_*.py") if "mark.gpu" in file.read_text(encoding="utf-8"))
    report = setting.folder / "tests.xml"
    report.unlink(missing_ok=True)  # of an earlier start
    ways = ["-q", "--collect-only"] if setting.rehearse else ["-v", "-n", str(PROCESSES), f"--junitxml={report}"]
    # Warnings of other versions are no failures, and no plugin is loaded that lies on a machine by chance.
    options = [
        f"--rootdir={TESTS.parent}",
        "-p",
        "xdist.plugin",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
    ]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *options, *ways, *files]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=alone, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if setting.rehearse:
        count = sum("::" in line for line in done.stdout.splitlines())
        yield Row("tests marked gpu", float(count), passed=done.returncode == 0 and count > 0)
        return
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest: exit code {done.returncode}; the log has what it printed")
    cases = list(xml.parse(report).iter("testcase"))
    for case in cases:
        fault, skipped = _fault(case), case.find("skipped") is not None
        name = f"{case.get('classname')}::{case.get('name')}"
        yield Row(name, fault or ("skipped" if skipped else "passed"), passed=None if skipped else fault is None)
    yield Row("tests marked gpu", float(len(cases)), passed=bool(cases))


def _fault(case: xml.Element) -> str | None:
    found = next((each for kind in ("failure", "error") if (each := case.find(kind)) is not None), None)
    return None if found is None else (found.get("message") or "failed").partition("\n")[0][:200]
