"""One line per kind of benchmark result: what a file of bench/results says."""

from collections.abc import Callable, Mapping
from importlib import import_module
from statistics import mean, median
from typing import Any

Found = Mapping[str, Any]

READ_HEADERS, READ_INDEX = "DCP: read the headers of all files", "read and check the index, on rank 0"
"""Of bench.scale, in seconds."""


def speeds(found: Found) -> dict[str, tuple[float, float, float]]:
    """Of bench.overhead: case -> (tokens/s of the bare loop, of titan, their ratio), by median step times."""
    table = {}
    for case, samples in found.items():
        if isinstance(samples, Mapping) and "bare_s" in samples:
            bare, ours = (median(samples[who]) for who in ("bare_s", "titan_s"))
            table[case] = (samples["tokens"] / bare, samples["tokens"] / ours, bare / ours)
    return table


def timings(found: Found) -> dict[str, tuple[float, float]]:
    """Of bench.plan_latency: command -> (median wall seconds, median peak GiB)."""
    return {
        name: (median(run[0] for run in runs), median(run[2] for run in runs))
        for name, runs in found["samples"].items()
    }


ONE = "one rank"
UNSPLIT, STYLES, OURS = ONE, "DTensor's styles", "titan"
Halves = dict[str, list[list[float]]]
"""Of a row of bench.dispatch, by who splits the layer: seconds of each forward, and of each backward."""


def dispatch_ms(row: Halves) -> dict[str, list[float]]:
    """Of a row of bench.dispatch: median milliseconds of forward and of backward, by who splits the layer."""
    return {who: [1e3 * median(half) for half in halves] for who, halves in row.items()}


def dispatch_ratio(row: Halves) -> float:
    """Of a row of bench.dispatch: milliseconds of a layer by DTensor's styles over those of titan."""
    medians = dispatch_ms(row)
    return sum(medians[STYLES]) / sum(medians[OURS])


SDPA, KERNEL = "SDPA", "kernel"


def kernel_ratios(row: Halves) -> list[float]:
    """Of a row of bench.cpu_attention: median time of SDPA over that of the kernel, in forward and in backward."""
    medians = dispatch_ms(row)
    return [theirs / ours for theirs, ours in zip(medians[SDPA], medians[KERNEL], strict=True)]


def turns_ms(row: Mapping[str, list[float]]) -> tuple[float, float]:
    """Of a row of bench.turns: median milliseconds of a step of titan and of torchtitan."""
    ours, theirs = (1e3 * median(row[who]) for who in ("titan_s", "torchtitan_s"))
    return ours, theirs


def context_rows(found: Found) -> list[list[str]]:
    """Of bench.context, a row per length and method: both, tokens/s, that relative to one rank, and GiB per rank.

    GiB: the most that a rank of the method held, and how much of it the steps added to what was there before them.
    """
    table = []
    for length, methods in found["rows"].items():
        seconds = {method: median(of["step_s"]) for method, of in methods.items()}
        for method, of in methods.items():
            added = max(peak - before for peak, before in zip(of["peak_gib"], of["before_gib"], strict=True))
            speeds = f"{int(length) / seconds[method]:.0f}", f"{seconds[ONE] / seconds[method]:.2f}"
            table.append([length, method, *speeds, f"{max(of['peak_gib']):.2f}", f"{added:.2f}"])
    return table


def _context(found: Found) -> str:
    *_, longest = found["rows"]
    rows = [row for row in context_rows(found) if row[0] == longest]
    each = ", ".join(f"{method} {speed} and {added} GiB" for _, method, _, speed, _, added in rows)
    return f"cp {found['ranks']}, {longest} tokens: speed relative to one rank, and what steps add to a rank's: {each}"


def _dispatch(found: Found) -> str:
    each = ", ".join(f"{name} {dispatch_ratio(row):.2f}" for name, row in found["rows"].items())
    return f"tp {found['tp']}: host time of a layer by DTensor's styles, relative to titan's: {each}"


