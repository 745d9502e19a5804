"""What titan promises of every plugin, as checks of one plugin: the suite of the contract.

    @pytest.mark.parametrize("check", checks("mine"), ids=str)
    def test_contract(check, tmp_path):
        check(tmp_path)

Which checks there are depends on the kind of the plugin. They read what its class declares and train tiny jobs; the
arithmetic of a plugin needs a test of its own.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts import Dataset, Loss, LrSchedule, Model, Optimizer, Technique, Tokenizer, Tracker
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import (
    REQUIRED,
    CliText,
    Spec,
    Where,
    as_table,
    check_bounds,
    did_you_mean,
    options_of,
    parse,
)
from titan.contracts.plugin.registry import Plugin
from titan.testing.jobs import JOB, assert_same_curve, one_rank, train_job

PATH = "--plugins.path"

SCHEDULE_STEPS = 10_000
"""Steps of the run whose learning rates are checked: more than a warmup takes."""

CLUSTER = "h100"
"""Cluster file for which jobs are planned."""


@dataclass(frozen=True)
class Subject:
    """A plugin under test. words: overrides for jobs that use it.  config: TOML of its jobs."""

    plugin: type[Plugin]
    words: tuple[str, ...] = ()
    config: Path = JOB

    @property
    def given(self) -> dict[str, Any]:
        """Values that `words` give to the plugin's options."""
        own = issubclass(self.plugin, Technique | Tracker)  # several are used together, each with its own table
        table = f"--{self.plugin.section}.{self.plugin.name}" if own else f"--{self.plugin.section}"
        words = dict(_pairs(self.words))
        keys = (option.key for option in options_of(self.plugin.Config))
        return {key: CliText(words[f"{table}.{key}"]) for key in keys if f"{table}.{key}" in words}

    @property
    def stand_ins(self) -> dict[str, Any]:
        """Values for the options that a user must give, and `words` do not."""
        missing = (option for option in options_of(self.plugin.Config) if option.default is REQUIRED)
        return {option.key: _value(option.hint, option.spec) for option in missing if option.key not in self.given}

    @property
    def off(self) -> list[str]:
        """Overrides of a job that could use the plugin."""
        return [word for place in _places(self.words) for word in (PATH, place)]

    @property
    def on(self) -> list[str]:
        """Overrides of a job that uses the plugin; a technique with axes it owns or covers, and one it folds, at 2."""
        if not issubclass(self.plugin, Technique):
            return [f"--{self.plugin.section}.name", self.plugin.name, *self.words]
        axes = {name for axis in self.plugin.axes for name in (axis.name, *axis.folds[:1])} | {*self.plugin.covers}
        degrees = [word for name in sorted(axes) for word in (f"--mesh.{name}", "2")]
        return [*degrees, f"--plugins.{self.plugin.name}.enabled", "true", *self.words]

    @property
    def ranks(self) -> int:
        """Ranks of a job under `on`."""
        if not issubclass(self.plugin, Technique):
            return 1
        axes = self.plugin.axes
        at_two = sum(not axis.folds for axis in axes) + any(axis.folds for axis in axes) + len(self.plugin.covers)
        return 1 << at_two

    def parsed(self, **given: object) -> tuple[Any, list[Any]]:
        """The plugin's options from these values, else those of `words`, else stand-ins; and the errors found."""
        values = {**self.stand_ins, **self.given, **given}
        config, faults = parse(self.plugin.Config, values, Where(self.plugin.section))
        return config, list(faults)


@dataclass(frozen=True)
class Check:
    """One check of one plugin; call it with an empty folder. Its string is the id of a test."""

    run: Callable[[Subject, Path], None]
    subject: Subject

    def __call__(self, folder: Path) -> None:
        """Raise AssertionError where the plugin breaks what the contract promises."""
        self.run(self.subject, folder)

    def __str__(self) -> str:
        return f"{self.subject.plugin.kind}-{self.subject.plugin.name}-{self.run.__name__}"


