"""Build a Job from files and the command line; all faults are collected and reported together."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import titan.configs
from titan.config import groups, tables
from titan.config.check import check
from titan.config.job import Job, Source, choose_micro_batch, divisors
from titan.config.sections import ONE_OF, SECTIONS, SHARED
from titan.config.tables import Table
from titan.config.techniques import agree, chosen_techniques, unattended
from titan.contracts import Dataset, Model, Technique, Tracker
from titan.contracts.base.layout import Layout, lay_out
from titan.contracts.plugin import registry
from titan.contracts.plugin.conformance import made
from titan.contracts.plugin.options import (
    Spec,
    Where,
    check_bounds,
    coerce,
    did_you_mean,
    options_of,
    parse,
    resolved_table,
    shown,
)
from titan.contracts.plugin.registry import Plugin
from titan.contracts.sections import (
    CheckpointSection,
    CommSection,
    DataSection,
    MetricsSection,
    RunSection,
    TrainSection,
    ValidationSection,
)
from titan.errors import ConfigError, ConfigIssue

BUILT_IN = Path(next(iter(titan.configs.__path__)))
QUICKSTART = BUILT_IN / "quickstart.toml"
OTHERS = ("mesh", "plugins")
WEIGHT = Spec("share of the samples that an entry of a mixture gives", above=0, at_most=1e9)

C = TypeVar("C")


def load_job(path: Path | None, overrides: Sequence[str] = (), world_size: int | None = None) -> Job:
    """The job of a TOML file under the overrides, for that many ranks (None: as many as it needs).

    Without a file: the quickstart.

    Raises:
        ConfigError: with every fault found.
        PluginError: a plugin cannot be loaded.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError([ConfigIssue("command line", f"--world-size {world_size}: must be at least 1")])
    path = path or QUICKSTART
    table = tables.read(path, overrides, BUILT_IN)
    registry.load_plugins(tables.plugin_folders(table))
    return _Loader(table, str(path)).load(world_size, path.stem)


