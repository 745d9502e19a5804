"""Runs on each PyTorch what a new release breaks first, one after the other, each in an environment of its own.

    make matrix                                      # those of titan.packages.TORCH_RUN; 25 minutes each on two cores
    python -m bench.versions [VERSION[=PYTHON] ...]  # these, and keep the results of the others

PYTHON is what the environment is built on; default: python3.11 for the oldest, python3.12 and python3.13 for the newer
ones, where they are on the PATH. An environment is `.venv-VERSION` (scripts/python.sh), of up to 8 GB with CUDA. For a
version outside the range, as the GPU machine's, PYTHON has it, and what scripts/gpu_bundle.sh asks for, installed.

Parts: all modules are imported with warnings as errors; the quickstart trains, and says no warning; unit and contract
tests with their sweeps, and of these once more those that hold plans against dry runs; the cases of
tests/dist/test_versions.py; drawn jobs against one rank (tests/fuzz); jobs that resume. Outside the range only the
first two. Exit code 1: a part failed.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from tqdm import tqdm

from bench import results
from titan.packages import TORCH, TORCH_CHOSEN, TORCH_RUN, untried_torch

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
EXTRAS = ("dev", "float8", "hf", "plot", "tune", "wandb")
PLANS = ("test_planned_memory", "test_accumulation", "test_planned_workers", "test_compressed_plan")
"""Modules of unit tests that compare a plan with a dry run."""
RESUMED = ("test_on_the_same_layout_bit_for_bit", "test_twice_across_layouts_in_the_middle_of_an_epoch")
PARTS = ("imports", "quickstart", "tests", "cases", "drawn", "resumed")
SEED, DRAWN = 2026, 60
VERSION = re.compile(r"[1-9]\d*\.\d+\.\d+")
IMPORTS = """
import importlib, pkgutil
folders = ("titan", "titan.plugins", "titan.planner", "titan.inference", "titan.testing")
found = (pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}.") for name in folders)
names = {module.name for modules in found for module in modules}
names = sorted(name for name in names if "__main__" not in name and "skeletons" not in name)
lacking = 0
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # builds for CPUs have none, and use no kernels of it
            raise
        lacking += 1
print("modules:", len(names) - lacking)
"""
Row = dict[str, Any]
"""part; passed, failed, skipped: tests; seconds; failures: names of tests, or the end of what was printed."""


def main() -> int:
    """Run the parts on the versions named, print and write the results; returns the exit code."""
    parser = _parser()
    words = parser.parse_args()
    if words.here:
        only = words.only if in_range(torch.__version__) else [part for part in words.only if part in PARTS[:2]]
        words.here.write_text(json.dumps(_here(only)), encoding="utf-8")
        return 0
    path = results.FOLDER / "versions.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["versions"] if path.is_file() else {}
    asked = [each.partition("=")[::2] for each in words.versions or _defaults()]
    for version, base in asked:
        if not VERSION.fullmatch(version) or not (shutil.which(base) if base else in_range(version)):
            parser.error(f"{version}={base}: write a version, such as 2.15.0, and a Python outside the range")
    done = []
    try:
        for version, base in tqdm(asked, unit="version", disable=None):
            found[version] = _merged(found.get(version, {}), _on(version, base, words.only))
            done.append(version)
    finally:
        kept = {version: found[version] for version in sorted(found)}
        if done:
            print(results.write("versions", {"seed": SEED, "versions": kept}))
    rows = [(version, row) for version in done for row in found[version]["parts"]]
    for version, row in rows:
        print(f"{version}: {row['part']}: {told(row)}")
    return int(any(row["failed"] for _, row in rows))


def _merged(former: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Of a version: the new rows in place of those of the same parts, each with its commit."""
    commit = results.about()["commit"]
    rows = {row["part"]: row for row in former.get("parts", ())}
    rows |= {row["part"]: {**row, "commit": commit} for row in new["parts"]}
    return {**former, **new, "parts": list(rows.values())}


def in_range(version: str) -> bool:
    """Whether titan is for a version of PyTorch."""
    major, minor = map(int, version.split(".")[:2])
    return TORCH[0] <= (major, minor) <= TORCH[1]


def told(row: Row) -> str:
    """A cell of the table of docs/versions.md: "4,000 passed, 12 skipped"."""
    counts = ((row["failed"], "failed"), (row["passed"], "passed"), (row["skipped"], "skipped"))
    return ", ".join(f"{count:,} {what}" for count, what in counts if count or what == "passed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION[=PYTHON]", help="default: 2.13.0, 2.14.1 and 2.15.0")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts; the others keep their results")
    parser.add_argument("--here", type=Path, help="run the parts with this Python, and write them to a file")
    return parser


def _defaults() -> Iterator[str]:
    for version, name in zip(TORCH_RUN, PYTHONS, strict=True):
        yield f"{version}={name}" if shutil.which(name) else version


