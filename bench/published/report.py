"""Errors of predictions: step time by group and by source, ranking within sweeps, memory, out-of-memory rows."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from titan.planner.step.memory import GIB, Memory

from .describe import FOLDER, framework_of
from .fit import Case, World
from .rows import Row
from .state import as_held, as_reserved

# fmt: off
UNEXPLAINED = frozenset([
    "h037", "h052", "h060", "h074", "h075", "h085", "h096", "h120", "h150", "h155", "h171", "i080", "i120", "i121",
    "i140", "i149", "i150", "i151", "i179",
])
# fmt: on
"""Rows whose times no model explained; the list was fixed before this fit. They stay in every mean."""


@dataclass(frozen=True)
class Result:
    """A row with its prediction.

    seconds: predicted step time.  gib: predicted memory, in the terms of the row's figure (memory_kind).  error,
    memory_error: predicted / measured - 1; None: not measured.  memory_off_gib: predicted - measured.
    """

    case: Case
    seconds: float
    error: float | None
    gib: float
    memory_kind: str
    memory_error: float | None
    memory_off_gib: float | None
    fits: bool

    def as_json(self) -> dict[str, Any]:
        """The result for `--json`: measured and predicted values with their errors."""
        case = self.case
        return {
            "id": case.id,
            "source": case.source,
            "device": case.device,
            "fabric": case.fabric,
            "grade": case.grade,
            "measured_s": case.seconds,
            "predicted_s": self.seconds,
            "error": self.error,
            "measured_gb": case.row.get("mem_gb"),
            "predicted_gib": self.gib,
            "memory_kind": self.memory_kind,
            "memory_error": self.memory_error,
            "outcome": case.row.get("outcome"),
            "fits": self.fits,
            "guessed": case.job.guessed,
        }


@cache
def _figures_of_memory() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "memory.toml").read_text(encoding="utf-8"))


def _kind(case: Case) -> dict[str, Any]:
    said, framework = (str(case.row.get(key) or "") for key in ("mem_kind", "framework"))
    kinds = _figures_of_memory()["kind"]
    return next(k for k in kinds if re.search(k["match"], said) and re.search(k.get("framework", ""), framework))


def _communicators(job: Row) -> int:
    """NCCL communicators per rank: one per axis; one of all ranks, if there are several axes; one per replica."""
    axes = sum(degree > 1 for degree in (job.tp, job.pp, job.cp, job.dp))
    return axes + (axes > 1) + (job.tp > 1 and job.pp > 1)


def _of_a_step(memory: Memory) -> float:
    """Bytes that a step allocates and frees."""
    return memory.activations + memory.buffers + memory.gradients


def memory(case: Case, world: World) -> tuple[float, str, bool]:
    """(predicted GiB in the terms of the row's figure, name of these terms, whether the process fits)."""
    kind, least = _kind(case), _figures_of_memory()["least"]
    planner, framework = world.planner(case), framework_of(case.row)
    held = as_held(case.job, framework, case.costs)
    needs, shows = (
        planner.draft(costs, case.layout).memory() for costs in (held, as_reserved(case.job, framework, held))
    )

    def most(ranks: Sequence[Memory], reserved_gib: float, lost: float) -> float:
        return max(m.allocated + lost * _of_a_step(m) for m in ranks) / GIB + reserved_gib

    has = planner.cluster.device.memory_gib
    gib = most(shows[:1] if kind.get("first") else shows, kind["reserved_gib"], kind["fragmented"])
    least_gib = most(needs, least["context_gib"] + least["communicator_gib"] * _communicators(case.job), 0.0)
    return min(gib, has), str(kind["name"]), least_gib <= has


def results(cases: Iterable[Case], world: World) -> list[Result]:
    """Predict every case: step time and memory."""
    return [_result(case, world) for case in cases]


def _result(case: Case, world: World) -> Result:
    seconds = world.seconds(case)
    gib, kind, fits = memory(case, world)
    stated = stated_gb(case) if case.row.get("outcome", "ok") != "OOM" else None
    return Result(
        case,
        seconds,
        seconds / case.seconds - 1 if case.seconds else None,
        gib,
        kind,
        gib / stated - 1 if stated else None,
        gib - stated if stated else None,
        fits,
    )


def stated_gb(case: Case) -> float | None:
    """Measured memory as the row states it, in GB or GiB; None: not stated."""
    value = case.row.get("mem_gb")
    return float(value) if isinstance(value, int | float) and value > 0 else None


# --- figures ------------------------------------------------------------------------------------------------------


def figures(errors: Sequence[float]) -> dict[str, float]:
    """Statistics of the absolute errors: n, mean, median, p90, max."""
    found = sorted(map(abs, errors))
    if not found:
        return {"n": 0}
    at: Callable[[float], float] = lambda share: found[min(len(found) - 1, int(share * len(found)))]  # noqa: E731
    return {"n": len(found), "mean": sum(found) / len(found), "median": at(0.5), "p90": at(0.9), "max": found[-1]}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation of two series; ties share their mean rank."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    spread = (sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y)) ** 0.5
    return sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True)) / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (1 + sum(v == value for v in values)) / 2 for value in values]