def said_of(path: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """Sentences about what one file of a job says over another, where a user may have meant otherwise.

    Raises:
        ConfigError: a file cannot be read, or a word is no override.
    """
    table = tables.read(path or QUICKSTART, overrides, BUILT_IN)
    return [*tables.outranked(table), *tables.other_validation(table)]


def load_table(values: Mapping[str, Any], origin: str, overrides: Sequence[str], world_size: int | None = None) -> Job:
    """A job from a table instead of a file, which uses a model and does not train it.

    origin: names the source of the table in messages.
    """
    table = Table()
    table.merge(values, origin)
    tables.override(table, overrides)
    registry.load_plugins(tables.plugin_folders(table))
    return _Loader(table, origin).load(world_size, "unnamed", trains=False)


class _Loader:
    """One pass over a table; `faults` grows as sections are read."""

    def __init__(self, table: Table, source: str) -> None:
        self.table, self.source = table, source
        self.faults: list[ConfigIssue] = []
        self.resolved: dict[str, Any] = {}

    def load(self, world_size: int | None, default_name: str, *, trains: bool = True) -> Job:
        try:
            return self._load(world_size, default_name, trains=trains)
        except ConfigError as error:
            raise ConfigError(map(self.table.blamed, error.faults)) from error

    def _load(self, world_size: int | None, default_name: str, *, trains: bool) -> Job:
        self._unknown_sections()
        run = self._section("run", RunSection)
        train = self._section("train", TrainSection)
        checkpoint = self._section("checkpoint", CheckpointSection)
        comm = self._section("comm", CommSection)
        entries = groups.take(self.table)
        model, tokenizer, loss, optimizer, schedule = (self._one_of(contract) for contract in ONE_OF)
        optimizer = groups.grouped(optimizer, entries, self._where, self.faults, self.resolved)
        data, sources = self._data()
        validation, validation_data = self._validation()
        metrics, trackers = self._metrics()
        layout, techniques = self._layout_and_techniques(world_size)
        if train is not None:
            self._batch(train, layout)
        if self.faults:
            raise ConfigError(self.faults)
        if not run.name:
            run = RunSection(**{**vars(run), "name": default_name})
            self.resolved["run"]["name"] = default_name
        job = Job(
            run=run, train=train, data=data, checkpoint=checkpoint, validation=validation, metrics=metrics, comm=comm,
            layout=layout, model=model, tokenizer=tokenizer, sources=sources, validation_data=validation_data,
            loss=loss, optimizer=optimizer, lr_schedule=schedule, techniques=techniques, trackers=trackers,
            table=self.resolved,
        )  # fmt: skip
        check(job, self._where, trains=trains)
        return job

    def _where(self, *path: str) -> Where:
        table = ".".join(path)
        first, dot, _ = table.partition(".")
        return Where(table, self.source, self.table.origins_in(*path), SHARED.get(first + dot, SHARED.get(first, ())))

    def _unknown_sections(self) -> None:
        known = {*SECTIONS, *OTHERS, *(contract.section for contract in ONE_OF)}
        for key, value in self.table.values.items():
            origin = self.table.origins.get((key,), self.source)
            if key not in known:
                self.faults.append(ConfigIssue(origin, f"[{key}]: unknown table{did_you_mean(key, known)}"))
            elif not isinstance(value, dict):
                self.faults.append(ConfigIssue(origin, f"{key} = {value!r}: must be a table, [{key}]"))
                self.table.values[key] = {}

    def _parse(self, config: type[C], values: Mapping[str, Any], *path: str) -> C | None:
        parsed, faults = parse(config, values, self._where(*path))
        self.faults += faults
        return parsed

    def _section(self, name: str, config: type[C]) -> Any:
        parsed = self._parse(config, self.table.at(name), name)
        if parsed is not None:
            self.resolved[name] = resolved_table(parsed)
        return parsed

    def _named(self, contract: type[Plugin], values: Mapping[str, Any], *path: str) -> type[Plugin] | None:
        """The plugin a table's `name` asks for, or its kind's default."""
        name = values.get("name")
        if name is None:
            default = registry.default_of(contract.kind)
            if default is None:
                known = ", ".join(registry.names(contract.kind))
                self.faults.append(self._where(*path).fault("name", f"missing; name a {contract.kind} ({known})"))
            return default
        if sentence := registry.trouble(contract.kind, str(name)):
            self.faults.append(self._where(*path).fault("name", f"= {str(name)!r}: {sentence}"))
            return None
        return registry.find(contract.kind, str(name))

    def _one_of(self, contract: type[Plugin]) -> Any:
        section = contract.section
        values = dict(self.table.at(section))
        plugin = self._named(contract, values, section)
        if plugin is None:
            return None
        values.pop("name", None)
        written = {"name": plugin.name}
        if issubclass(plugin, Model):
            values = self._preset(plugin, values)
        config = self._parse(plugin.Config, self._still_meant(plugin, values, section), section)
        if config is None:
            return None
        self.resolved[section] = {**written, **resolved_table(config)}
        return made(plugin, config)

    def _still_meant(self, plugin: type[Plugin], values: Mapping[str, Any], section: str) -> dict[str, Any]:
        """Without keys unknown to the plugin that a lower file gave to another, whose name has been replaced since."""
        known = {option.key for option in options_of(plugin.Config)}
        return {key: v for key, v in values.items() if key in known or (section, key) not in self.table.outdated}

    def _preset(self, plugin: type[Model], values: dict[str, Any]) -> dict[str, Any]:
        name = values.pop("preset", None)
        if name is None:
            return values
        if str(name) not in plugin.presets:
            hint = did_you_mean(str(name), plugin.presets)
            self.faults.append(self._where("model").fault("preset", f"= {str(name)!r}: unknown preset{hint}"))
            return values
        return {**plugin.presets[str(name)], **values}

    def _data(self) -> tuple[Any, tuple[Source, ...]]:
        host, dataset = self._divided("data", DataSection)
        dataset = self._without_what_lies_below(dataset)
        mixture = dataset.pop("mixture", None)
        data = self._parse(DataSection, host, "data")
        if mixture is None:
            source = self._source(dataset, 1.0, "data")
            self.resolved["data"] = {**(resolved_table(data) if data else {}), **(source[1] if source else {})}
            return data, (source[0],) if source else ()
        for key in dataset:
            self.faults.append(
                self._where("data").fault(
                    key, "cannot stand beside a mixture; move it into an entry of [[data.mixture]]"
                )
            )
        found = self._mixture(mixture)
        self.resolved["data"] = {**(resolved_table(data) if data else {}), "mixture": [table for _, table in found]}
        return data, tuple(source for source, _ in found)

    def _without_what_lies_below(self, dataset: dict[str, Any]) -> dict[str, Any]:
        """A mixture replaces the dataset of files below its own, and a dataset's name the mixture of files below."""
        mixture, name = ("data", "mixture"), ("data", "name")
        if "mixture" not in dataset:
            return dataset
        if "name" in dataset and self.table.above(name, mixture):
            return {key: value for key, value in dataset.items() if key != "mixture"}
        return {
            key: value
            for key, value in dataset.items()
            if key == "mixture" or not self.table.above(mixture, ("data", key))
        }

    def _divided(self, section: str, config: type) -> tuple[dict[str, Any], dict[str, Any]]:
        """A table that the host shares with a plugin: the host's keys, and the others."""
        own, values = {option.key for option in options_of(config)}, self.table.at(section)
        host = {key: value for key, value in values.items() if key in own}
        return host, {key: value for key, value in values.items() if key not in own}

    def _validation(self) -> tuple[Any, Dataset | None]:
        host, dataset = self._divided("validation", ValidationSection)
        validation = self._parse(ValidationSection, host, "validation")
        self.resolved["validation"] = resolved_table(validation) if validation else {}
        if "name" not in dataset:
            self._unnamed(dataset, validation is not None and validation.every > 0)
            return validation, None
        source = self._source(dataset, 1.0, "validation")
        self.resolved["validation"] |= source[1] if source else {}
        return validation, source[0].plugin if source else None

    def _unnamed(self, dataset: Mapping[str, Any], needed: bool) -> None:
        """Say what is wrong with a `[validation]` that names no dataset."""
        where, datasets = self._where("validation"), registry.of_kind(Dataset.kind)
        if dataset or needed:
            known = ", ".join(plugin.name for plugin in datasets)
            why = "" if dataset else f", for validation.every = {self.table.at('validation').get('every')}"
            self.faults.append(where.fault("name", f"missing{why}; name a dataset ({known})"))
        keys = {o.key for config in (ValidationSection, *(p.Config for p in datasets)) for o in options_of(config)}
        self.faults += [where.fault(key, f"unknown key{did_you_mean(key, keys)}") for key in dataset if key not in keys]

    def _mixture(self, mixture: Any) -> list[tuple[Source, dict[str, Any]]]:
        if not isinstance(mixture, list) or not mixture or not all(isinstance(entry, dict) for entry in mixture):
            self.faults.append(self._where("data").fault("mixture", "must be a list of tables, [[data.mixture]]"))
            return []
        found = []
        for number, entry in enumerate(mixture):
            entry, place = dict(entry), f"data.mixture.{number}"
            weight = entry.pop("weight", 1.0)
            try:
                weight = coerce(weight, float)
                check_bounds(weight, WEIGHT)
            except ValueError as error:
                self.faults.append(self._where(place).fault("weight", f"= {shown(weight)}: {error}"))
                weight = 1.0
            source = self._source(entry, weight, place)
            if source is not None:
                found.append((source[0], {**source[1], "weight": weight}))
        return found

    def _source(self, values: Mapping[str, Any], weight: float, place: str) -> tuple[Source, dict[str, Any]] | None:
        plugin = self._named(Dataset, values, place)
        if plugin is None:
            return None
        values = {key: value for key, value in values.items() if key != "name"}
        config = self._parse(plugin.Config, self._still_meant(plugin, values, place), place)
        if config is None:
            return None
        instance = made(plugin, config)
        assert isinstance(instance, Dataset)
        return Source(instance, weight), {"name": plugin.name, **resolved_table(config)}

    def _metrics(self) -> tuple[Any, tuple[Tracker, ...]]:
        values = dict(self.table.at("metrics"))
        trackers = {plugin.name: plugin for plugin in registry.of_kind(Tracker.kind)}
        tables_ = {key: values.pop(key) for key in list(values) if key in trackers}
        own = {option.key for option in options_of(MetricsSection)}
        for key in [key for key, value in values.items() if isinstance(value, dict) and key not in own]:
            self.faults.append(self._where("metrics").fault(key, registry.trouble(Tracker.kind, key)))
            del values[key]
        metrics = self._parse(MetricsSection, values, "metrics")
        self.resolved["metrics"] = resolved_table(metrics) if metrics else {}
        on: list[Tracker] = []
        for name, plugin in trackers.items():
            enabled, config = self._switch(plugin, tables_.get(name), "metrics", name)
            if config is None:
                continue
            self.resolved["metrics"][name] = {"enabled": enabled, **resolved_table(config)}
            if enabled:
                instance = made(plugin, config)
                assert isinstance(instance, Tracker)
                on.append(instance)
        return metrics, tuple(on)

    def _switch(self, plugin: type[Plugin], values: Any, *path: str) -> tuple[bool, Any]:
        """Whether a plugin with an `enabled` key is on, and its options."""
        if values is not None and not isinstance(values, dict):
            self.faults.append(self._where(*path[:-1]).fault(path[-1], f"must be a table, [{'.'.join(path)}]"))
            return False, None
        values = dict(values) if values is not None else {"enabled": plugin.default}
        given = values.pop("enabled", True)
        try:
            enabled = coerce(given, bool)
        except ValueError as error:
            self.faults.append(self._where(*path).fault("enabled", f"= {shown(given)}: {error}"))
            enabled = True
        return enabled, self._parse(plugin.Config, values, *path)

    def _layout_and_techniques(self, world_size: int | None) -> tuple[Layout, tuple[Technique, ...]]:
        known = [plugin for plugin in registry.of_kind(Technique.kind) if issubclass(plugin, Technique)]
        wanted: dict[str, int] = {}
        for axis, degree in self.table.at("mesh").items():
            try:
                wanted[axis] = coerce(degree, int)
            except ValueError as error:
                self.faults.append(self._where("mesh").fault(axis, f"= {shown(degree)}: {error}"))
        layout, misfits = lay_out([axis for plugin in known for axis in plugin.axes], wanted, world_size)
        for axis, sentence in misfits:
            unowned = registry.left_out() if axis and axis not in layout.degrees else ""
            self.faults.append(self._where("mesh").fault(axis, sentence + unowned))
        self.resolved["mesh"] = dict(layout.degrees)
        stated = self._stated_techniques(known)
        on = chosen_techniques(known, {name: enabled for name, (enabled, _) in stated.items()}, layout)
        self.faults += [self._where("mesh").fault(axis, sentence) for axis, sentence in unattended(known, on, layout)]
        techniques = []
        self.resolved["plugins"] = {"path": list(tables.plugin_folders(self.table))}
        for plugin in on:
            config = (
                stated[plugin.name][1]
                if plugin.name in stated
                else self._parse(plugin.Config, {}, "plugins", plugin.name)
            )
            if config is not None:
                techniques.append(made(plugin, config))
        for name, (enabled, config) in stated.items():
            if config is not None:
                self.resolved["plugins"][name] = {"enabled": enabled, **resolved_table(config)}
        for technique in techniques:
            self.resolved["plugins"].setdefault(technique.name, {"enabled": True, **resolved_table(technique.config)})
        self.faults += [ConfigIssue(self.source, sentence) for sentence in agree(techniques, known)]
        return layout, tuple(techniques)

    def _stated_techniques(self, known: Iterable[type[Technique]]) -> dict[str, tuple[bool, Any]]:
        """Techniques with a table of their own, in TOML order: (enabled, options)."""
        by_name = {plugin.name: plugin for plugin in known}
        stated = {}
        for name, values in self.table.at("plugins").items():
            if name == "path":
                continue
            if sentence := registry.trouble(Technique.kind, name):
                self.faults.append(self._where("plugins").fault(name, sentence))
                continue
            stated[name] = self._switch(by_name[name], values, "plugins", name)
        return stated

    def _batch(self, train: TrainSection, layout: Layout) -> None:
        ranks, where = layout.degree_of("dealt"), self._where("train")
        if train.global_batch_size % ranks:
            down = train.global_batch_size // ranks * ranks
            near = f"{down} or {down + ranks}" if down else str(ranks)
            what = f"must be divisible by the {ranks} data-parallel ranks ({layout}); nearest: {near}"
            self.faults.append(where.fault("global_batch_size", f"= {train.global_batch_size}: {what}"))
            return
        share = train.global_batch_size // ranks
        micro = train.micro_batch_size or choose_micro_batch(share, layout.degree_of("layers"))
        if share % micro:
            fits = min(divisors(share), key=lambda size: abs(size - micro))
            samples = f"the {share} samples per step per rank ({train.global_batch_size} / {ranks})"
            what = f"= {micro}: must divide {samples}; nearest: {fits}"
            self.faults.append(where.fault("micro_batch_size", what))