def _cpu_attention(found: Found) -> str:
    each = ((name, *kernel_ratios(row)) for name, row in found["rows"].items())
    return f"speed relative to SDPA, forward and backward: {'; '.join(f'{n}: {f:.1f}, {b:.1f}' for n, f, b in each)}"


def attention_ms(row: Mapping[str, list[float]]) -> tuple[float, float]:
    """Of a row of bench.attention: median milliseconds with a mask, and document by document."""
    masked, apart = (1e3 * median(row[kind]) for kind in ("mask", "documents"))
    return masked, apart


def _attention(found: Found) -> str:
    each = ((name, attention_ms(row)) for name, row in found["rows"].items())
    ratios = "; ".join(f"{name} {masked / apart:.1f}" for name, (masked, apart) in each)
    return f"{found['tokens']:,} tokens, speed of attention by document relative to a mask: {ratios}"


def _turns(found: Found) -> str:
    each = ((name, turns_ms(row)) for name, row in found["rows"].items())
    ratios = ", ".join(f"{name} {theirs / ours:.2f}" for name, (ours, theirs) in each)
    return f"tp {found['tp']}: speed of titan relative to torchtitan, by sequences x tokens: {ratios}"


def _loss(found: Found) -> str:
    whole, chunks = (
        {key: median(of) for key, of in found["rows"][name].items()} for name in ("all logits", "in chunks")
    )
    ratios = ", ".join(
        f"{key} {chunks[of] / whole[of]:.2f}" for key, of in (("CPU time", "cpu_s"), ("memory", "peak_gib"))
    )
    return f"{found['words']:,} words, {found['tokens']:,} tokens: steps in chunks, relative to all logits: {ratios}"


def _overhead(found: Found) -> str:
    ratios = ", ".join(f"{precision} {ratio:.2f}" for precision, (_, _, ratio) in speeds(found).items())
    start = f"; first step ends {median(found['start_s']):.1f} s after the start" if "start_s" in found else ""
    return f"speed of titan relative to the bare loop: {ratios}{start}"


def _planning(found: Found) -> str:
    each = ", ".join(f"`{name}` {seconds:.1f} s" for name, (seconds, _) in timings(found).items())
    return f"{each}; each further layout {1e3 * median(found['further_layout_s']):.1f} ms"


def _doctor(found: Found) -> str:
    errors = {name: abs(row["error"]) for name, row in found["layouts"].items()}
    worst = max(errors, key=errors.__getitem__)
    ranked = f"{found['pairs_ranked_right']} of {found['pairs']} pairs of layouts ranked correctly"
    return (
        f"step times: mean error {_percent(mean(errors.values()))}, worst {_percent(errors[worst])} ({worst}); {ranked}"
    )


def _tests(found: Found) -> str:
    return (
        f"{found['tests']} tests in {found['wall_s']:.0f} s: {found['worker_s']:.0f} s of workers, "
        f"{found['cpu_s']:.0f} s of CPU; the cores idled for {found['idle']:.0%}"
    )


def _fuzz(found: Found) -> str:
    return f"{found['jobs']} jobs: {found['agreed']} agreed, {found['refused']} refused, {found['failed']} failed"


def _versions(found: Found) -> str:
    said = []
    for version, there in found["versions"].items():
        failed, passed = (sum(part[what] for part in there["parts"]) for what in ("failed", "passed"))
        said.append(f"{version}: {passed:,} passed, {failed} failed")
    return "; ".join(said)


def _layouts(found: Found) -> str:
    rows = found["largest_relative_difference"]
    loss, norm = (max(row[key] for row in rows.values()) for key in ("loss", "grad_norm"))
    return f"{len(rows)} layouts: largest relative difference {loss:.1e} in the loss, {norm:.1e} in the gradient norm"


