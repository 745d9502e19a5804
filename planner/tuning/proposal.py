"""Proposes the next trial: first the planner's best layouts, then those of optuna's TPE sampler (NeurIPS 2011).

A proposal depends only on the seed and on the trials so far, so a resumed search continues as if never stopped.

The degree of each axis, the micro batch size, and the options of each technique are categorical parameters, which the
sampler draws independently. The proposal is the untried, valid layout that agrees with the draw in most parameters.
Failed trials get the worst value so far, so that the sampler avoids similar layouts (as in arXiv 2312.12705).
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titan.errors import ConfigError
from titan.packages import install
from titan.planner.search.space import Choice, Space
from titan.planner.tuning.results import Measured, Objective, Trial

OFF = "off"
AT_RANDOM = 5
"""Random trials before the sampler uses results."""

Parameters = Mapping[str, int | str]


def parameters_of(layout: Mapping[str, Any]) -> dict[str, int | str]:
    """A layout (dotted keys of a TOML) as parameters; the options of a technique become one parameter, as text."""
    found: dict[str, int | str] = {}
    for key, value in layout.items():
        table, _, option = key.rpartition(".")
        if not table.startswith("plugins."):
            found[key] = value
        elif option == "enabled":
            found[table] = "" if value else OFF
        else:
            found[table] = f"{found[table]} {option}={value}".strip()
    return found


class Proposer:
    """Proposes layouts of a search space.

    best: layouts to try first, best first.  objective: what to maximize.

    Raises:
        ConfigError: optuna is missing.
    """

    def __init__(self, space: Space, best: Sequence[Choice], objective: Objective) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError(f"titan tune needs the optuna package: {install('tune')}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space, self._objective = optuna, space, objective
        self._best = [(parameters_of(choice.values()), choice) for choice in best]
        self._all = [(parameters_of(choice.values()), choice) for choice in _every(space)]
        values: dict[str, dict[int | str, None]] = {}
        for parameters, _ in self._all:
            for name, value in parameters.items():
                values.setdefault(name, {})[value] = None
        self._kinds = {name: optuna.distributions.CategoricalDistribution(list(v)) for name, v in values.items()}

    def propose(self, trials: Sequence[Trial]) -> Choice | None:
        """The next untried layout; None: all layouts have been tried.

        Raises:
            ConfigError: a trial's layout is not in this space.
        """
        tried = [parameters_of(trial.layout) for trial in trials]
        seen = {frozenset(parameters.items()) for parameters in tried}
        for parameters, choice in self._best:
            if frozenset(parameters.items()) not in seen:
                return choice
        drawn = self._draw(tried, imputed(trials, self._objective))
        order = random.Random(f"{self._space.job.run.seed}/{len(trials)}")
        left = [pair for pair in self._all if frozenset(pair[0].items()) not in seen]
        order.shuffle(left)
        left.sort(key=lambda pair: -len(drawn.items() & pair[0].items()) / len(pair[0]))
        return next((choice for _, choice in left if self._works(choice)), None)

    def _draw(self, tried: Sequence[Parameters], values: Sequence[float]) -> Parameters:
        """The sampler's next draw, each parameter independent of the others."""
        optuna = self._optuna
        seed = self._space.job.run.seed * 1_000_003 + len(tried)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=AT_RANDOM)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for parameters, value in zip(tried, values, strict=True):
            for name, chosen in parameters.items():
                if name not in self._kinds or chosen not in self._kinds[name].choices:
                    what = f"a trial has {name} = {chosen}, not in this search space; give another --results file"
                    raise ConfigError(what)
            kinds = {name: self._kinds[name] for name in parameters}
            study.add_trial(optuna.trial.create_trial(params=dict(parameters), distributions=kinds, value=value))
        trial = study.ask()
        return {name: trial.suggest_categorical(name, kind.choices) for name, kind in self._kinds.items()}

    def _works(self, choice: Choice) -> bool:
        job = self._space.job_of(choice)
        return job is not None and self._space.allows(job)


def imputed(trials: Sequence[Trial], objective: Objective) -> list[float]:
    """The value of each trial; a failed trial gets the worst measured value, or 0 if all failed."""
    values = [t.outcome.value(objective) if isinstance(t.outcome, Measured) else None for t in trials]
    worst = min((value for value in values if value is not None), default=0.0)
    return [worst if value is None else value for value in values]


def _every(space: Space) -> Iterator[Choice]:
    """All combinations of a space, including invalid ones."""
    for layout in space.layouts():
        for size, (chosen, staged) in itertools.product(space.micro_batches(layout), space.options(layout)):
            for more in staged:
                yield Choice(layout, size, (*chosen, *more))
