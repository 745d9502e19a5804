"""docs/validation.md, written from what was measured."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .describe import frameworks
from .report import NOISE, UNEXPLAINED, UNEXPLAINED_MEMORY

INTRO = """# Validation

How far the planner is off, on published measurements. Written by `python -m bench.plan_accuracy`; every row's
prediction is in `python -m bench.plan_accuracy --json`. `--rows FILE` runs it on any file of such rows, `--fit` fits
the constants anew, `--fit --write` puts them into the files as well.

A row is read as a job: the model's operations, the layout, a framework (`bench/published/frameworks.toml`), a device
(`configs/clusters`, `bench/published/clusters`) and a fabric (`bench/published/fabrics.toml`). No constant is keyed on
a source: what differs between systems is data of the device, the fabric or the framework, and stands in those files.
Errors are |predicted / measured - 1|. Rows of grade A lack nothing, B one key, C more; what a row lacks is guessed.
The rows of the grade A that constants were fitted to are the rows that are reported: for a new cluster, read the table
of sources left out.
"""

WHY = """## What misses, and why

- Attention that writes its scores multiplies batches of small matrices. At heads 192 to 224 wide and at most 16 of them
  a rank and micro batch (64 heads, TP 8, one or two sequences) rows take 5 to 9 ms a layer and micro batch longer than
  the same shapes with 32; with heads of 128, 160, 448 or 896 they do not. That is about what such products take
  without tensor cores; the A100's files say so by `few`, `few_between` and `few_kept`. It is read off the rows, not
  measured on a kernel.
- Rows that wait long (many stages, few micro batches) are predicted 3 to 8 % too slow, the last stage's head included.
- Identical rows of the Omni-Path cluster differ by 3 to 7 %. Rows before the day on which its nodes were mended are
  about six seconds a step slower at every layout; they are described as a fabric of their own.
- Full recompute of `DEFAULT` mixed precision runs is taken to stop early, as PyTorch does from 2.1 on; that is inferred
  from their throughput, not stated. So are the losses that their metrics compute again.
- nanotron's rows do not state recompute, and two of them run at a third of the others' speed.
- FP8 with one scale a row, and asynchronous tensor parallelism, are described roughly.
- Some constants lie at a bound: the time an operation takes at least stands for all that small operations lose, and
  transfers between stages are as fast as the port in every fabric that is not broken.
- Memory is mostly printed in whole GB by methods that are not stated. What a process holds beside tensors is one
  constant, and what its allocator leaves unused one share of what a step allocates. Readings of micro batches of one
  sequence in ten stages and more lie 2 to 3 GB below that, of eight sequences 2 to 4 below, of two sequences in two and
  four stages 3 to 5 above. Runs that sum in float32 hold 0.3 bytes a parameter that nothing accounts for.
- nanotron's rows at micro batches of 8 read as if the inputs of products were kept gathered, its others as if not.
- Attention's results, which selective recompute saves, are left out where products are in float8 (4 GB on H200).
- V100 at tensor parallelism 2 takes 1.05 ms a sum of 8 MB longer, recomputed or not: as if the pair had no NVLink
  between them, which nobody says.
- Ranks inside sweeps: where layouts were measured within 3 % of each other, their order is chance. Beside that, V100
  sweeps suffer from tensor parallelism 2, InternEvo's on 256 from i280, and one from heads that its rows do not state.
