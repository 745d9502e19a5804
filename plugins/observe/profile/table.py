"""The table of where a step went: measured seconds beside predicted ones, on the same rows."""

from collections.abc import Mapping, Sequence

from titan.contracts import Axis
from titan.contracts.base.cost import PredictedStep

FAMILIES = {
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "data-parallel communication",
    "worker": "exchange between workers",
    "pp": "pipeline communication and bubble",
    "all_ranks": "collectives of all ranks",
}
"""Family of communication -> name of its row; `Axis.family` has all but the last."""

_PREDICTED = {"compute": ("forward", "backward", "recompute"), "pp": ("pp", "bubble")}
"""Row -> purposes of a prediction that it stands for, where they are more than one."""


def by_row(measured: Mapping[str, float], axes: Sequence[Axis]) -> dict[str, float]:
    """Seconds by row: "compute", families of communication, "optimizer", "data", "other".

    measured: as `seconds_per_step` returns it. A group of several axes has the family of the first.
    """
    families = {axis.name: axis.family for axis in axes}
    rows = dict.fromkeys(("compute", *FAMILIES, "optimizer", "data", "other"), 0.0)
    for name, seconds in measured.items():
        row = {"update": "optimizer"}.get(name, name)
        rows[row if row in rows else families.get(name.split(" ")[0], "all_ranks")] += seconds
    there = {*("compute", "optimizer", "data", "other"), *(axis_row for axis_row in rows if rows[axis_row])}
    return {row: seconds for row, seconds in rows.items() if row in there}


def text(measured: Mapping[str, float], axes: Sequence[Axis], predicted: PredictedStep | None) -> str:
    """Lines of the table: seconds and shares of a step, the measured ones first.

    The groups of a family have a line each where there are several.
    """
    rows, families = by_row(measured, axes), {axis.name: axis.family for axis in axes}
    names = {"compute": "compute", **FAMILIES, "optimizer": "optimizer update", "data": "waiting for data"}
    step, expected = sum(rows.values()), sum(predicted.time_s.values()) if predicted else 0.0
    lines = [["", "measured, s", "share", *(["predicted, s", "share"] if predicted else [])]]

    def line(name: str, seconds: float, foreseen: float) -> None:
        cells = [f"{foreseen:.4f}", f"{foreseen / expected:.1%}"] if predicted else []
        lines.append([name, f"{seconds:.4f}", f"{seconds / step:.1%}", *cells])

    for row in (*names, "other"):
        foreseen = _of(predicted, row)
        if row in rows or foreseen:
            line(names.get(row, "other: host, copies, idle"), rows.get(row, 0.0), foreseen)
            groups = {name: s for name, s in measured.items() if families.get(name.split(" ")[0]) == row}
            for name, seconds in groups.items() if len(groups) > 1 else ():
                lines.append([f"  {name}", f"{seconds:.4f}", f"{seconds / step:.1%}", *([""] * (len(lines[0]) - 3))])
    lines.append(["step", f"{step:.4f}", "", *([f"{expected:.4f}", ""] if predicted else [])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        ).rstrip()
        for cells in lines
    )


def _of(predicted: PredictedStep | None, row: str) -> float:
    purposes = _PREDICTED.get(row, (row,))
    return sum(predicted.time_s.get(purpose, 0.0) for purpose in purposes) if predicted else 0.0
