"""Fits the free constants of cluster files and fabrics to published rows.

A constant is one value in one or several cluster files, or of a fabric. All are fractions, microseconds or sizes that
could be measured. Which rows a constant affects follows from their device and fabric, never from their source.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from titan.contracts.base.cost import Costs
from titan.contracts.base.layout import Layout
from titan.planner.machine.cluster import Cluster
from titan.planner.step.predict import Planner, Prediction
from titan.planner.step.steady_state import Steps

from .describe import all_devices, all_fabrics, cluster_of, device_of, fabric_of, framework_of
from .reader import costs_of, layout_of
from .rows import Row, Skip, measured, read

A100, V100, HBM2E = ("a100-40gb", "a100-80gb"), ("v100-32gb", "v100-16gb"), ("h100-96gb-500w",)
H100 = ("h100-flash2", "h100-cudnn", "h200-flash2")
LIKE_H100 = (*HBM2E, "b200")
MEASURED = ("h100", "h200")
"""Files of `configs/clusters` whose kernels `python -m bench.gpu` measures; of them only the network is fitted."""
ON_OMNI_PATH = ("a100-80gb-omnipath",)


@dataclass(frozen=True)
class Constant:
    """A free constant: its place in the cluster files, and its bounds.

    devices: cluster files that share it; empty: a fabric's.  low, high: bounds.
    usual: value of a weak prior, where rows hardly determine it; None: no prior.
    lent: devices whose files repeat it, without rows that it is fitted to.
    where: "products.DTYPE.KEY" (or "products.KEY" for all dtypes), "kernels.KEY", "link.KEY" or "fabric.NAME.KEY".
    """

    devices: tuple[str, ...]
    where: str
    low: float
    high: float
    usual: float | None = None
    lent: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Printed name: devices and place in their files."""
        return f"{', '.join(self.devices) or 'fabric'}: {self.where}"

    def seen_by(self, cases: "Iterable[Case]") -> int:
        """Number of these rows that the constant affects."""
        return sum(_sees(case, self) for case in cases)


USUAL = {"products.unaligned_16b_factor": 0.25, "products.small_batch_factor": 0.25}
"""Speed without tensor cores relative to tensor cores, by the A100 data sheet (78 and 312 TFLOP/s in fp16)."""

DRAWN = 0.05
"""Weight of the prior: a deviation of high - low counts as this log(predicted / measured) of one row."""


def _constants_of(
    devices: tuple[str, ...], keys: Mapping[str, tuple[float, float]], lent: tuple[str, ...] = ()
) -> list[Constant]:
    return [Constant(devices, key, low, high, USUAL.get(key), lent) for key, (low, high) in keys.items()]


SHARES = {"efficiency": (0.1, 1.0), "p2p_efficiency": (0.1, 1.0)}
LATENCY = {"latency_us": (1.0, 500.0)}
OMNI_PATH, REPAIRED = "Omni-Path 4 x 100 Gb/s, before node repair", "Omni-Path 4 x 100 Gb/s"
HDR, INFINIBAND = "InfiniBand HDR", "InfiniBand"
FAST_ROCE, ROCE = "RoCE 8 x 200 Gb/s", "RoCE 4 x 100 Gb/s"

CONSTANTS = (
    *_constants_of(
        A100,
        {
            "products.efficiency": (0.5, 0.95),
            "kernels.bandwidth_efficiency": (0.6, 0.95),
            "products.small_batch_factor": (0.02, 1.0),
        },
        lent=ON_OMNI_PATH,
    ),
    *_constants_of(
        A100,
        {
            "products.wave_quantization": (0.0, 1.0),
            "products.k_half": (0, 300),
            "products.unaligned_factor": (0.6, 1.0),
            "products.unaligned_16b_factor": (0.02, 1.0),
            "kernels.launch_us": (0, 15),
            "kernels.overlap_slowdown": (0.0, 1.0),
        },
        lent=(*ON_OMNI_PATH, *V100, *H100, *LIKE_H100, "mi250x-frontier"),
    ),
    *_constants_of(
        A100,
        {
            "kernels.attention_forward": (0.15, 0.8),
            "kernels.attention_backward": (0.15, 0.8),
            "link.efficiency": (0.4, 0.9),
        },
        lent=(*ON_OMNI_PATH, *V100),
    ),
    *_constants_of(V100, {"products.efficiency": (0.5, 0.95), "kernels.bandwidth_efficiency": (0.6, 0.95)}),
    *_constants_of(H100, {"products.bfloat16.efficiency": (0.3, 0.95)}, lent=LIKE_H100),
    *_constants_of(
        H100, {"kernels.attention_forward": (0.08, 0.8), "kernels.attention_backward": (0.08, 0.8)}, lent=LIKE_H100
    ),
    *_constants_of(
        H100,
        {
            "kernels.bandwidth_efficiency": (0.6, 0.95),
            "products.float8.efficiency": (0.2, 0.95),
            "link.efficiency": (0.4, 0.9),
        },
        lent=LIKE_H100,
    ),
    *_constants_of(
        ("h100-cudnn",), {"kernels.attention_forward": (0.1, 0.9), "kernels.attention_backward": (0.1, 0.9)}
    ),
    *_constants_of(HBM2E, {"products.bfloat16.efficiency": (0.2, 0.95), "products.float8.efficiency": (0.1, 0.95)}),
    *(
        Constant((), f"fabric.{name}.{key}", *between, lent=lent)
        for name, lent in (
            (OMNI_PATH, ()),
            (REPAIRED, ON_OMNI_PATH),
            (HDR, A100),
            (INFINIBAND, (*H100, *LIKE_H100, *MEASURED)),
        )
        for key, between in SHARES.items()
    ),
    *(
        Constant((), f"fabric.{name}.{key}", *between)
        for name in (FAST_ROCE, ROCE)
        for key, between in {"efficiency": (0.1, 1.0), **LATENCY}.items()
    ),
)


