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
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.gpu import isolated, predictions, reference
from bench.gpu.measurements import CALLS, MEASUREMENTS
from bench.gpu.page import COMMITTED
from bench.gpu.records import Measurement, Results, attempts, faults, read, table
from bench.gpu.setting import Setting
from titan.contracts.plugin import registry
from titan.machine import let_segments_expand

OVERRUN = 3
"""How often the expected time of a measurement it may take."""

REHEARSAL_S = 600.0
"""Time that a measurement may take in a rehearsal."""

LEAST_S = 10.0
"""A deadline that leaves less than this is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = _arguments(argv)
    wanted = [one for one in MEASUREMENTS if one.call in args.call and (not args.only or one.name in args.only)]
    if args.predict:
        print(f"appended to {predictions.write()}")
        return 0
    if args.table:
        return _tables(wanted, args.results)
    if not wanted:
        print(f"error: --only {' '.join(args.only)}: none of them is in call {' '.join(args.call)}", file=sys.stderr)
        return 2
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
    try:
        with _alone(args):
            return _run(args, wanted)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.results}", file=sys.stderr)
        return 130
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: {error}; choose other --results, --scratch or --reference", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, wanted: Sequence[Measurement]) -> int:
    deadline = time.monotonic() + args.seconds
    setting = Setting(args.scratch, args.reference, args.results.absolute().with_name("log.txt"), args.rehearse)
    machine = isolated.call(partial(_machine, args.rehearse), setting.log, 120.0)
    if machine["device"].startswith("cpu") and not (args.rehearse or args.reference_only):
        print("error: no CUDA device; --rehearse takes every measurement on the CPU", file=sys.stderr)
        return 2
    isolated.call(partial(reference.make, setting), setting.log, 600.0)
    if args.reference_only:
        return 0
    about = {"device": machine.pop("device"), "torch": machine.pop("torch"), "rehearsal": args.rehearse}
    earlier = [COMMITTED] if args.results.absolute() != COMMITTED else []
    kept = Results(args.results, about, machine, earlier)
    _measure(wanted, kept, setting, deadline, again=args.again)
    return _summary(wanted, kept, args)


@contextmanager
def _alone(args: argparse.Namespace) -> Iterator[None]:
    """Hold the folders of results and scratch against another start.

    Raises:
        BlockingIOError: another start has one of them.
    """
    with ExitStack() as locks:
        for folder in {args.results.absolute().parent, args.scratch}:
            folder.mkdir(parents=True, exist_ok=True)
            file = locks.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"another start of bench.gpu uses {folder}") from None
        yield


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", nargs="+", choices=CALLS, default=CALLS, help="parts of the list; default: all")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        choices=[one.name for one in MEASUREMENTS],
        metavar="NAME",
        help="measurements, by the names in the table of checks of docs/gpu.md; default: all",
    )
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=3600.0,
        help="deadline of the measurements, from the start of the command, whose imports take some more; default: 3600",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="file to append to; default: runs/gpu/gpu.jsonl")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="folder of runs, tokens and checkpoints; default: runs/gpu"
    )
    parser.add_argument("--reference", type=Path, metavar="DIR", help="the CPU's checkpoint and curves, made if absent")
    parser.add_argument("--reference-only", action="store_true", help="make that folder and measure nothing")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="append the planner's predictions of each job to bench/results/gpu_predictions.jsonl, and measure nothing",
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes")
    args = parser.parse_args(argv)
    folder = Path("runs") / ("gpu-rehearsal" if args.rehearse else "gpu")
    args.results = args.results or folder / "gpu.jsonl"
    args.scratch = (args.scratch or folder).absolute()
    args.reference = (args.reference or args.scratch / "reference").absolute()
    return args


def _positive(word: str) -> float:
    """Seconds above 0.

    Raises:
        argparse.ArgumentTypeError: they are not.
    """
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a number of seconds above 0")
    return seconds


def _machine(rehearse: bool) -> dict[str, Any]:
    """What identifies a result: the device and versions. Touches the device."""
    machine = {key: value for key, value in results.about().items() if key in ("commit", "torch", "python", "device")}
    if rehearse:
        return {**machine, "device": "cpu"}
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else ""
    return {**machine, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": driver}


def _measure(wanted: Sequence[Measurement], kept: Results, setting: Setting, deadline: float, *, again: bool) -> None:
    """Take what is still to be taken, as far as the time goes. One failure does not end the others."""
    chosen = list(wanted) if again else kept.order(wanted)
    if known := [one.name for one in wanted if one not in chosen]:
        print(f"already measured on this device (--again measures anyway): {', '.join(known)}", flush=True)
    for one in chosen:
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


def _tables(wanted: Sequence[Measurement], path: Path) -> int:
    """Print what there is of each device, in the file and among the committed results; touches no device."""
    lines = [line for file in dict.fromkeys([COMMITTED, path.absolute()]) for line in read(file)]
    for device in dict.fromkeys(line["device"] + " (rehearsal)" * line["rehearsal"] for line in lines):
        last = attempts(line for line in lines if line["device"] + " (rehearsal)" * line["rehearsal"] == device)
        print(f"{device}\n" + "\n".join(table(one, last.get(one.name)) for one in wanted) + "\n")
        print(f"{predictions.table(device, last)}\n")
    if not lines:
        print(f"nothing is measured: neither {path} nor {COMMITTED} has results")
    return 0


def _summary(wanted: Sequence[Measurement], kept: Results, args: argparse.Namespace) -> int:
    last = kept.last()
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
