"""The command: see the package."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.faults import FAULTS, trial
from tests.faults.trial import Verdict
from titan.testing.faults import Fault, end_leftovers

INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the faults one at a time, print who caught them; 1 when one escaped or a test fails without a fault."""
    given = _parser().parse_args(argv)
    if given.jobs < 1 or "" in given.only:
        print("error: --jobs is at least 1, and --only a part of a fault's name", file=sys.stderr)
        return 2
    wanted = [fault for fault in FAULTS if not given.only or any(part in fault.name for part in given.only)]
    if not wanted:
        print(f"--only {' '.join(given.only)}: no such fault; --list prints their names", file=sys.stderr)
        return 2
    if given.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` ends it
        for fault in wanted:
            print(f"{fault.name}\n    {fault.file}\n    " + "\n    ".join(fault.tests))
        return 0
    began = time.perf_counter()
    verdicts, unsound = judged(wanted, given.jobs, sound=not given.skip_sound)
    _report(verdicts, unsound, time.perf_counter() - began, as_json=given.json)
    if len(verdicts) < len(wanted):
        print(f"interrupted: {len(wanted) - len(verdicts)} faults were not tried", file=sys.stderr)
        return INTERRUPTED
    return int(bool(unsound) or not all(verdict.caught for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="plant faults in copies of the checkout, and see which test fails"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="faults with this in their name; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and their tests, run nothing")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults tried at a time, at least 1 (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout; progress goes to stderr")
    parser.add_argument(
        "--skip-sound", action="store_true", help="do not run the tests without faults first; they are known to pass"
    )
    return parser


def judged(faults: Sequence[Fault], jobs: int, *, sound: bool) -> tuple[list[Verdict], str]:
    """Try all faults, `jobs` at a time; their verdicts in order, and what is wrong with the tests without faults.

    sound: whether to run the tests without faults, beside the trials. After Ctrl-C, the verdicts so far.
    """
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        source = trial.copied(folder / "titan")
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
            checking = pool.submit(trial.without_faults, tests, source) if sound else None
            waiting = [pool.submit(trial.judge, fault, source, folder) for fault in faults]
            try:
                for done in as_completed(waiting):
                    verdict = done.result()
                    found[verdict.fault.name] = verdict
                    print(f"[{len(found)}/{len(faults)}] {line(verdict)}", file=sys.stderr, flush=True)
                unsound = checking.result() if checking else ""
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                end_leftovers(folder)
                unsound = ""
    return [found[fault.name] for fault in faults if fault.name in found], unsound


def line(verdict: Verdict) -> str:
    """A verdict in a line, or in several where the fault escaped."""
    outcome = "caught" if verdict.caught else "ESCAPED"
    return f"{outcome:7} {verdict.seconds:6.1f} s  {verdict.fault.name}: {verdict.by or verdict.why}"


def _report(verdicts: Sequence[Verdict], unsound: str, seconds: float, *, as_json: bool) -> None:
    caught = sum(verdict.caught for verdict in verdicts)
    if as_json:
        rows = [
            dict(name=v.fault.name, file=v.fault.file, caught=v.caught, by=v.by, why=v.why, seconds=round(v.seconds, 1))
            for v in verdicts
        ]
        print(
            json.dumps({"faults": rows, "caught": caught, "unsound": unsound, "seconds": round(seconds, 1)}, indent=1)
        )
        return
    width = max((len(verdict.fault.name) for verdict in verdicts), default=0)
    for v in verdicts:
        print(f"{v.fault.name:{width}}  {v.seconds:6.1f} s  {v.by or 'ESCAPED'}")
    if unsound:
        print(f"tests fail without a fault:\n{unsound}")
    print(f"{caught} of {len(verdicts)} caught, in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
