"""One suite over every plugin that is registered: what the contract promises holds for each, today's and tomorrow's."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import LLAMA, MOE, assert_same_curve, train_job
from tests.planned import CLUSTER, job_of
from titan.config import load_job
from titan.contracts import Dataset, LrSchedule, Model, Technique, Tokenizer
from titan.contracts.base import registry
from titan.contracts.base.options import REQUIRED, Where, as_table, options_of, parse
from titan.contracts.base.registry import Plugin
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

registry.load_plugins()
# Other tests may have loaded plugins of tests/plugins already.
EVERY = [plugin for plugin in registry.every() if plugin.__module__.startswith("titan.plugins.")]
TECHNIQUES = [plugin for plugin in EVERY if issubclass(plugin, Technique)]


def label(plugin: type[Plugin]) -> str:
    return f"{plugin.kind}-{plugin.name}"


def required(plugin: type[Plugin]) -> dict[str, Any]:
    """Values for the options a user must give."""
    stand_in = {str: "x", int: 8, float: 1.0}
    given = {}
    for option in options_of(plugin.Config):
        if option.default is REQUIRED:
            kinds = [kind for kind in (option.hint, *typing.get_args(option.hint)) if kind in stand_in]
            given[option.key] = stand_in[kinds[0]]
    return given


@pytest.mark.parametrize("plugin", EVERY, ids=label)
def test_options_are_documented_and_survive_a_round_trip(plugin: type[Plugin]) -> None:
    where = Where(plugin.section)
    config, faults = parse(plugin.Config, required(plugin), where)
    assert config is not None and not faults, faults
    again, faults = parse(plugin.Config, as_table(config), where)
    assert again == config and not faults, faults
    for option in options_of(plugin.Config):
        assert option.spec.doc and not option.spec.doc.endswith("."), option.key


@pytest.mark.parametrize("plugin", EVERY, ids=label)
def test_options_are_frozen(plugin: type[Plugin]) -> None:
    config, _ = parse(plugin.Config, required(plugin), Where(plugin.section))
    for field in dataclasses.fields(plugin.Config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


@pytest.mark.parametrize("plugin", EVERY, ids=label)
def test_bad_values_are_refused(plugin: type[Plugin]) -> None:
    for option in options_of(plugin.Config):
        for wrong in ({"a": object()}, *_beyond(option.spec, option.hint)):
            config, faults = parse(plugin.Config, {**required(plugin), option.key: wrong}, Where(plugin.section))
            assert config is None and option.key in str(faults[0]), (option.key, wrong)


def _beyond(spec: Any, hint: Any) -> list[Any]:
    bounds = [(spec.at_least, -1), (spec.above, 0), (spec.at_most, 1), (spec.below, 0)]
    whole = hint is int or int in typing.get_args(hint)
    single = [(int(bound) if whole else float(bound)) + off for bound, off in bounds if bound is not None]
    return [[value] * 2 for value in single] if typing.get_origin(hint) is tuple else single


@pytest.mark.parametrize("plugin", EVERY, ids=label)
def test_unknown_options_are_refused(plugin: type[Plugin]) -> None:
    config, faults = parse(plugin.Config, {**required(plugin), "no_such_option": 1}, Where(plugin.section))
    assert config is None and "no_such_option" in str(faults[0])


@pytest.mark.parametrize("plugin", [p for p in EVERY if issubclass(p, Model)], ids=label)
def test_presets_are_configs(plugin: type[Model]) -> None:
    for preset, values in plugin.presets.items():
        config, faults = parse(plugin.Config, values, Where("model"))
        assert config is not None, (preset, faults)
        assert not list(plugin(config).check()), preset
        assert plugin(config).spec().params > 0


@pytest.mark.parametrize("plugin", [p for p in EVERY if issubclass(p, LrSchedule)], ids=label)
def test_factors_stay_between_nothing_and_the_peak(plugin: type[LrSchedule]) -> None:
    schedule = plugin(plugin.Config())
    factors = [schedule.factor(step, 40) for step in range(1, 41)]
    assert all(0 <= factor <= 1 for factor in factors) and factors[0] > 0 and max(factors) == 1


@pytest.mark.parametrize("plugin", [p for p in EVERY if issubclass(p, Tokenizer) and not required(p)], ids=label)
def test_tokenizers_give_back_the_text(plugin: type[Tokenizer]) -> None:
    tokenizer = plugin(plugin.Config())
    text = "def f(x):\n\treturn 'naïve 東京 🗼'  # <|end_of_text|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert min(ids) >= 0 and max(ids) < tokenizer.vocab_size and tokenizer.end < tokenizer.vocab_size


@pytest.mark.parametrize("plugin", [p for p in EVERY if issubclass(p, Dataset) and not required(p)], ids=label)
def test_datasets_read_in_a_fixed_order(plugin: type[Dataset]) -> None:
    dataset = plugin(plugin.Config())
    files = dataset.files()
    assert files and files == dataset.files()
    document = next(dataset.documents(files[0]))
    assert document.text and str(files[0]) in document.place


# --- the planner: whatever is on, a step has a cost ------------------------------------------------------------------


@pytest.mark.parametrize("technique", TECHNIQUES, ids=label)
def test_a_job_with_it_on_can_be_planned(technique: type[Technique]) -> None:
    words = [*switched_on(technique)[1], "--train.micro_batch_size", "1"]
    job = load_job(MOE, [*words, "--data.path", "."]) if job_file(technique) == MOE else job_of(*words)
    assert technique.name in [t.name for t in job.techniques]
    prediction = Planner(CLUSTER).predict(costs_of(job), job.layout)
    assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)
    assert all(part >= 0 for memory in prediction.memory for part in vars(memory).values())


@pytest.mark.parametrize("technique", [t for t in TECHNIQUES if t.search_space], ids=label)
def test_what_a_search_may_choose_are_its_options(technique: type[Technique]) -> None:
    for choice in technique.search_space:
        config, faults = parse(technique.Config, {**required(technique), **choice}, Where("plugins"))
        assert config is not None, (choice, faults)


# --- techniques: with one on, the curve is the one with it off ------------------------------------------------------

# Some techniques need room to work in, or cost too much to be run in every mode here; their own tests do.
WORDS: dict[str, tuple[str, ...]] = {"compile": ("--plugins.compile.backend", "aot_eager")}


def switched_on(technique: type[Technique]) -> tuple[int, list[str]]:
    """Ranks and words that switch a technique on: each axis it owns at 2, and an axis that it folds; or its table."""
    axes = {name for axis in technique.axes for name in (axis.name, *axis.folds[:1])}
    degrees = [word for name in sorted(axes) for word in (f"--mesh.{name}", "2")]
    own = sum(not axis.folds for axis in technique.axes) + any(axis.folds for axis in technique.axes)
    return 2**own, [*degrees, f"--plugins.{technique.name}.enabled", "true"]


def job_file(technique: type[Technique]) -> Path:
    """A job whose model has what the technique shares: an axis that folds others is for stacks of weights."""
    return MOE if any(axis.folds for axis in technique.axes) else LLAMA


@pytest.mark.parametrize("technique", [t for t in TECHNIQUES if t.preserves_numerics], ids=label)
def test_parity_with_it_off_and_its_checkpoint_loads_without_it(technique, one_rank, tmp_path: Path) -> None:
    ranks, words = switched_on(technique)
    words += WORDS.get(technique.name, ())
    saving, file = ("--checkpoint.enabled", "true"), job_file(technique)
    half = train_job(tmp_path, ranks, *words, *saving, "--train.steps", "5", config=file)
    assert {step: row["tokens"] for step, row in half.rows.items()} == {s: 128 * s for s in range(1, 6)}
    whole = train_job(tmp_path, 1, *saving, config=file)
    assert_same_curve(one_rank(config=file), whole)
