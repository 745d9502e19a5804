"""What `titan plan` says of each measured job, kept from before it was measured, and both side by side.

bench/results/gpu_predictions.jsonl is only appended to: a line per cluster and job, with commit and date. A table shows
the newest prediction that is older than the measurement.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import results
from bench.gpu import jobs
from bench.gpu.records import Record, Row, read
from bench.gpu.shapes import JOBS, Shape
from titan.config import load_job
from titan.planner.machine import cluster
from titan.planner.search.unset_options import settle
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Planner
from titan.planner.step.work import COMMUNICATION

PATH = results.FOLDER / "gpu_predictions.jsonl"
CLUSTERS = ("h100", "h200")
QUANTITIES = {"step_s": "step", "allocated_gib": "peak allocated", "reserved_gib": "peak reserved"}
"""Keys of a prediction, and the labels of the rows with the same measured."""


def write(path: Path = PATH) -> Path:
    """Append the predictions of every job on each cluster; returns the file."""
    about = results.about()
    with path.open("a", encoding="utf-8") as file:
        for name in CLUSTERS:
            for job, shape in JOBS.items():
                line = {"cluster": name, "job": job, **predicted(name, shape)}
                file.write(json.dumps({**line, "commit": about["commit"], "date": about["date"]}) + "\n")
    return path


def predicted(name: str, shape: Shape) -> dict[str, float]:
    """Seconds, MFU and memory of a step of one rank on a cluster, without communication, as other ranks are faked."""
    words = [word for key, value in shape.plan_keys().items() for word in (f"--{key}", jobs.word(value))]
    where = cluster.load(name)
    job, _ = settle(load_job(jobs.SPEED, words, shape.ranks), where.memory)
    planned = Planner(where).predict(costs_of(job), job.layout)
    (memory,) = planned.memory
    alone_s = planned.step_time_s - sum(planned.time_s[purpose] for purpose in COMMUNICATION)
    return {
        "step_s": round(alone_s, 5),
        "mfu": round(planned.mfu * planned.step_time_s / alone_s, 4),
        "allocated_gib": round(memory.allocated / GIB, 2),
        "reserved_gib": round(memory.reserved / GIB, 2),
    }


def table(device: str, last: Mapping[str, Record], path: Path = PATH) -> str:
    """The predicted and measured figures of a device as a table of Markdown; a line where there is nothing measured."""
    name = next((name for name in CLUSTERS if name.upper() in device), "")
    lines = list(_lines(last, [line for line in read(path) if line["cluster"] == name]))
    if not lines:
        return "No measured job has a prediction for this device."
    head = "| job | quantity | predicted | measured | predicted / measured |\n|---|---|---|---|---|"
    return "\n".join([head, *lines])


def _lines(last: Mapping[str, Record], made: list[dict[str, Any]]) -> Iterator[str]:
    measured = {row.label: (row, record.head["time"]) for record in last.values() for row in record.rows}
    for job in JOBS:
        for key, label in QUANTITIES.items():
            row, when = measured.get(f"{job}: {label}", (Row("", None), ""))
            before = [line for line in made if line["job"] == job and line["date"] <= when]
            if before and isinstance(row.value, float):
                said = before[-1][key]
                unit = f" {row.unit}".rstrip()
                yield f"| {job} | {label} | {said:.4g}{unit} | {row.value:.4g}{unit} | {said / row.value:.2f} |"
