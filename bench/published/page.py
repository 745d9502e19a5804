"""docs/validation.md, generated from the predictions of published rows."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .describe import frameworks
from .fit import USUAL
from .left_out import FEWEST, ROUNDS
from .report import NOISE, UNEXPLAINED, UNEXPLAINED_MEMORY
from .rows import OWN, load

TABLES = {"products": "kernels.matmul", "link": "links"}
"""Tables of a cluster file, by the first part of where a constant stands."""

WIDTH = 120
"""Columns of a line of text."""

LISTED = 20
"""Ids of rows that a cell of a table lists."""

INTRO = """# Validation

**The main table of this page, [Step time](#step-time), is in-sample: the planner's constants were fitted to the same
rows. For an unseen cluster, use the leave-one-source-out table, [Step time of an unseen
source](#step-time-of-an-unseen-source).**

This page answers one question: how far are the predictions of `titan plan` from published measurements?

| section | compares | fitted to the same rows? |
| --- | --- | --- |
| [Step time of an unseen source](#step-time-of-an-unseen-source) | step times of a source left out of the fit | no |
| [Step time](#step-time) | step times, by hardware and by source | yes |
| [Layout sweeps](#layout-sweeps) | the order of layouts of one job | yes |
| [Memory](#memory) | memory of a rank, and whether a run fits | in part: the overhead of whole processes was fitted |
| [Schedules](#schedules) | simulated pipeline schedules, given measured times of actions | no: nothing is fitted |

`python -m bench.plan_accuracy` writes this page:

```sh
python -m bench.plan_accuracy                # predict all rows and write this page
python -m bench.plan_accuracy --json         # print the prediction of every row
python -m bench.plan_accuracy --rows FILE    # use another file of rows, and only print
python -m bench.plan_accuracy --fit          # refit the constants and the leave-one-source-out table
python -m bench.plan_accuracy --fit --write  # also write the constants into the cluster files
```

A row is one published measurement: a job, the hardware it ran on, and its step time or its memory. The planner predicts
each row from four descriptions:

- the row's own model, layout and batch;
- its framework (`bench/published/frameworks.toml`);
- its device (`configs/clusters`, `bench/published/clusters`);
- its fabric, the network between nodes (`bench/published/fabrics.toml`).

No constant is keyed on a source. Differences between systems are data of the device, the fabric or the framework, and
are stated in those files.

An error is |predicted / measured - 1|, and p90 is the 90th percentile. The grade of a row says how complete its source
is: A lacks no key, B lacks one, C lacks more, and X is unfit for comparison. Missing keys are guessed.
"""

LEFT_OUT = """## Step time of an unseen source

Use this table for an unseen cluster. Each source is left out of the fit in turn, and its rows are predicted with the
constants fitted to the other sources.
"""

LEFT_OUT_LIMITS = f"""\
- Scale is the median of predicted / measured over the source's rows. The two columns after it divide the predictions by
  this scale, so they are fitted to the same rows by one number.
- A borrowed constant is one that only the left-out source determines. It takes the value of the A100, or of InfiniBand
  for a fabric.
- Explained rows exclude the unexplained rows listed under [Step time](#step-time).
- Only sources with at least {FEWEST} rows of grade A are left out. H100 rows occur here only as a part of llm-foundry.
- The three bigscience sources are runs on one cluster. With one of them left out, the others still determine the
  constants of its repaired Omni-Path fabric.
- A type of GPU without rows in the fit is not covered. The b200 rows under [By source](#by-source) show such a case:
  they use the constants of the H100.
- Only constants are refitted. The descriptions of frameworks and fabrics stay, and some were inferred from the same
  rows ([Where predictions miss](#where-predictions-miss)).
- Each refit starts at the constants of the full fit and takes at most {ROUNDS} iterations.
"""

WHY = """## Where predictions miss

**Step time**

- Unfused attention multiplies batches of small matrices. Rows with heads 192 to 224 wide and at most 16 heads per rank
  and micro batch are slow. They take 5 to 9 ms longer per layer and micro batch than the same shapes with 32 heads. The
  slow rows have 64 heads, TP 8 and one or two sequences. Rows with heads 128, 160, 448 or 896 wide are not slow.
- The extra time is about what these products take without tensor cores. The A100 files describe it by
  `small_batch_max`, `small_batch_dims` and `small_batch_factor`. It is inferred from the rows, not measured on a
  kernel.
- Rows with long pipeline waits (many stages, few micro batches) are predicted 3 to 8 % too slow. This includes the head
  on the last stage.
- Identical rows of the Omni-Path cluster differ by 3 to 7 %. Rows from before its nodes were repaired take about six
  seconds per step longer, at every layout. They are described as a separate fabric.
- BLOOM's run (h136) took 105.22 s per step and is predicted at 103.70 s. titan's own job at its layout,
  `configs/bloom176b.toml`, is predicted at 96.95 s on the same cluster. titan recomputes no last product of a layer
  (6.87 s), and reduces gradients beside computation (3.26 s). Sliced sends and fused operations save the run 3.38 s.
- Full recomputation in runs with `DEFAULT` mixed precision is assumed to stop early, as PyTorch does from 2.1 on. This
  is inferred from their throughput, not stated. The same holds for the losses that their metrics recompute.
- nanotron's rows do not state recomputation, and two of them run at a third of the speed of the others.
- FP8 with one scale per row, and asynchronous tensor parallelism, are described roughly.
- torchtitan's selective recomputation repeats every second product and no attention. Its time is taken as that of every
  second layer.
- Recomputation of the feed-forward layer beside the core of attention (j022) is taken as that of the core alone.
- V100 at tensor parallelism 2 takes 1.05 ms longer per all-reduce of 8 MB, with and without recomputation. This would
  fit a pair without NVLink between its GPUs, but no source says so.

**Constants**

- Some constants lie at a bound. The minimum time of an operation, `launch_us`, stands for everything that small
  operations lose.
- Transfers between pipeline stages run at full port speed in every fitted fabric but Omni-Path before its repair.

**Memory**

- Sources mostly print memory in whole GB, by methods that they do not state. The process overhead beside tensors is one
  constant, and the unused memory of the allocator is one fraction of the memory that a step allocates.
- Relative to predictions with these constants, readings deviate by pipeline stages and micro batch size:
  - 2 to 3 GB below, with one sequence per micro batch and ten stages or more;
  - 2 to 4 GB below, with eight sequences;
  - 3 to 5 GB above, with two sequences and two or four stages.
- Runs that accumulate gradients in float32 hold 0.3 bytes per parameter that nothing accounts for.
- nanotron's rows with micro batches of 8 fit best if the inputs of matrix products are saved gathered. Its other rows
  fit best if they are not.
- torchtitan's float8 runs of 2025 are predicted 11 to 13 % below the measurement. Their selective recomputation saves
  no float8 product; what else they hold is not known.

**Layout sweeps**

- The order of layouts that were measured within 3 % of each other is chance.
- The V100 sweep is affected by tensor parallelism 2, InternEvo's sweep on 256 devices by row i280. One more sweep is
  affected by heads that its rows do not state.
"""

SWEEPS = """## Layout sweeps

A sweep is a set of rows with the same source, model, number of devices and fabric, and different layouts. The
predictions are in-sample. Two figures are compared:

- the rank correlation (Spearman) of predicted and measured tokens/s;
- the loss of the chosen layout: the gap in measured tokens/s between the best layout and the one predicted best.
"""

MEMORY = """## Memory

Each prediction counts what the row's figure counts: memory allocated or reserved by PyTorch, the whole process, or as
printed (`bench/published/memory.toml`). It is for the rank with the most memory, or for rank 0 if the source prints
rank 0.

For whole processes, the overhead and the allocator's fraction were fitted to rows of grade A: those errors are
in-sample. No leave-one-source-out table exists for memory.
"""

CONSTANTS = """## Fitted constants

The table lists every fitted constant. All other constants in the files come from data sheets or have their source
beside them. Each is a fraction, a time in microseconds or a size: a quantity that could be measured. The formulas that
use them are in `docs/planning.md`.

- The fit uses rows of grade A, and on H100 and H200 also rows of grade B.
- A row of a source with sixteen times as many rows has half the weight.
"""


def written(measured: Mapping[str, Any], fitted: Mapping[str, Any]) -> str:
    """The page as Markdown.

    Args:
        measured: what `bench.plan_accuracy.measure` returns.
        fitted: the content of fit.json; empty if nothing was fitted.
    """
    parts = [
        INTRO,
        _left_out(fitted.get("left_out", {})),
        _groups(measured["groups"]),
        _sources(measured["sources"]),
        _sweeps(measured["sweeps"]),
        _memory(measured),
        _schedules(measured["schedules"]),
        WHY,
        _constants(fitted.get("constants", [])),
        _frameworks(),
        _skipped(measured),
    ]
    return "\n".join(part for part in parts if part)


def _paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


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
    head = [
        "rows",
        "n",
        "mean",
        "median",
        "p90",
        "max",
        "target mean",
        "n explained",
        "mean explained",
        "p90 explained",
    ]
    said = _paragraph(
        "In-sample errors of rows of grade A: the constants were fitted to these rows.",
        "The last three columns exclude the unexplained rows, whose times no model explains.",
        "The list was fixed before the fit.",
        f"Unexplained rows: {', '.join(sorted(UNEXPLAINED))}.",
    )
    return f"## Step time\n\n{said}\n\n{_table(head, rows)}"


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = [[*of["of"], of["n"], *_figures(of)] for of in sources]
    said = _paragraph(
        "Errors of the same predictions, with the rows of grades B, C and X. Unexplained rows are included.",
        "Rows of grades C and X were not fitted, and rows of grade B only on H100 and H200.",
    )
    head = ["source", "device", "dtype", "grade", "n", "mean", "median", "p90", "max"]
    return f"### By source\n\n{said}\n\n{_table(head, rows)}"


def _left_out(table: Mapping[str, Mapping[str, Any]]) -> str:
    if not table:
        return ""
    rows = [
        [
            source,
            of["n"],
            *_figures(of)[::2],
            _percent(of["explained"]["mean"]),
            f"{of['scale']:.3f}",
            *_figures(of["scaled"])[::2],
            len(of["borrowed"]),
        ]
        for source, of in table.items()
    ]
    head = [
        "source",
        "n",
        "mean",
        "p90",
        "mean explained",
        "scale",
        "mean after scaling",
        "p90 after scaling",
        "constants borrowed",
    ]
    n = sum(of["n"] for of in table.values())
    mean = sum(of["n"] * of["mean"] for of in table.values()) / n
    said = f"The mean over all {n} rows of the table is {_percent(mean)}."
    return f"{LEFT_OUT}\n{_table(head, rows)}\n{said}\n\n{LEFT_OUT_LIMITS}"


def _sweeps(sweeps: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        [name, of["n"], f"{of['correlation']:.2f}", f"{of['right']} of {of['apart']}", _percent(of["lost"])]
        for name, of in sweeps.items()
    ]
    apart, right = (sum(of[key] for of in sweeps.values()) for key in ("apart", "right"))
    head = [
        "sweep: source, layers x width, heads, devices, fabric",
        "n",
        "rank correlation",
        "pairs ranked correctly",
        "loss of the chosen layout",
    ]
    good = sum(of["correlation"] >= 0.9 for of in sweeps.values())
    near = sum(of["lost"] <= 0.05 for of in sweeps.values())
    said = _paragraph(
        f"Of {len(sweeps)} sweeps, {good} have a rank correlation of at least 0.90.",
        f"In {near} the chosen layout is within 5 % of the best.",
        f"Identical rows differ by {100 * NOISE:.0f} %, so only pairs of layouts measured farther apart count.",
        f"Of {apart} such pairs, {right} are ranked as measured.",
    )
    return f"{SWEEPS}\n{said}\n\n{_table(head, rows)}"


def _memory(measured: Mapping[str, Any]) -> str:
    rows = [
        [*of["of"], of["n"], *_figures(of), f"{of['gb']:.1f}", f"{of['gb_explained']:.1f}"] for of in measured["memory"]
    ]
    out, others = measured["out_of_memory"], measured["memory_of_others"]
    head = ["source", "figure", "grade", "n", "mean", "median", "p90", "max", "mean, GB", "mean explained, GB"]
    missed, false = (", ".join(ids) or "none" for ids in (out["missed"], out["false"]))
    unexplained = "\n".join(f"- {row}: {why}" for row, why in UNEXPLAINED_MEMORY.items())
    rest = _percent(others.get("mean"))
    return (
        f"{MEMORY}\n{_table(head, rows)}\n"
        f"Without the figures of whole processes, the mean is {rest} on {others['n']} rows.\n\n"
        f"Unexplained rows contradict other rows. They are in every mean but the last column's:\n\n{unexplained}\n\n"
        f"- Runs that ran out of memory: {out['called']} of {out['out']} are predicted not to fit (missed: {missed}).\n"
        f"- Runs that completed: {len(out['false'])} of {out['ran']} are predicted not to fit ({false}).\n"
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
    said = [
        "Here the simulator receives the measured times of forward, backward and transfers, and predicts the step.",
        "Nothing is fitted. `python -m bench.published_schedules` prints every row.",
        f"Step time on {len(rows)} rows: mean {_percent(sum(errors) / len(errors))}, max {_percent(errors[-1])}.",
    ]
    if bubbles:
        off = _percent(sum(bubbles) / len(bubbles))
        said.append(f"Bubble on {len(bubbles)} rows: off by {off} of the step on average.")
    return f"## Schedules\n\n{_paragraph(*said)}\n"


def _constants(constants: Sequence[Mapping[str, Any]]) -> str:
    if not constants:
        return ""
    rows = [
        [
            ", ".join(of["devices"]) or of["where"].split(".")[1],
            _key(of["where"]),
            f"{of['value']:.3f}",
            f"{of['low']:g} to {of['high']:g}",
            of["rows"],
        ]
        for of in constants
    ]
    drawn = " and ".join(f"`{key.split('.')[-1]}`" for key in USUAL)
    prior = f"- {drawn} have a weak prior at 0.25, where the rows hardly determine them.\n"
    prior += "  A data sheet gives 0.25 of the peak for products without tensor cores.\n"
    return f"{CONSTANTS}{prior}\n{_table(['device or fabric', 'constant', 'value', 'bounds', 'rows'], rows)}"


def _key(where: str) -> str:
    """Table and key of the cluster file: kernels.matmul.efficiency, kernels.launch_us, links.efficiency."""
    kind, *path = where.split(".")
    if kind == "fabric":
        return f"links.{path[-1]}"
    return ".".join([TABLES.get(kind, kind), *path])


def _frameworks() -> str:
    rows = [[framework.name, framework.source] for framework in frameworks()]
    said = "The sources that each description in `bench/published/frameworks.toml` is based on."
    return f"## Frameworks\n\n{said}\n\n" + _table(["framework", "described from"], rows)


def _skipped(measured: Mapping[str, Any]) -> str:
    rows = [
        [reason, count, _listed([i for i, why in measured["skipped"].items() if why == reason])]
        for reason, count in Counter(measured["skipped"].values()).most_common()
    ]
    untimed = sum(result["measured_s"] is None for result in measured["results"])
    x = [result["id"] for result in measured["results"] if result["grade"] == "X" and result["measured_s"] is not None]
    said = [
        f"Of {measured['rows']} rows, {len(measured['skipped'])} cannot be predicted, for the reasons below.",
        f"{untimed} other rows state no time. Rows of grade X count in no mean of grade A: {', '.join(x) or 'none'}.",
    ]
    if (copied := len(load(OWN))) != measured["rows"]:
        said += [
            f"The repository's copy of the rows, `bench/published/rows.jsonl`, has {copied} rows.",
            "It leaves out rows that cannot be predicted, so a page written from it differs in this section only.",
        ]
    return f"## Rows that are not predicted\n\n{_paragraph(*said)}\n\n{_table(['reason', 'n', 'rows'], rows)}"


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(ids[:LISTED]) + more
