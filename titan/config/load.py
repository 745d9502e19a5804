"""Build a Job from files and the command line; all faults are collected and reported together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from titan.contracts.plugin.options import Where, coerce, did_you_mean, option, options_of, parse, resolved_table, shown
from titan.contracts.plugin.registry import Plugin
from titan.contracts.sections import DataSection, MetricsSection, RunSection, TrainSection, ValidationSection
from titan.errors import ConfigError, ConfigIssue

BUILT_IN = Path(next(iter(titan.configs.__path__)))
QUICKSTART = BUILT_IN / "quickstart.toml"

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class _Weight:
    weight: float = option(1.0, "share of the samples that an entry of a mixture gives", above=0, at_most=1e9)


@dataclass(frozen=True, kw_only=True)
class _Switch:
    enabled: bool = option(True, "whether the plugin is on")


def load_job(path: Path | None, overrides: Sequence[str] = (), world_size: int | None = None) -> Job:
    """The job of a TOML file (None: the quickstart) under the overrides, for that many ranks (None: as many as needed).

    Raises:
        ConfigError: with every fault found.
        PluginError: a plugin cannot be loaded.
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(f"--world-size {world_size}: must be at least 1", "command line")
    path = path or QUICKSTART
    table = tables.read(path, overrides, BUILT_IN)
    registry.load_plugins(tables.plugin_folders(table))
    return _Loader(table, str(path)).load(world_size, path.stem)