def checks(name: str, *words: str, kind: str = "", config: Path = JOB) -> list[Check]:
    """The checks of a plugin, by its name.

    Args:
        name: as in a TOML.
        words: overrides for the jobs that use it: where it is found, unless its package is installed
            ("--plugins.path", "mine.py"), and options that it requires ("--plugins.mine.rank", "8").
        kind: such as "optimizer"; needed where plugins of several kinds have the name.
        config: TOML of the jobs; by default a tiny llama. A technique for other models needs another one.

    Raises:
        ValueError: no plugin has the name, or plugins of several kinds have it.
        PluginError: a plugin cannot be loaded.
    """
    return list(_checks(Subject(_found(name, kind, words), words, config)))


def check_plugin(name: str, folder: Path, *words: str, kind: str = "", config: Path = JOB) -> None:
    """Run all `checks` of a plugin, each in a folder of its own below `folder`.

    Raises:
        AssertionError: the plugin breaks what the contract promises.
        ValueError, PluginError: as `checks`.
    """
    for check in checks(name, *words, kind=kind, config=config):
        place = folder / check.run.__name__
        place.mkdir(parents=True)
        check(place)


def make_plugin(name: str, *words: str, kind: str = "", **options: object) -> Any:
    """An instance of a plugin with these options, to call its hooks in a test of its arithmetic.

    name, words, kind: as in `checks`.  options: values as in a TOML. One that is required, and given neither here nor
        in `words`, has a stand-in.

    Raises:
        ValueError: as `checks`; or the options are wrong.
        PluginError: a plugin cannot be loaded.
    """
    subject = Subject(_found(name, kind, words), words)
    config, faults = subject.parsed(**options)
    if faults:
        raise ValueError("; ".join(str(fault) for fault in faults))
    return subject.plugin(config)


def _found(name: str, kind: str, words: Iterable[str]) -> type[Plugin]:
    registry.load_plugins(_places(words))
    found = [plugin for plugin in registry.every() if plugin.name == name and kind in ("", plugin.kind)]
    if not found:
        hint = did_you_mean(name, {plugin.name for plugin in registry.every()})
        raise ValueError(f"no {kind or 'plugin'} is named {name!r}{hint}{registry.left_out()}")
    if len(found) > 1:
        kinds = ", ".join(repr(plugin.kind) for plugin in found)
        raise ValueError(f"plugins of several kinds are named {name!r}: give kind, one of {kinds}")
    return found[0]