def _transformers(found: Found) -> str:
    loss, norm, weights = (max(row[key] for row in found["rows"]) for key in ("loss", "grad_norm", "weights"))
    models = len({row["model"] for row in found["rows"]})
    return (
        f"{models} models, {len(found['rows'])} runs, against transformers {found['transformers']}: largest relative "
        f"difference {loss:.1e} in the loss, {norm:.1e} in the gradient norm; weights {weights:.2f} of the bound"
    )


def _harness(found: Found) -> str:
    worst = max(row["largest_difference"] for row in found["rows"])
    documents = sum(row["documents"] for row in found["rows"])
    return (
        f"{documents} documents, {len(found['rows'])} folders, against lm-eval {found['lm_eval']}: nats differ by "
        f"{worst:.1e} at most"
    )


def _chaos(found: Found) -> str:
    faults = f"{len(found['struck'])} faults, {found['counts']['kind']['kill']} of them kills"
    return f"{faults}, in {found['runs']} runs and {found['starts']} starts: {len(found['violations'])} violations"


def _mutations(found: Found) -> str:
    refused = sum(count for outcome, count in found["outcomes"].items() if outcome.endswith("refused"))
    harmless = found["n"] - refused - len(found["bad"])
    return f"{found['n']} mutations: {refused} refused, {harmless} harmless, {len(found['bad'])} with another outcome"


def _heap(found: Found) -> str:
    died, jobs = (sum(counts) for counts in zip(*((len(r["deaths"]), r["jobs"]) for r in found["rows"]), strict=True))
    return f"{found['allocator']} allocator: {died} of {jobs} jobs died"


def _scale(found: Found) -> str:
    sockets, opens, saved = found["sockets"], found["shards"]["opens_per_shard_at_start"], found["checkpoint"]
    return (
        f"{found['shards']['ranks']} ranks: {sockets['before']['sockets']} -> {sockets['after']['sockets']} sockets, "
        f"{opens['before']} -> {opens['after']:g} opens of a shard; {saved['ranks']:,} faked ranks: description of a "
        f"checkpoint read in {saved[READ_HEADERS]:.0f} s by DCP, in {saved[READ_INDEX]:.1f} s by titan"
    )


def _experts(found: Found) -> str:
    said = []
    for name, run in found["runs"].items():
        loss = [row["validation_loss"] for row in run["rows"] if "validation_loss" in row][-1]
        loads = [row["expert_load"] for row in run["rows"] if "expert_load" in row]
        busiest = f", busiest expert {median(loads[-20:]):.2f} of the mean" if loads else ""
        said.append(f"{name} {loss:.3f} nats{busiest}")
    return f"{found['steps']} steps: {'; '.join(said)}"