def said_of(path: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """Sentences about what one file of a job says over another, where a user may have meant otherwise."""
    return tables.remarks(tables.read(path or QUICKSTART, overrides, BUILT_IN))


def load_table(values: Mapping[str, Any], origin: str, overrides: Sequence[str], world_size: int | None = None) -> Job:
    """A job from a table, called `origin` in messages, instead of a file; it uses a model and does not train it."""
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
        run, train, checkpoint, comm = (self._section(name) for name in ("run", "train", "checkpoint", "comm"))
        entries = groups.take(self.table)
        model, tokenizer, loss, optimizer, schedule = (self._one_of(c.section, c) for c in ONE_OF)
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
        known = {*SECTIONS, "mesh", "plugins", *(contract.section for contract in ONE_OF)}
        for key, value in self.table.values.items():
            origin = self.table.origins.get((key,), self.source)
            if key not in known:
                self.faults.append(ConfigIssue(origin, f"[{key}]: unknown table{did_you_mean(key, known)}"))
            elif not isinstance(value, dict):
                self.faults.append(ConfigIssue(origin, f"{key} = {value!r}: must be a table, [{key}]"))
                self.table.values[key] = {}

    def _fault(self, place: str, key: str, what: str) -> None:
        self.faults.append(self._where(place).fault(key, what))

    def _parse(self, config: type[C], values: Mapping[str, Any], *path: str) -> C | None:
        parsed, faults = parse(config, values, self._where(*path))
        self.faults += faults
        return parsed

    def _divided(self, config: type[C], values: Mapping[str, Any], *path: str) -> tuple[C | None, dict[str, Any]]:
        """A table that the host shares with a plugin: the host's keys, parsed, and the others."""
        own = {declared.key for declared in options_of(config)}
        host = self._parse(config, {key: value for key, value in values.items() if key in own}, *path)
        return host, {key: value for key, value in values.items() if key not in own}

    def _section(self, name: str, values: Mapping[str, Any] | None = None) -> Any:
        """A section of the host. values: without what is a plugin's."""
        parsed = self._parse(SECTIONS[name], self.table.at(name) if values is None else values, name)
        self.resolved[name] = resolved_table(parsed) if parsed else {}
        return parsed

    def _plugin(self, contract: type[Plugin], values: Mapping[str, Any], place: str) -> tuple[Any, dict[str, Any]]:
        """The plugin that a table's `name` asks for, or its kind's default, and its resolved table; (None, {}): faulty.

        Keys unknown to it are passed over where a lower file gave them to another, whose name has been replaced since.
        """
        name = values.get("name")
        if name is not None and (sentence := registry.trouble(contract.kind, str(name))):
            self._fault(place, "name", f"= {str(name)!r}: {sentence}")
            return None, {}
        plugin = registry.chosen(contract.kind, name)
        if plugin is None:
            known = ", ".join(each.name for each in registry.of_kind(contract.kind))
            self._fault(place, "name", f"missing; name a {contract.kind} ({known})")
            return None, {}
        values = {key: value for key, value in values.items() if key != "name"}
        preset = values.pop("preset", None) if issubclass(plugin, Model) else None
        if issubclass(plugin, Model) and preset is not None:
            if str(preset) in plugin.presets:
                values = {**plugin.presets[str(preset)], **values}
            else:
                hint = did_you_mean(str(preset), plugin.presets)
                self._fault("model", "preset", f"= {str(preset)!r}: unknown preset{hint}")
        known_keys = {declared.key for declared in options_of(plugin.Config)}
        outdated = {key for key in values.keys() - known_keys if (place, key) in self.table.outdated}
        config = self._parse(plugin.Config, {k: value for k, value in values.items() if k not in outdated}, place)
        if config is None:
            return None, {}
        return made(plugin, config), {"name": plugin.name, **resolved_table(config)}

    def _one_of(self, section: str, contract: type[Plugin]) -> Any:
        plugin, self.resolved[section] = self._plugin(contract, self.table.at(section), section)
        return plugin

    def _data(self) -> tuple[Any, tuple[Source, ...]]:
        data, dataset = self._divided(DataSection, self.table.at("data"), "data")
        mixture_key = ("data", "mixture")
        if "mixture" in dataset:  # it replaces the dataset of lower files, as a name does their mixture
            lower = [key for key in dataset if key != "mixture" and self.table.above(mixture_key, ("data", key))]
            if "name" in dataset and self.table.above(("data", "name"), mixture_key):
                lower = ["mixture"]
            dataset = {key: value for key, value in dataset.items() if key not in lower}
        self.resolved["data"] = resolved_table(data) if data else {}
        if "mixture" not in dataset:
            plugin, table = self._plugin(Dataset, dataset, "data")
            self.resolved["data"] |= table
            return data, (Source(plugin, 1.0),) if plugin is not None else ()
        mixture = dataset.pop("mixture")
        for key in dataset:
            self._fault("data", key, "cannot stand beside a mixture; move it into an entry of [[data.mixture]]")
        if not isinstance(mixture, list) or not mixture or not all(isinstance(entry, dict) for entry in mixture):
            self._fault("data", "mixture", "must be a list of tables, [[data.mixture]]")
            return data, ()
        sources, self.resolved["data"]["mixture"] = [], []
        for number, entry in enumerate(mixture):
            share, entry = self._divided(_Weight, entry, place := f"data.mixture.{number}")
            plugin, table = self._plugin(Dataset, entry, place)
            if share is not None and plugin is not None:
                sources.append(Source(plugin, share.weight))
                self.resolved["data"]["mixture"].append({**table, "weight": share.weight})
        return data, tuple(sources)

    def _validation(self) -> tuple[Any, Dataset | None]:
        validation, dataset = self._divided(ValidationSection, self.table.at("validation"), "validation")
        self.resolved["validation"] = resolved_table(validation) if validation else {}
        if "name" in dataset:
            plugin, table = self._plugin(Dataset, dataset, "validation")
            self.resolved["validation"] |= table
            return validation, plugin
        datasets = registry.of_kind(Dataset.kind)
        if dataset or (validation and validation.every > 0):
            known = ", ".join(plugin.name for plugin in datasets)
            why = "" if dataset else f", for validation.every = {self.table.at('validation').get('every')}"
            self._fault("validation", "name", f"missing{why}; name a dataset ({known})")
        keys = {o.key for config in (ValidationSection, *(p.Config for p in datasets)) for o in options_of(config)}
        for key in (key for key in dataset if key not in keys):
            self._fault("validation", key, f"unknown key{did_you_mean(key, keys)}")
        return validation, None

    def _metrics(self) -> tuple[Any, tuple[Tracker, ...]]:
        values = dict(self.table.at("metrics"))
        trackers = {plugin.name: plugin for plugin in registry.of_kind(Tracker.kind)}
        stated = {key: values.pop(key) for key in trackers.keys() & values.keys()}
        own = {declared.key for declared in options_of(MetricsSection)}
        for key in [key for key, value in values.items() if isinstance(value, dict) and key not in own]:
            self._fault("metrics", key, registry.trouble(Tracker.kind, key))
            del values[key]
        metrics = self._section("metrics", values)
        on: list[Any] = []
        for name, plugin in trackers.items():
            enabled, config = self._switched(plugin, stated.get(name, {"enabled": plugin.default}), "metrics")
            if config is not None:
                self.resolved["metrics"][name] = {"enabled": enabled, **resolved_table(config)}
                on += [made(plugin, config)] if enabled else []
        return metrics, tuple(on)

    def _switched(self, plugin: type[Plugin], values: Any, section: str) -> tuple[bool, Any]:
        """Whether a plugin with an `enabled` key is on, and its options."""
        if not isinstance(values, dict):
            self._fault(section, plugin.name, f"must be a table, [{section}.{plugin.name}]")
            return False, None
        switch, values = self._divided(_Switch, values, section, plugin.name)
        return switch is None or switch.enabled, self._parse(plugin.Config, values, section, plugin.name)

    def _layout_and_techniques(self, world_size: int | None) -> tuple[Layout, tuple[Technique, ...]]:
        known = [plugin for plugin in registry.of_kind(Technique.kind) if issubclass(plugin, Technique)]
        wanted: dict[str, int] = {}
        for axis, degree in self.table.at("mesh").items():
            try:
                wanted[axis] = coerce(degree, int)
            except ValueError as error:
                self._fault("mesh", axis, f"= {shown(degree)}: {error}")
        layout, misfits = lay_out([axis for plugin in known for axis in plugin.axes], wanted, world_size)
        for axis, sentence in misfits:
            self._fault("mesh", axis, sentence + (registry.left_out() if axis and axis not in layout.degrees else ""))
        self.resolved["mesh"] = dict(layout.degrees)
        by_name = {plugin.name: plugin for plugin in known}
        stated: dict[str, tuple[bool, Any]] = {}
        for name, values in self.table.at("plugins").items():
            if name == "path":
                continue
            if sentence := registry.trouble(Technique.kind, name):
                self._fault("plugins", name, sentence)
            else:
                stated[name] = self._switched(by_name[name], values, "plugins")
        on = chosen_techniques(known, {name: enabled for name, (enabled, _) in stated.items()}, layout)
        for axis, sentence in unattended(known, on, layout):
            self._fault("mesh", axis, sentence)
        for plugin in on:
            if plugin.name not in stated:
                stated[plugin.name] = True, self._parse(plugin.Config, {}, "plugins", plugin.name)
        self.resolved["plugins"] = {"path": list(tables.plugin_folders(self.table))}
        for name, (enabled, config) in stated.items():
            if config is not None:
                self.resolved["plugins"][name] = {"enabled": enabled, **resolved_table(config)}
        configs = ((plugin, stated[plugin.name][1]) for plugin in on)
        techniques = [made(plugin, config) for plugin, config in configs if config is not None]
        self.faults += [ConfigIssue(self.source, sentence) for sentence in agree(techniques, known)]
        return layout, tuple(techniques)

    def _batch(self, train: TrainSection, layout: Layout) -> None:
        ranks = layout.degree_of("dealt")
        if train.global_batch_size % ranks:
            down = train.global_batch_size // ranks * ranks
            near = f"{down} or {down + ranks}" if down else str(ranks)
            what = f"must be divisible by the {ranks} data-parallel ranks ({layout}); nearest: {near}"
            self._fault("train", "global_batch_size", f"= {train.global_batch_size}: {what}")
            return
        share = train.global_batch_size // ranks
        micro = train.micro_batch_size or choose_micro_batch(share, layout.degree_of("layers"))
        if share % micro:
            fits = min(divisors(share), key=lambda size: abs(size - micro))
            samples = f"the {share} samples per step per rank ({train.global_batch_size} / {ranks})"
            self._fault("train", "micro_batch_size", f"= {micro}: must divide {samples}; nearest: {fits}")