def _places(words: Iterable[str]) -> list[str]:
    """The folders and files that overrides load plugins from."""
    return [value for key, value in _pairs(words) if key == PATH]


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(--key, value) of overrides: `--key value` and `--key=value`."""
    rest = iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        yield key, value if equals else next(rest, "")


def _checks(subject: Subject) -> Iterator[Check]:
    plugin = subject.plugin
    yield from (Check(run, subject) for run in OF_OPTIONS)
    if issubclass(plugin, Model):
        yield Check(presets_are_valid, subject)
    if issubclass(plugin, LrSchedule):
        yield Check(factors_stay_between_0_and_1, subject)
    if issubclass(plugin, Tokenizer) and not subject.stand_ins:
        yield Check(text_is_given_back, subject)
    if issubclass(plugin, Dataset) and not subject.stand_ins:
        yield Check(files_are_read_in_a_fixed_order, subject)
    if issubclass(plugin, Model | Optimizer | Loss | Technique):
        yield Check(job_can_be_planned, subject)
    if issubclass(plugin, Technique):
        if plugin.search_space:
            yield Check(search_space_is_valid, subject)
        if plugin.preserves_numerics:
            yield Check(curve_stays_and_checkpoint_loads_without_it, subject)
    if issubclass(plugin, Model | Optimizer | Loss) and getattr(plugin, "preserves_numerics", True):
        yield Check(curve_is_the_same_on_two_ranks, subject)


# --- values of options --------------------------------------------------------------------------------------------


def _value(hint: Any, spec: Spec) -> Any:
    """A value of this type and within these bounds, as in a TOML."""
    arguments = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis)]
    if typing.get_origin(hint) is tuple:
        return [_value(each, spec) for each in arguments]
    if arguments:  # a Literal or a union
        return arguments[0] if typing.get_origin(hint) is typing.Literal else _value(arguments[0], spec)
    return _number(hint, spec) if hint in (int, float) else {str: "x", bool: True}.get(hint)


def _number(kind: type[float], spec: Spec) -> float:
    """A usual number if the bounds allow it, else one beside or between them."""
    bounds = [bound for bound in (spec.at_least, spec.above, spec.at_most, spec.below) if bound is not None]
    tries = [8 if kind is int else 1.0, *(bound + off for bound in bounds for off in (0, 1, -1)), sum(bounds) / 2]
    return next((kind(value) for value in tries if kind(value) == value and _allowed(value, spec)), tries[0])


def _allowed(value: float, spec: Spec) -> bool:
    try:
        check_bounds(value, spec)
    except ValueError:
        return False
    return True


# --- options ------------------------------------------------------------------------------------------------------


def options_are_documented_and_survive_a_round_trip(subject: Subject, folder: Path) -> None:
    """Each option has a line of documentation, and options written as TOML are read back equal."""
    config, faults = subject.parsed()
    assert config is not None and not faults, faults
    again, faults = parse(subject.plugin.Config, as_table(config), Where(subject.plugin.section))
    assert again == config and not faults, f"{again} read back, written: {config}; {faults}"
    for option in options_of(subject.plugin.Config):
        assert option.spec.doc, f"option {option.key} has no documentation; write option(default, 'one line')"
        assert not option.spec.doc.endswith("."), f"the documentation of option {option.key} ends with a period"


def options_are_frozen(subject: Subject, folder: Path) -> None:
    """`Config` is a frozen dataclass."""
    config, _ = subject.parsed()
    for field in dataclasses.fields(subject.plugin.Config):
        try:
            setattr(config, field.name, None)
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{field.name} of Config can be set; decorate Config with @dataclass(frozen=True)")


def bad_values_are_refused(subject: Subject, folder: Path) -> None:
    """A value of another type, or beyond an option's bounds, is an error that names the option."""
    for option in options_of(subject.plugin.Config):
        for wrong in ({"a": object()}, *_beyond(option.spec, option.hint)):
            config, faults = subject.parsed(**{option.key: wrong})
            assert config is None, f"{option.key} = {wrong!r} is accepted"
            assert option.key in str(faults[0]), faults


def _beyond(spec: Any, hint: Any) -> list[Any]:
    bounds = [(spec.at_least, -1), (spec.above, 0), (spec.at_most, 1), (spec.below, 0)]
    whole = hint is int or int in typing.get_args(hint)
    single = [(int(bound) if whole else float(bound)) + off for bound, off in bounds if bound is not None]
    return [[value] * 2 for value in single] if typing.get_origin(hint) is tuple else single


def unknown_options_are_refused(subject: Subject, folder: Path) -> None:
    """A key that is no option is an error that names the key."""
    config, faults = subject.parsed(no_such_option=1)
    assert config is None and "no_such_option" in str(faults[0]), faults


OF_OPTIONS = (
    options_are_documented_and_survive_a_round_trip,
    options_are_frozen,
    bad_values_are_refused,
    unknown_options_are_refused,
)
"""The checks of every plugin, whatever its kind."""


# --- what each kind promises --------------------------------------------------------------------------------------


def presets_are_valid(subject: Subject, folder: Path) -> None:
    """Each preset of a model parses, passes `check`, and has parameters."""
    assert issubclass(subject.plugin, Model)
    for preset, values in subject.plugin.presets.items():
        config, faults = parse(subject.plugin.Config, values, Where("model"))
        assert config is not None, f"preset {preset}: {faults}"
        model = subject.plugin(config)
        assert not (found := list(model.check())), f"preset {preset}: {found}"
        assert model.spec().params > 0, f"preset {preset} has no parameters"


def factors_stay_between_0_and_1(subject: Subject, folder: Path) -> None:
    """A schedule's factors are from 0 to 1, the first is above 0, and one is 1."""
    assert issubclass(subject.plugin, LrSchedule)
    schedule = subject.plugin(subject.parsed()[0])
    factors = [schedule.factor(step, SCHEDULE_STEPS) for step in range(1, SCHEDULE_STEPS + 1)]
    assert not (beyond := [factor for factor in factors if not 0 <= factor <= 1]), f"beyond 0 to 1: {beyond[:9]}"
    assert factors[0] > 0, "the factor of the first step is 0"
    assert max(factors) == 1, f"no factor of {SCHEDULE_STEPS:,} steps is 1, the largest is {max(factors)}"