def comm_rows(found: Found) -> dict[str, dict[str, float]]:
    """Of bench.comm, by method: bytes per step, losses at the end, and all of these relative to its all-reduce.

    loss: mean of the last tenth of the steps.  share, time: of the all-reduce's bytes and median step time.
    further: validation loss above that of the all-reduce.
    """
    rows = {}
    for name, run in found["runs"].items():
        base = found["runs"][run["baseline"]]
        last = max(1, found["steps"] // 10)
        rows[name] = {
            "ranks": run["ranks"],
            "bytes": mean(run["bytes_sent"]),
            "share": sum(run["bytes_sent"]) / sum(base["bytes_sent"]),
            "loss": mean(run["loss"][-last:]),
            "validation": run["validation"][-1][1],
            "further": run["validation"][-1][1] - base["validation"][-1][1],
            "time": median(run["step_s"]) / median(base["step_s"]),
        }
    return rows


def _comm(found: Found) -> str:
    rows = comm_rows(found)
    base = next(iter(rows))
    each = (f"{name} {row['share']:.3g} ({row['further']:+.3f} nats)" for name, row in rows.items() if name != base)
    sent = f"{base} sends {rows[base]['bytes'] / 1e6:.1f} MB per step and rank"
    return f"{found['steps']} steps, {sent}; of that, and validation loss beside its own: {', '.join(each)}"


SAVINGS = {
    "time": "seconds",
    "memory": "peak_mb",
    "planned time": "planned_s",
    "planned memory": "planned_gib",
    "dry run": "dry_run_gib",
}
"""Words for what a row of bench.savings has -> its key."""


def savings(rows: Mapping[str, Found]) -> dict[str, list[float]]:
    """Of a table of bench.savings, by job: `SAVINGS`, relative to the first job; of step times the medians."""
    table = {
        job: [median(found) if isinstance(found := row[key], list) else found for key in SAVINGS.values()]
        for job, row in rows.items()
    }
    plain = next(iter(table.values()))
    return {job: [one / other for one, other in zip(row, plain, strict=True)] for job, row in table.items()}


def _savings(found: Found) -> str:
    said = []
    for rows in found["tables"].values():
        _, *others = savings(rows).items()
        said += [f"{job} {time:.2f} and {memory:.2f}" for job, (time, memory, *_) in others]
    return f"step time and peak memory relative to the plain way: {', '.join(said)}"


def counted(rows: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Of a table of bench.counted, by job: step time and memory, relative to the first job."""
    plain = next(iter(rows.values()))
    return {job: (row["seconds"] / plain["seconds"], row["gib"] / plain["gib"]) for job, row in rows.items()}


def _counted(found: Found) -> str:
    said = []
    for rows in found["tables"].values():
        _, *others = counted(rows).items()
        said += [f"{job} {time:.2f} and {memory:.2f}" for job, (time, memory) in others]
    return f"predicted step time and memory on {found['cluster']}, relative to the plain way: {', '.join(said)}"


def _figures(kind: str) -> Callable[[Found], str]:
    """What a benchmark's own `figures` say of its targets."""

    def said(found: Found) -> str:
        rows = import_module(f"bench.{kind}").figures(found)  # here: it imports this module, through bench.results
        return "; ".join(f"{what}: {measured}" for what, target, measured, _ in rows if target)

    return said


KINDS: Mapping[str, tuple[str, Callable[[Found], str]]] = {
    "overhead": ("python -m bench.overhead", _overhead),
    "planning": ("python -m bench.plan_latency", _planning),
    "doctor": ("python -m bench.doctor", _doctor),
    "layouts": ("python -m bench.layouts", _layouts),
    "transformers": ("python -m bench.transformers", _transformers),
    "harness": ("python -m bench.harness", _harness),
    "fuzz": ("python -m tests.fuzz", _fuzz),
    "versions": ("python -m bench.versions", _versions),
    "tests": ("python -m tests.cost --write", _tests),
    "dispatch": ("python -m bench.dispatch", _dispatch),
    "attention": ("python -m bench.attention", _attention),
    "loss": ("python -m bench.loss", _loss),
    "turns": ("python -m bench.turns", _turns),
    "context": ("python -m bench.context", _context),
    "cpu_attention": ("python -m bench.cpu_attention", _cpu_attention),
    "experts": ("python -m bench.experts", _experts),
    "comm": ("python -m bench.comm", _comm),
    "savings": ("python -m bench.savings", _savings),
    "counted": ("python -m bench.counted", _counted),
    **{kind: (f"python -m bench.{kind}", _figures(kind)) for kind in ("peers", "startup", "saves", "data", "memory")},
    "chaos": ("python -m bench.chaos", _chaos),
    "scale": ("python -m bench.scale", _scale),
    "mutations": ("python -m bench.mutations", _mutations),
    "heap-gathers": ("python -m bench.heap --kind gathers", _heap),
    "heap-train": ("python -m bench.heap --kind train", _heap),
}
"""Kind of result, the name of its file -> (command that writes it, what it says)."""


def headline(kind: str, found: Found) -> str:
    """What a result of this kind says, in one line."""
    return KINDS[kind][1](found)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
