"""The tables of docs/gpu.md, from bench/results/gpu.jsonl; `python -m bench.tables` writes them."""

from collections.abc import Callable, Iterator, Mapping

from bench import results
from bench.gpu import predictions
from bench.gpu.measurements import MEASUREMENTS
from bench.gpu.records import Record, attempts, read, shown
from bench.gpu.shapes import JOBS
from bench.gpu.turns import FORMS

COMMITTED = results.FOLDER / "gpu.jsonl"
"""Results of devices, over all visits."""

NONE = "No GPU has run it yet."
KERNELS = ("attention", "rates", "fused-loss")
COLUMNS = ("step", "MFU, full attention", "peak allocated", "peak reserved")


def by_device() -> dict[str, dict[str, Record]]:
    """Device -> the last attempt at each measurement, by name."""
    lines = [line for line in read(COMMITTED) if not line["rehearsal"]]
    devices = dict.fromkeys(line["device"] for line in lines)
    return {device: attempts(line for line in lines if line["device"] == device) for device in devices}


def _per_device(table: Callable[[str, Mapping[str, Record]], str]) -> str:
    found = by_device()
    return "\n\n".join(f"{device}:\n\n{table(device, last)}" for device, last in found.items()) or NONE


def speeds() -> str:
    """Steps of each job, by trainer."""
    return _per_device(lambda _, last: "\n".join(_speeds(last)))


def _speeds(last: Mapping[str, Record]) -> Iterator[str]:
    rows = {row.label: row for record in last.values() for row in record.rows}
    yield "| job | trainer | step, s | tokens/s per GPU | MFU | allocated, GiB | reserved, GiB | titan relative to it |"
    yield "|---|---|---|---|---|---|---|---|"
    for job, shape in JOBS.items():
        for who in ("", *FORMS):
            name = f"{job}, {who}" if who else job
            found = [rows.get(f"{name}: {column}") for column in COLUMNS]
            values = [row.value if row else None for row in found]
            step, mfu, allocated, reserved = (value if isinstance(value, float) else None for value in values)
            if step is None or mfu is None or allocated is None or reserved is None:
                continue
            ratio = rows.get(f"{name}: speed of titan relative to it")
            relative = f"{ratio.value:.2f}" if ratio and isinstance(ratio.value, float) else ""
            tokens = shape.seq_len * shape.sequences / shape.ranks / step
            yield (
                f"| {job} | {who or 'titan'} | {step:.4f} | {tokens:,.0f} | {100 * mfu:.1f} % | {allocated:.1f} "
                f"| {reserved:.1f} | {relative} |"
            )


def predicted() -> str:
    """Predictions beside measurements."""
    return _per_device(predictions.table)


def kernels() -> str:
    """Rates of the device, and times of single operations."""
    return _per_device(lambda _, last: "\n".join(_kernels(last)))


def _kernels(last: Mapping[str, Record]) -> Iterator[str]:
    yield "| measurement | | |\n|---|---|---|"
    for name in KERNELS:
        for row in last[name].rows if name in last else ():
            if not row.unit:
                continue  # which kernel it was, or why there is none
            yield f"| {name} | {row.label} | {shown(row)} |"


def checks() -> str:
    """How each measurement ended, with the checks that did not pass."""
    return _per_device(lambda _, last: "\n".join(_checks(last)))


def _checks(last: Mapping[str, Record]) -> Iterator[str]:
    yield "| measurement | call | date | commit | outcome |\n|---|---|---|---|---|"
    for one in MEASUREMENTS:
        record = last.get(one.name)
        if record is None:
            yield f"| {one.name} | {one.call} | | | not measured |"
            continue
        passed, failed = (sum(row.passed is each for row in record.rows) for each in (True, False))
        outcome = record.failure or f"{passed} checks passed, {failed} failed" * (passed + failed > 0) or "measured"
        date, commit = str(record.head["time"]).partition("T")[0], record.head["commit"]
        yield f"| {one.name} | {one.call} | {date} | `{commit}` | {outcome} |"


TABLES = {"gpu-speeds": speeds, "gpu-predicted": predicted, "gpu-kernels": kernels, "gpu-checks": checks}