def text_is_given_back(subject: Subject, folder: Path) -> None:
    """A tokenizer decodes what it has encoded, and its ids are below `vocab_size`."""
    assert issubclass(subject.plugin, Tokenizer)
    tokenizer = subject.plugin(subject.parsed()[0])
    text = "def f(x):\n\treturn 'naïve 東京 🗼'  # <|end_of_text|>\n"
    ids = tokenizer.encode(text)
    back, size, end = tokenizer.decode([*ids, tokenizer.end]), tokenizer.vocab_size, tokenizer.end
    assert back == text, f"{back!r} decoded, encoded: {text!r}"
    assert min(ids) >= 0 and max(ids) < size and end < size, f"ids {min(ids)} to {max(ids)}, end {end}, size {size}"


def files_are_read_in_a_fixed_order(subject: Subject, folder: Path) -> None:
    """A dataset names its files in one order, and its documents tell the file they are from."""
    assert issubclass(subject.plugin, Dataset)
    dataset = subject.plugin(subject.parsed()[0])
    files = dataset.files()
    assert files, "files() is empty"
    assert files == dataset.files(), "files() gives another order when called again"
    document = next(dataset.documents(files[0]))
    assert document.text and str(files[0]) in document.place, f"{document.place!r} does not name {files[0]}"


def search_space_is_valid(subject: Subject, folder: Path) -> None:
    """Each table of a technique's `search_space` holds values of its options."""
    assert issubclass(subject.plugin, Technique)
    for choice in subject.plugin.search_space:
        config, faults = subject.parsed(**choice)
        assert config is not None, f"{choice}: {faults}"


# --- jobs ---------------------------------------------------------------------------------------------------------


def job_can_be_planned(subject: Subject, folder: Path) -> None:
    """A step has a predicted cost: times that add up, and no memory below 0.

    A model whose spec has no `layer_ops` trains, and is not planned.
    """
    from titan.config import load_job
    from titan.planner.machine import cluster
    from titan.planner.step.layout import costs_of
    from titan.planner.step.predict import Planner

    words = [*subject.on, "--data.path", "."]
    job = load_job(subject.config, words)
    if issubclass(subject.plugin, Technique):
        assert subject.plugin.name in [technique.name for technique in job.techniques], "the technique is not on"
    if not job.spec.layer_ops:
        return
    prediction = Planner(cluster.load(CLUSTER)).predict(costs_of(job), job.layout)
    total, time = sum(prediction.time_s.values()), prediction.step_time_s
    assert abs(total - time) <= 1e-6 * time, f"parts of the step take {total} s, the step {time} s"
    sizes = [part for memory in prediction.memory for part in vars(memory).values()]
    assert all(size >= 0 for size in sizes), f"memory below 0: {prediction.memory}"


def curve_stays_and_checkpoint_loads_without_it(subject: Subject, folder: Path) -> None:
    """Three steps with a technique on, then the rest without it on one rank: the curve of a job without it."""
    saving = ("--checkpoint.enabled", "true")
    expected = one_rank(*subject.off, config=subject.config)
    half = train_job(folder, subject.ranks, *subject.on, *saving, "--train.steps", "3", config=subject.config)
    tokens = [{step: row["tokens"] for step, row in run.rows.items() if step <= 3} for run in (half, expected)]
    assert tokens[0] == tokens[1], f"tokens by step: {tokens[0]} with it, {tokens[1]} without"
    whole = train_job(folder, 1, *subject.off, *saving, config=subject.config)
    assert_same_curve(expected, whole)


def curve_is_the_same_on_two_ranks(subject: Subject, folder: Path) -> None:
    """Three steps on two ranks with sharded parameters, then the rest on one rank: the curve of one rank."""
    saving = ("--checkpoint.enabled", "true")
    expected = one_rank(*subject.on, config=subject.config)
    train_job(folder, 2, *subject.on, "--mesh.dp_shard", "2", *saving, "--train.steps", "3", config=subject.config)
    assert_same_curve(expected, train_job(folder, 1, *subject.on, *saving, config=subject.config))
