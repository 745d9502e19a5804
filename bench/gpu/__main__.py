"""Check and measure titan on one CUDA device.

    python -m bench.gpu --part 1        checks: parity with the CPU, resume, SIGTERM, NaN, waits of the host
    python -m bench.gpu --part 2        device: rates, attention, loss, head; a profile, saves
    python -m bench.gpu --part 3        speed: Llama 3.2 1B and 3B, in turns with torchtitan; float8
    python -m bench.gpu --part 4        savings: packed documents, float8 at 3B, offloading, 8-bit state, ...
    python -m bench.gpu --rehearse      every measurement on this CPU in tiny sizes; its figures mean nothing

Each part begins no measurement that would not end within --minutes (9). It appends each result to
OUTPUT/results.jsonl. The same command, started again, takes the measurements that are missing or failed. Exit code 0:
every measurement of the chosen parts has a result, and every check passed.
"""

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.gpu import reference
from bench.gpu.measurements import MEASUREMENTS
from bench.gpu.records import Measurement, Results, Row
from bench.gpu.setting import Setting

PARTS = (1, 2, 3, 4)
OVERRUN_S = 20.0
"""Longest time that a measurement may go beyond the end of its part."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = _arguments(argv)
    if not args.rehearse and not args.reference_only and not torch.cuda.is_available():
        print("error: no CUDA device; --rehearse takes every measurement on the CPU", file=sys.stderr)
        return 2
    output = args.output or Path("runs") / ("gpu-rehearsal" if args.rehearse else "gpu")
    setting = Setting(output.absolute(), (args.reference or output / "reference").absolute(), args.rehearse)
    if args.rehearse:
        torch.set_num_threads(1)  # tiny tensors: threads that wait for each other take longer than the work
    with _quietly(setting):
        reference.make(setting)
    if args.reference_only:
        return 0
    kept = Results(setting.folder, _about(setting))
    wanted = [one for one in MEASUREMENTS if one.part in args.part and (not args.only or one.name in args.only)]
    if not args.table:
        for part in args.part:
            _measure([one for one in wanted if one.part == part], kept, setting, 60 * args.minutes)
    return _summary(wanted, kept, args.table)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes")
    parser.add_argument("--minutes", type=float, default=9.0, help="longest time of a part")
    parser.add_argument("--only", nargs="+", default=(), choices=[one.name for one in MEASUREMENTS], metavar="NAME")
    parser.add_argument("--output", type=Path, help="folder of results and runs; default runs/gpu")
    parser.add_argument("--reference", type=Path, help="folder of the CPU's checkpoint and curves; made where absent")
    parser.add_argument("--reference-only", action="store_true", help="make that folder and measure nothing")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    return parser.parse_args(argv)


def _about(setting: Setting) -> dict[str, Any]:
    """What makes results comparable: others are not counted as measured."""
    about = results.about()
    return {"rehearsal": setting.rehearse, "device": about["device"], "torch": about["torch"]}


def _measure(wanted: Sequence[Measurement], kept: Results, setting: Setting, seconds: float) -> None:
    """Take what is still to be taken, as far as the time goes; a part that overruns it ends with all stacks shown."""
    ends = time.monotonic() + seconds
    if not setting.rehearse:
        faulthandler.dump_traceback_later(seconds + OVERRUN_S, exit=True)
    for one in kept.order(wanted):
        if not setting.rehearse and time.monotonic() + one.seconds > ends:
            print(f"{one.name}: left for the next start, it takes {one.seconds:.0f} s", flush=True)
            continue
        kept.began(one)
        began, rows = time.monotonic(), list[Row]()
        failure = _taken(one, setting, rows)
        kept.ended(one, rows, time.monotonic() - began, failure)
        print(kept.table(one), flush=True)
    if not setting.rehearse:
        faulthandler.cancel_dump_traceback_later()


def _taken(one: Measurement, setting: Setting, rows: list[Row]) -> str:
    """Collect the rows of a measurement; returns what it failed of. One failure does not end the others."""
    try:
        with _quietly(setting):
            for row in one.measure(setting):
                rows.append(row)  # one by one: a failure keeps those before it
        return ""
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        setting.free()


@contextmanager
def _quietly(setting: Setting) -> Iterator[None]:
    """What runs say goes to log.txt: the terminal is for the table."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    with (setting.folder / "log.txt").open("a") as log, redirect_stderr(log):
        yield


def _summary(wanted: Sequence[Measurement], kept: Results, whole: bool) -> int:
    if whole:
        print("\n".join(kept.table(one) for one in wanted))
    faults = kept.faults(wanted)
    if kept.about["rehearsal"]:
        print("\nrehearsal: tiny models on a CPU, whatever the labels say; the figures mean nothing")
    print(f"\n{len(wanted)} measurements, {len(faults)} not passed or not measured; {kept.path}")
    print("\n".join(f"  {fault}" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a device in a bad state can hang at exit
