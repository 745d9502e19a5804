"""Check and measure titan on one CUDA device.

    python -m bench.gpu                          all measurements that have no result for this device
    python -m bench.gpu --call a --seconds 150   the first visit to a borrowed device: does it run, how fast
    python -m bench.gpu --call b --seconds 400   the second one: parity, torchtitan, float8, kernels
    python -m bench.gpu --table                  print what is measured, and measure nothing
    python -m bench.gpu --predict                write the planner's predictions of the measured jobs
    python -m bench.gpu --rehearse               every measurement on this CPU in tiny sizes; its figures mean nothing

Each measurement runs in a process of its own, under a time limit. Its rows are appended to --results and synced as soon
as they are there. What has a result for this device and version of PyTorch, there or in bench/results/gpu.jsonl, is
not measured again without --again. Exit code 0: every chosen measurement has a result, and every check passed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.gpu import isolated, predictions, reference
from bench.gpu.measurements import CALLS, MEASUREMENTS
from bench.gpu.page import COMMITTED
from bench.gpu.records import Measurement, Results, faults, table
from bench.gpu.setting import Setting
from titan.contracts.base import registry
from titan.resources import let_segments_expand

OVERRUN = 3
"""How often the expected time of a measurement it may take."""

REHEARSAL_S = 600.0
"""Time that a measurement may take in a rehearsal."""

LEAST_S = 10.0
"""A deadline that leaves less than this is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = _arguments(argv)
    if args.predict:
        print(predictions.write())
        return 0
    if sys.platform != "linux":
        print("error: measurements need Linux, to end the processes that they start", file=sys.stderr)
        return 2
    # Before anything touches the device. The processes of measurements, and other trainers in them, inherit both.
    let_segments_expand()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whether there is a GPU is then asked without touching it
    registry.load_plugins()  # once, for all processes; as the compiler, which is imported in 1 to 2 s
    import_module("torch._dynamo")
    if args.rehearse:
        torch.set_num_threads(1)  # tiny tensors: threads that wait for each other take longer than the work
    setting = _setting(args)
    if args.reference_only:
        return 0
    machine = isolated.call(partial(_machine, args.rehearse), setting.log, 120.0)
    if machine["device"].startswith("cpu") and not args.rehearse:
        print("error: no CUDA device; --rehearse takes every measurement on the CPU", file=sys.stderr)
        return 2
    about = {"device": machine.pop("device"), "torch": machine.pop("torch"), "rehearsal": args.rehearse}
    earlier = [COMMITTED] if args.results.absolute() != COMMITTED else []
    kept = Results(args.results, about, machine, earlier)
    wanted = [one for one in MEASUREMENTS if one.call in args.call and (not args.only or one.name in args.only)]
    if not args.table:
        _measure(wanted, kept, setting, args.seconds, again=args.again)
    return _summary(wanted, kept, args)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", nargs="+", choices=CALLS, default=CALLS, help="parts of the list; default: all")
    parser.add_argument("--only", nargs="+", default=(), choices=[one.name for one in MEASUREMENTS], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--seconds", type=float, default=3600.0, help="deadline of the whole call; default: 3600")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file to append to; default: runs/gpu/gpu.jsonl")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="folder of runs, tokens and checkpoints")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="the CPU's checkpoint and curves, made if absent")
    parser.add_argument("--reference-only", action="store_true", help="make that folder and measure nothing")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    parser.add_argument("--predict", action="store_true", help="plan each measured job, and measure nothing")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes")
    args = parser.parse_args(argv)
    folder = Path("runs") / ("gpu-rehearsal" if args.rehearse else "gpu")
    args.results = args.results or folder / "gpu.jsonl"
    args.scratch = (args.scratch or folder).absolute()
    args.reference = (args.reference or args.scratch / "reference").absolute()
    return args


def _setting(args: argparse.Namespace) -> Setting:
    """The setting, with the CPU's curves made if they are absent."""
    setting = Setting(args.scratch, args.reference, args.results.absolute().with_name("log.txt"), args.rehearse)
    setting.folder.mkdir(parents=True, exist_ok=True)
    isolated.call(partial(reference.make, setting), setting.log, 600.0)
    return setting


def _machine(rehearse: bool) -> dict[str, Any]:
    """What identifies a result: the device and versions. Touches the device."""
    machine = {key: value for key, value in results.about().items() if key in ("commit", "torch", "python", "device")}
    if rehearse:
        return {**machine, "device": "cpu"}
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else ""
    return {**machine, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": driver}


def _measure(wanted: Sequence[Measurement], kept: Results, setting: Setting, seconds: float, *, again: bool) -> None:
    """Take what is still to be taken, as far as the time goes. One failure does not end the others."""
    deadline = time.monotonic() + seconds
    for one in wanted if again else kept.order(wanted):
        left = deadline - time.monotonic() - isolated.GRACE_S
        if left < max(LEAST_S, 0 if setting.rehearse else one.seconds):
            print(f"{one.name}: left for the next start, it takes {one.seconds:.0f} s", flush=True)
            continue
        kept.began(one)
        began, failure = time.monotonic(), ""
        try:
            limit = REHEARSAL_S if setting.rehearse else OVERRUN * one.seconds
            isolated.call(partial(_rows_of, one, setting, kept), setting.log, min(left, limit))
        except isolated.CallError as error:
            failure = str(error)
        kept.ended(one, time.monotonic() - began, failure)
        print(table(one, kept.last()[one.name]), flush=True)


def _rows_of(one: Measurement, setting: Setting, kept: Results) -> None:
    print(f"---- {one.name}", flush=True)
    for row in one.measure(setting):
        kept.add(one, row)


def _summary(wanted: Sequence[Measurement], kept: Results, args: argparse.Namespace) -> int:
    last = kept.last()
    if args.table:
        print("\n".join(table(one, last.get(one.name)) for one in wanted))
    missing = faults(wanted, last)
    if args.rehearse:
        print("\nrehearsal: tiny models on a CPU, whatever the labels say; the figures mean nothing")
    else:
        print(f"\n{predictions.table(kept.about['device'], last)}")
    print(f"\n{len(wanted)} measurements, {len(missing)} not passed or not measured; {kept.path}")
    print("\n".join(f"  {fault}" for fault in missing))
    return 1 if missing else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