@dataclass(frozen=True)
class Case:
    """A row that can be predicted.

    row: as published.  job: its sizes.  costs, layout: for the planner.  device, fabric: names.  gb_s: bandwidth
    between nodes, GB/s per device.  seconds: measured step time; None: the row has none.
    """

    row: Mapping[str, Any]
    job: Row
    costs: Costs
    layout: Layout
    device: str
    fabric: str
    gb_s: float
    seconds: float | None

    @property
    def id(self) -> str:
        """Id of the row, as in the file of rows."""
        return str(self.row["id"])

    @property
    def grade(self) -> str:
        """Completeness of the row for step times: A, B, C or X; A if not stated."""
        return str(self.row.get("complete_time", "A" if self.seconds else "X"))[:1]

    @property
    def source(self) -> str:
        """First word of the row's source, such as a repository or arXiv id."""
        return re.split(r"[\s,;(]", str(self.row.get("source") or "unnamed"))[0]


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row.

    Raises:
        Skip: the row cannot be predicted; says why.
    """
    job = read(row)
    framework = framework_of(row)
    device = device_of(row, framework)
    costs = costs_of(job, framework)
    lacking = {costs.dtype, costs.wide_dtype} - set(all_devices()[device].peak_tflops)
    if lacking:
        raise Skip(f"cluster file {device} has no peak for {', '.join(sorted(lacking))}")
    return Case(row, job, costs, layout_of(job), device, *fabric_of(row, job, device), measured(row, job))


def cases_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Case], dict[str, str]]:
    """(cases of the rows that can be predicted, reason by id of each other row)."""
    cases, skipped = [], {}
    for row in rows:
        try:
            cases.append(case_of(row))
        except Skip as reason:
            skipped[str(row["id"])] = str(reason)
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            skipped[str(row["id"])] = f"malformed row: {type(error).__name__}: {error}"
    return cases, skipped


class World:
    """All devices and fabrics, with `values` in place of some constants of the files."""

    steps: ClassVar[dict[Any, Steps]] = {}

    def __init__(self, values: Mapping[Constant, float] | None = None) -> None:
        self.devices, self.fabrics = all_devices(), all_fabrics()
        for constant, value in (values or {}).items():
            self._set(constant, value)
        self._planners: dict[Any, Planner] = {}

    def _set(self, constant: Constant, value: float) -> None:
        kind, *path = constant.where.split(".")
        if kind == "fabric":
            self.fabrics[path[0]] = replace(self.fabrics[path[0]], **{path[1]: value})
        for name in constant.devices:
            self.devices[name] = _with(self.devices[name], kind, path, value)

    def planner(self, case: Case) -> Planner:
        """The planner for the cluster of a row; cached."""
        key = (case.device, case.fabric, case.gb_s, case.job.per_node)
        if key not in self._planners:
            planner = Planner(
                cluster_of(self.devices[case.device], self.fabrics[case.fabric], case.gb_s, case.job.per_node)
            )
            planner._steps = World.steps
            self._planners[key] = planner
        return self._planners[key]

    def predict(self, case: Case) -> Prediction:
        """The prediction of a row's step, with memory."""
        return self.planner(case).predict(case.costs, case.layout)

    def seconds(self, case: Case) -> float:
        """Predicted step time of a row in seconds; faster than `predict`, as memory is left out."""
        return self.planner(case).draft(case.costs, case.layout).finish(()).step_time_s


def _with(cluster: Cluster, kind: str, path: Sequence[str], value: float) -> Cluster:
    if kind == "kernels":
        return replace(cluster, kernels=replace(cluster.kernels, **{path[0]: value}))
    if kind == "link":
        return replace(cluster, links=(replace(cluster.links[0], **{path[0]: value}), *cluster.links[1:]))
    changed = dict(cluster.products)
    for dtype in changed:
        if len(path) == 1 or path[0] == dtype:
            changed[dtype] = replace(changed[dtype], **{path[-1]: value})
    return replace(cluster, products=changed)