def _on(version: str, base: str, only: Sequence[str]) -> dict[str, Any]:
    """Set up the environment of a version, on that Python if one is named, and run the parts there."""
    environment = {**os.environ, TORCH_CHOSEN: version}
    for name in ("VIRTUAL_ENV", "TITAN_PYTHON", "PYTHONPATH"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        if not in_range(version):
            return _on_another(base, Path(folder), environment, only)
        if base:
            called = Path(folder) / "python3"  # no link: an environment would be built on this place
            called.write_text(f'#!/bin/sh\nexec {shlex.quote(shutil.which(base) or base)} "$@"\n', encoding="utf-8")
            called.chmod(0o755)
            environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
        setup = [ROOT / "scripts" / "python.sh", *EXTRAS]
        python = subprocess.run(setup, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        return _there(python, ROOT, environment, only)


def _on_another(python: str, folder: Path, environment: dict[str, str], only: Sequence[str]) -> dict[str, Any]:
    """The parts for a version outside the range, with a Python that has it. Titan is installed in the folder for it."""
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder / "site", ROOT]
    subprocess.run(install, env=environment, check=True)
    for name in ("bench", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return _there(python, folder, {**environment, "PYTHONPATH": str(folder / "site")}, only)


def _there(python: str, folder: Path, environment: dict[str, str], only: Sequence[str]) -> dict[str, Any]:
    """What `_here` finds with another Python, from a folder that has bench and tests."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        here = [python, "-m", "bench.versions", "--only", *only, "--here", out]
        subprocess.run(here, cwd=folder, env=environment, check=True)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if found["torch"].partition("+")[0] != environment[TORCH_CHOSEN]:
            raise SystemExit(f"error: {python} has PyTorch {found['torch']}, not {environment[TORCH_CHOSEN]}")
        return found


# --- with the Python of a version -----------------------------------------------------------------------------------


def _here(only: Sequence[str]) -> dict[str, Any]:
    rows: list[Row] = []
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "parts": rows}
    rows += [part() for name, part in (("imports", _imports), ("quickstart", _quickstart)) if name in only]
    if "tests" in only:
        tests = _cases("tests/unit", "tests/contract")
        rows.append(_row("unit and contract tests, with sweeps", tests))
        rows.append(_row("of them, plans against dry runs", [case for case in tests if case["module"] in PLANS]))
    if "cases" in only:
        cases = _cases("tests/dist/test_versions.py")
        rows.append(_row("compiled, split and recomputed", cases))
        found["cases"] = {
            case["name"].partition("[")[2].removesuffix("]"): case["outcome"] == "passed" for case in cases
        }
    if "drawn" in only:
        rows.append(_drawn())
    if "resumed" in only:
        rows.append(_row("resumed jobs", _cases("tests/dist/test_resume.py", "-k", " or ".join(RESUMED))))
    return found


def _run(*command: str | Path, cwd: Path | None = None) -> tuple[int, str, float]:
    """(exit code, what was printed, seconds)"""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout, time.perf_counter() - began


def _single(part: str, good: bool, passed: int, printed: str, seconds: float) -> Row:
    failures = [] if good else [printed[-2000:]]
    counts = {"passed": passed * good, "failed": int(not good), "skipped": 0}
    return {"part": part, **counts, "seconds": round(seconds), "failures": failures}


def _imports() -> Row:
    code, printed, seconds = _run(sys.executable, "-W", "error", "-c", IMPORTS)
    count = re.search(r"^modules: (\d+)$", printed, re.MULTILINE)  # Triton may print after it
    good = code == 0 and count is not None
    return _single("modules imported, warnings are errors", good, int(count[1]) if count else 0, printed, seconds)


def _quickstart() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        words = ("--train.steps", "6", "--data.cache", f"{folder}/tokens", "--run.dir", f"{folder}/runs")
        code, printed, seconds = _run(sys.executable, "-P", "-m", "titan.launch", *words, cwd=Path(folder))
    warned = "arning" in printed.replace(f"warning: {untried_torch()}", "")
    return _single("the quickstart, without a warning", code == 0 and not warned, 1, printed, seconds)


def _cases(*words: str) -> list[dict[str, Any]]:
    """name, module, outcome and seconds of each test that pytest runs by these words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        settings = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "-m", "sweep or not sweep")
        _, printed, _ = _run(sys.executable, "-m", "pytest", *settings, f"--junitxml={report}", *words)
        if not report.is_file():
            raise SystemExit(f"error: pytest wrote no report\n{printed[-4000:]}")
        return [_case(element) for element in ElementTree.parse(report).iter("testcase")]


def _case(element: ElementTree.Element) -> dict[str, Any]:
    kinds = {child.tag for child in element}
    outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    module = element.get("classname", "").rpartition(".")[2]
    return {
        "name": element.get("name", ""),
        "module": module,
        "outcome": outcome,
        "seconds": float(element.get("time", 0)),
    }


def _row(part: str, cases: Iterable[dict[str, Any]]) -> Row:
    counts, failures, seconds = dict.fromkeys(("passed", "failed", "skipped"), 0), [], 0.0
    for case in cases:
        counts[case["outcome"]] += 1
        seconds += case["seconds"]
        failures += [f"{case['module']}::{case['name']}"] if case["outcome"] == "failed" else []
    return {"part": part, **counts, "seconds": round(seconds), "failures": failures}


def _drawn() -> Row:
    from tests.fuzz.draw import draw
    from tests.fuzz.judge import Judge

    began, kinds, failures = time.perf_counter(), {"agreed": 0, "refused": 0, "failed": 0}, []
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for index in tqdm(range(DRAWN), unit="job", disable=None):
            verdict = judge.judge(draw(SEED, index))
            kinds[verdict.kind] += 1
            failures += [f"job {index}: {verdict.reason}"[:2000]] if verdict.kind == "failed" else []
    counts = {"passed": kinds["agreed"] + kinds["refused"], "failed": kinds["failed"], "skipped": 0}
    return {"part": "drawn jobs", **counts, "seconds": round(time.perf_counter() - began), "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
