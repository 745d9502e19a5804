"""The search loop of `titan tune`: propose, run, record, until the requested number of trials; and its report."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan.planner.report.render import columns
from titan.planner.search.space import Base, Choice, Space
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.planner.tuning.proposal import Proposer
from titan.planner.tuning.results import UNITS, Failed, Measured, Objective, Results, Trial, ranked

Run = Callable[[Choice], Measured | Failed]
FREE = {"run": ("name", "dir", "sample_prompt", "max_minutes"), "train": ("steps", "non_finite", "non_finite_limit")}
"""Keys of a job that do not affect trials, besides the sections left out below."""


def searched(base: Base, ranks: int, **how: Any) -> dict[str, Any]:
    """The description of a search for its results file. how: settings of the measurement (steps, warm-up, power)."""
    job = {
        section: {key: value for key, value in table.items() if key not in FREE.get(section, ())}
        for section, table in base.job.table.items()
        if section not in ("mesh", "checkpoint", "validation", "metrics")
    }
    layout = ("mesh.", "plugins.", "train.micro_batch_size")
    fixed = sorted(key for key in base.fixed if key.startswith(layout))
    return {**how, "ranks": ranks, "fixed": fixed, "degrees": dict(base.degrees), "job": job}


def tune(
    results: Results,
    proposer: Proposer,
    run: Run,
    objective: Objective,
    trials: int,
    predict: Callable[[Choice], float | None],
    tell: Callable[[str], None],
) -> None:
    """Run trials until the results hold `trials`, or no layout is left.

    run: runs a trial.  predict: step time in seconds, or None.  tell: called with one line per trial.
    """
    while (number := len(results.trials) + 1) <= trials:
        choice = proposer.propose(results.trials)
        if choice is None:
            tell(f"all {len(results.trials)} layouts of the search space have been tried")
            return
        outcome = run(choice)
        results.append(Trial(str(choice), choice.values(), outcome, predict(choice)))
        tell(f"trial {number}/{trials}  {choice}: {_said(outcome, objective)}; {_best(results.trials, objective)}")


def predictor(space: Space, planner: Planner | None) -> Callable[[Choice], float | None]:
    """A function that predicts the step time of a layout in seconds; it gives None without a planner."""

    def predict(choice: Choice) -> float | None:
        job = space.job_of(choice)
        if planner is None or job is None:
            return None
        return planner.predict(costs_of(job), choice.layout).step_time_s

    return predict


def _said(outcome: Measured | Failed, objective: Objective) -> str:
    if isinstance(outcome, Failed):
        return f"{outcome.kind} ({outcome.why})"
    return f"{outcome.value(objective):.4g} {UNITS[objective]}, {outcome.step_time_s:.4g} s per step"


def _best(trials: Sequence[Trial], objective: Objective) -> str:
    found = ranked(trials, objective)
    return f"best so far {found[0][0]:.4g}" if found else "all failed so far"


def report(trials: Sequence[Trial], objective: Objective) -> dict[str, Any]:
    """The JSON report: all trials, best first, failed ones last; `best`: the layout of the best."""
    best = ranked(trials, objective)
    rows = [trial.as_json() | {"value": value} for value, trial in best]
    rows += [trial.as_json() for trial in trials if isinstance(trial.outcome, Failed)]
    return {"objective": objective, "best": dict(best[0][1].layout) if best else None, "trials": rows}


def table(trials: Sequence[Trial], objective: Objective) -> str:
    """The trials as a text table, best first, failed ones last."""
    rows = [["", UNITS[objective], "step time, s", "predicted, s", "tokens/s", "peak, GiB"]]
    names = ["layout"]
    for number, (value, trial) in enumerate(ranked(trials, objective), 1):
        found = trial.outcome
        assert isinstance(found, Measured)
        names.append(trial.name)
        rows.append(
            [
                f"{number}",
                f"{value:.4g}",
                f"{found.step_time_s:.4g}",
                _or_dash(trial.predicted_s),
                f"{found.tokens_per_s:,.0f}",
                f"{found.peak_memory_gib:.2f}",
            ]
        )
    for trial in trials:
        if isinstance(trial.outcome, Failed):
            names.append(trial.name)
            rows.append(["-", trial.outcome.kind, "-", _or_dash(trial.predicted_s), "-", "-"])
    return "\n".join(f"{line}  {name}" for line, name in zip(columns(rows, left=0), names, strict=True))


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4g}"


def failures(trials: Sequence[Trial]) -> Mapping[str, int]:
    """Number of failed trials by kind of failure, in order of appearance."""
    kinds = [trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failed)]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