def get(constant: Constant, world: World) -> float:
    """The value that a constant has in the files of a world."""
    kind, *path = constant.where.split(".")
    if kind == "fabric":
        return float(getattr(world.fabrics[path[0]], path[1]))
    cluster = world.devices[constant.devices[0]]
    if kind == "kernels":
        return float(getattr(cluster.kernels, path[0]))
    if kind == "link":
        return float(getattr(cluster.links[0], path[0]))
    dtype = path[0] if len(path) > 1 else ("bfloat16" if "bfloat16" in cluster.products else "float16")
    return float(getattr(cluster.products[dtype], path[-1]))


def fit(
    cases: Sequence[Case],
    constants: Sequence[Constant] = CONSTANTS,
    start: Mapping[Constant, float] | None = None,
    rounds: int = 12,
) -> dict[Constant, float]:
    """Fit constants by least squares of log(predicted / measured), with a soft L1 loss; returns their values.

    Args:
        cases: rows to fit to; those without a measured time are ignored.
        constants: constants to fit; those that affect no row are left out.
        start: initial values; None: those of the cluster files.
        rounds: maximum number of iterations.
    """
    try:
        from scipy.optimize import least_squares  # type: ignore[import-untyped]
    except ImportError:
        raise SystemExit("--fit needs scipy: .venv/bin/python -m pip install scipy") from None
    timed = [case for case in cases if case.seconds]
    seen = [c for c in constants if any(_sees(case, c) for case in timed)]
    errors = _Errors(timed, seen)
    found = least_squares(
        errors.at,
        errors.inside(World(start)),
        jac=errors.slopes,
        bounds=([c.low for c in seen], [c.high for c in seen]),
        loss="soft_l1",
        f_scale=0.02,
        x_scale=[c.high - c.low for c in seen],
        max_nfev=rounds,
    )
    return dict(zip(seen, map(float, found.x), strict=True))


def fitted(cases: Iterable[Case]) -> list[Case]:
    """The rows that constants are fitted to: grade A; of Hopper devices, which have few rows, also grade B."""
    return [
        case
        for case in cases
        if case.seconds and (case.grade == "A" or (case.grade == "B" and case.device.startswith("h")))
    ]


class _Errors:
    """Weighted log(predicted / measured) of cases as a function of constants, and its derivatives."""

    def __init__(self, cases: Sequence[Case], constants: Sequence[Constant]) -> None:
        self.cases, self.constants, self.weights = cases, constants, _weights(cases)
        self.seeing = [[i for i, case in enumerate(cases) if _sees(case, c)] for c in constants]

    def inside(self, world: World) -> list[float]:
        """The constants' values in a world, moved slightly inside their bounds."""
        margins = [(c, 1e-3 * (c.high - c.low)) for c in self.constants]
        return [min(max(get(c, world), c.low + margin), c.high - margin) for c, margin in margins]

    def at(self, values: Sequence[float]) -> list[float]:
        drawn = [
            DRAWN * (value - c.usual) / (c.high - c.low)
            for c, value in zip(self.constants, values, strict=True)
            if c.usual is not None
        ]
        return [*self._of(values, range(len(self.cases))), *drawn]

    def _of(self, values: Sequence[float], numbers: Iterable[int]) -> list[float]:
        world = World(dict(zip(self.constants, map(float, values), strict=True)))
        return [
            self.weights[i] * math.log(world.seconds(self.cases[i]) / self.cases[i].seconds)  # type: ignore[operator]
            for i in numbers
        ]

    def slopes(self, values: Sequence[float]) -> list[list[float]]:
        base = self.at(values)
        table = [[0.0] * len(self.constants) for _ in self.cases]
        for column, (constant, numbers) in enumerate(zip(self.constants, self.seeing, strict=True)):
            step = 0.01 * (constant.high - constant.low)
            if values[column] + step > constant.high:
                step = -step
            moved = [value + step * (i == column) for i, value in enumerate(values)]
            for row, error in zip(numbers, self._of(moved, numbers), strict=True):
                table[row][column] = (error - base[row]) / step
        for column, constant in enumerate(self.constants):
            if constant.usual is not None:
                table.append([DRAWN / (constant.high - constant.low) * (i == column) for i in range(len(values))])
        return table


def _weights(cases: Sequence[Case]) -> list[float]:
    """Weight per row: a source with four times the rows weighs twice as much in total."""
    sizes = Counter(str(case.row.get("source")) for case in cases)
    mean = len(cases) / len(sizes) if sizes else 1.0
    return [(mean / sizes[str(case.row.get("source"))]) ** 0.25 for case in cases]


def _sees(case: Case, constant: Constant) -> bool:
    return case.device in constant.devices if constant.devices else constant.where.startswith(f"fabric.{case.fabric}.")