"""

MEMORY = """The fullest rank in the terms of the row's figure (`bench/published/memory.toml`), or rank 0 where that is
what was printed.
"""


def written(measured: Mapping[str, Any], fitted: Mapping[str, Any]) -> str:
    """The page."""
    parts = [
        INTRO, _groups(measured["groups"]), _sources(measured["sources"]), _left_out(fitted.get("left_out", {})),
        _sweeps(measured["sweeps"]), _memory(measured), _schedules(measured["schedules"]),
        _constants(fitted.get("constants", [])), _frameworks(), _skipped(measured), WHY,
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _figures(of: Mapping[str, Any]) -> list[str]:
    return [_percent(of.get(key)) for key in ("mean", "median", "p90", "max")]


def _groups(groups: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, of in groups.items():
        if of["n"]:
            aim = f"{100 * of['target']:.1f} %" if of["target"] else "-"
            rows.append([name, of["n"], *_figures(of), aim, of["explained"]["n"], *_figures(of["explained"])[::2]])
    head = ["rows", "n", "mean", "median", "p90", "max", "aim (mean)", "n explained", "mean", "p90"]
    said = "Step times, rows of grade A. On the right without the rows that nobody explained:\n" + ", ".join(
        sorted(UNEXPLAINED)
    )
    return f"## Step time\n\n{said}.\n\n{_table(head, rows)}"


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = [[*of["of"], of["n"], *_figures(of)] for of in sources]
    return "### By source\n\n" + _table(
        ["source", "device", "dtype", "grade", "n", "mean", "median", "p90", "max"], rows
    )


def _left_out(table: Mapping[str, Mapping[str, Any]]) -> str:
    if not table:
        return ""
    rows = [
        [source, of["n"], *_figures(of)[::2], _percent(of["explained"]["mean"]), f"{of['scale']:.3f}",
         *_figures(of["scaled"])[::2], len(of["borrowed"])]
        for source, of in table.items()
    ]  # fmt: skip
    head = ["source", "n", "mean", "p90", "mean explained", "scale", "mean after it", "p90", "constants borrowed"]
    said = (
        "Each source left out of the fit in turn, predicted with constants that no row of it had a part in; then\n"
        "after one scale, the median, is fitted to it. A constant that only this source sees is borrowed: the A100's\n"
        "share, InfiniBand's efficiency. Explained: without the rows that nobody explained."
    )
    return f"### Sources left out\n\n{said}\n\n{_table(head, rows)}"


def _sweeps(sweeps: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        [name, of["n"], f"{of['correlation']:.2f}", f"{of['right']} of {of['apart']}", _percent(of["lost"])]
        for name, of in sweeps.items()
    ]
    apart, right = (sum(of[key] for of in sweeps.values()) for key in ("apart", "right"))
    head = ["sweep", "n", "rank correlation", "pairs apart ranked right", "lost by the choice"]
    good = sum(of["correlation"] >= 0.9 for of in sweeps.values())
    near = sum(of["lost"] <= 0.05 for of in sweeps.values())
    said = (
        "Rows of one source, model, number of devices and fabric that differ in layout: rank correlation (Spearman)\n"
        "of tokens a second, and how far the layout that the planner ranks best was measured below the best. "
        f"Of {len(sweeps)} sweeps,\n{good} have at least 0.90, and in {near} the chosen layout is within 5 %.\n"
        f"Identical rows differ by {100 * NOISE:.0f} %; of {apart} pairs of layouts that were measured farther apart,\n"
        f"{right} are ranked as measured."
    )
    return f"## Sweeps\n\n{said}\n\n{_table(head, rows)}"


def _memory(measured: Mapping[str, Any]) -> str:
    rows = [
        [*of["of"], of["n"], *_figures(of), f"{of['gb']:.1f}", f"{of['gb_explained']:.1f}"] for of in measured["memory"]
    ]
    out = measured["out_of_memory"]
    head = ["source", "figure", "grade", "n", "mean", "median", "p90", "max", "mean, GB", "without those unexplained"]
    false = ", ".join(out["false"]) or "none"
    others = measured["memory_of_others"]
    unexplained = "\n".join(f"- {row}: {why}" for row, why in UNEXPLAINED_MEMORY.items())
    return (
        f"## Memory\n\n{MEMORY}\n{_table(head, rows)}\n"
        f"All other frameworks, which is all but whole processes: mean {_percent(others.get('mean'))} "
        f"on {others['n']} rows.\n\n"
        f"Rows that nobody explained, in every mean but the last column's:\n\n{unexplained}\n\n"
        f"Runs that went out of memory: {out['called']} of {out['out']} called "
        f"(missed: {', '.join(out['missed']) or 'none'}).\n"
        f"Runs that went well: {len(out['false'])} of {out['ran']} said not to fit ({false}).\n"
    )


def _schedules(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    errors = sorted(abs(row["error"]) for row in rows)
    bubbles = [
        abs(row["predicted_bubble"] - row["measured_bubble"])
        for row in rows
        if isinstance(row.get("measured_bubble"), float)
    ]
    text = (
        f"## Schedules\n\nFed with measured times of actions and transfers (`python -m bench.published_schedules`): "
        f"{len(rows)} rows,\nmean {_percent(sum(errors) / len(errors))}, max {_percent(errors[-1])}."
    )
    if bubbles:
        text += f" Bubble: off by {_percent(sum(bubbles) / len(bubbles))} of the step on {len(bubbles)} rows."
    return text + "\n"


def _constants(constants: Sequence[Mapping[str, Any]]) -> str:
    if not constants:
        return ""
    rows = [
        [", ".join(of["devices"]) or of["where"].split(".")[1], of["where"].split(".", 1)[1] if of["devices"] else
         of["where"].split(".")[-1], f"{of['value']:.3f}", f"{of['low']:g} to {of['high']:g}", of["rows"]]
        for of in constants
    ]  # fmt: skip
    said = (
        "Everything that is fitted. Each is a share, a time or a size that could be measured; all others in the files\n"
        "are data sheets' or stated beside them. Fitted on rows of grade A, of Hopper B too; a row of a source with\n"
        "sixteen times the rows weighs half. `odd` and `few_kept` are drawn weakly to 0.25, what a data sheet gives\n"
        "without tensor cores, where rows hardly say."
    )
    return f"## Free constants\n\n{said}\n\n{_table(['of', 'constant', 'value', 'bounds', 'rows'], rows)}"


def _frameworks() -> str:
    rows = [[framework.name, framework.source] for framework in frameworks()]
    return "## Frameworks\n\n" + _table(["framework", "described from"], rows)


def _skipped(measured: Mapping[str, Any]) -> str:
    reasons = Counter(measured["skipped"].values())
    rows = [
        [reason, count, ", ".join(i for i, why in measured["skipped"].items() if why == reason)[:120]]
        for reason, count in reasons.most_common()
    ]
    untimed = sum(result["measured_s"] is None for result in measured["results"])
    x = [result["id"] for result in measured["results"] if result["grade"] == "X" and result["measured_s"] is not None]
    said = (
        f"{measured['rows']} rows; {len(measured['skipped'])} are not predicted, {untimed} others state no time. "
        f"Grade X is in no mean of grade A:\n{', '.join(x) or 'none'}."
    )
    return f"## Rows left aside\n\n{said}\n\n{_table(['why', 'n', 'rows'], rows)}"