GROUPS: Mapping[str, tuple[Callable[[Case], bool], float]] = {
    "A100, tp or pp above 1": (lambda c: c.device.startswith("a100") and c.job.tp * c.job.pp > 1, 0.04),
    "A100, data parallel alone (FSDP, ZeRO)": (
        lambda c: c.device.startswith("a100") and c.job.tp * c.job.pp == 1,
        0.035,
    ),
    "H100, bf16": (lambda c: c.device.startswith("h100") and c.costs.dtype == "bfloat16", 0.08),
    "fp8": (lambda c: c.costs.dtype == "float8", 0.12),
    "V100": (lambda c: c.device.startswith("v100"), 0.0),
    "all": (lambda c: True, 0.0),
}
"""Groups of rows, and the target of their mean error (0: none)."""


def by_group(found: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Errors of grade A rows by group, with and without the UNEXPLAINED rows."""
    table = {}
    for name, (belongs, target) in GROUPS.items():
        rows = [r for r in found if r.error is not None and r.case.grade == "A" and belongs(r.case)]
        explained = [r for r in rows if r.case.id not in UNEXPLAINED]
        table[name] = {
            "target": target,
            **figures([r.error for r in rows if r.error is not None]),
            "explained": figures([r.error for r in explained if r.error is not None]),
        }
    return table


def by_source(found: Sequence[Result]) -> dict[tuple[str, ...], dict[str, float]]:
    """Errors by (source, device, dtype, grade)."""
    table: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for r in found:
        if r.error is not None:
            table[r.case.source, r.case.device, r.case.costs.dtype, r.case.grade].append(r.error)
    return {key: figures(errors) for key, errors in table.items()}


UNEXPLAINED_MEMORY = {
    "h034": "65 GB with micro batches of 2; the source gives the same job with micro batches of 4 only 56 GB",
    "h074": "the same job as h075 in every key",
    "h075": "38 GB; h074, the same job, takes 44 GB",
    "h129": "out of memory; h123, with equal parameters per rank, layout and micro batch, ran with 67 GB",
}
"""Rows whose memory contradicts other rows, and how. They stay in every mean."""

WHOLE = "whole process"
"""Kind of memory figure that includes memory outside of tensors."""

NOISE = 0.03
"""Relative difference between rows that are said to be identical."""

LAYOUT_KEYS = ("tp", "pp", "cp", "chunks", "micro_batch", "recompute", "zero", "zero_group", "sequence_parallel")


def sweeps(found: Sequence[Result]) -> dict[str, list[Result]]:
    """Sweeps: rows that differ only in layout (same source, model, devices, fabric), with at least three layouts."""
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for r in found:
        job = r.case.job
        if r.error is not None and r.case.grade in "AB":
            model = (job.layers, job.hidden, job.ffn, job.heads, job.seq_len)
            groups[r.case.source, *model, r.case.device, job.ranks, r.case.fabric, r.case.costs.dtype].append(r)
    named = {}
    for key, rows in groups.items():
        layouts = {tuple(getattr(r.case.job, name) for name in LAYOUT_KEYS) for r in rows}
        if len(layouts) >= 3:
            named[f"{key[0]} {key[1]}x{key[2]}, {key[4]} heads, {key[7]} {key[6]}, {key[8]}"] = rows
    return named


def rate(r: Result, seconds: float) -> float:
    """Throughput in tokens/s per rank, for a step of `seconds`."""
    job = r.case.job
    return job.global_batch * job.seq_len / seconds / job.ranks


def ranked(rows: Sequence[Result]) -> dict[str, float]:
    """Ranking quality within a sweep.

    correlation: Spearman's.  lost: throughput lost by choosing the layout predicted best, relative to the best one.
    apart: pairs whose measured throughput differs by more than NOISE.  right: pairs of these ranked correctly.
    """
    measured = [rate(r, r.case.seconds or 1.0) for r in rows]
    predicted = [rate(r, r.seconds) for r in rows]
    chosen = measured[max(range(len(rows)), key=predicted.__getitem__)]
    apart = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if measured[i] > (1 + NOISE) * measured[j]]
    return {
        "n": len(rows),
        "correlation": spearman(measured, predicted),
        "lost": 1 - chosen / max(measured),
        "apart": len(apart),
        "right": sum(predicted[i] > predicted[j] for i, j in apart),
    }


def by_memory(found: Sequence[Result]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Errors of memory by (source, kind of figure, grade); gb: mean absolute error in GB."""
    table: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for r in found:
        if r.memory_error is not None:
            table[r.case.source, r.memory_kind, str(r.case.row.get("complete_mem", "A"))[:1]].append(r)
    return {
        key: figures([r.memory_error or 0.0 for r in rows])
        | {"gb": _mean_gb(rows), "gb_explained": _mean_gb([r for r in rows if r.case.id not in UNEXPLAINED_MEMORY])}
        for key, rows in table.items()
    }


def of_others(found: Sequence[Result]) -> dict[str, float]:
    """Errors of memory of all rows but those that measured whole processes."""
    return figures([r.memory_error for r in found if r.memory_error is not None and r.memory_kind != WHOLE])


def _mean_gb(rows: Sequence[Result]) -> float:
    return sum(abs(r.memory_off_gib or 0.0) for r in rows) / len(rows) if rows else 0.0


def out_of_memory(found: Sequence[Result]) -> dict[str, Any]:
    """Out-of-memory predictions: of rows that ran out, how many were predicted; of rows that ran, false alarms."""
    ran_out = [r for r in found if r.case.row.get("outcome") == "OOM"]
    ran = [r for r in found if r.case.row.get("outcome") == "ok"]
    return {
        "out": len(ran_out),
        "called": sum(not r.fits for r in ran_out),
        "missed": [r.case.id for r in ran_out if r.fits],
        "ran": len(ran),
        "false": [r.case.id for r in ran if not r.fits],
    }
