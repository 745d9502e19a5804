"""Build a Job from files and the command line; all faults are collected and reported together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from titan.config import groups, tables
from titan.config.check import check
from titan.config.job import Job, Source, choose_micro_batch, divisors
from titan.config.sections import ONE_OF, SHARED
from titan.config.tables import QUICKSTART, Table
from titan.config.techniques import agree, chosen_techniques, unattended
from titan.contracts import Dataset, Model, Technique, Tracker
from titan.contracts.base.layout import Layout, lay_out
from titan.contracts.plugin import registry
from titan.contracts.plugin.conformance import made
from titan.contracts.plugin.options import Where, coerce, did_you_mean, keys_of, option, parse, resolved_table, shown
from titan.contracts.plugin.registry import Plugin
from titan.contracts.sections import SECTIONS, TrainSection
from titan.errors import ConfigError, ConfigIssue

HOST_ONLY = SECTIONS.keys() - {"data", "validation", "metrics"}
"""Tables in which no plugin has keys."""

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
    return _Loader(tables.read(path, overrides), str(path)).load(world_size, path.stem)


def load_table(values: Mapping[str, Any], origin: str, overrides: Sequence[str], world_size: int | None = None) -> Job:
    """A job from a table, called `origin` in messages, instead of a file; it uses a model and does not train it."""
    table = Table()
    table.merge(values, origin)
    tables.override(table, overrides)
    return _Loader(table, origin).load(world_size, "unnamed", trains=False)


class _Loader:
    """One pass over a table; `faults` grows as sections are read."""

    def __init__(self, table: Table, source: str) -> None:
        self.table, self.source = table, source
        self.faults: list[ConfigIssue] = []
        self.resolved: dict[str, Any] = {}

    def load(self, world_size: int | None, default_name: str, *, trains: bool = True) -> Job:
        registry.load_plugins(tables.plugin_folders(self.table))
        try:
            job = Job(**self._fields(world_size, default_name), table=self.resolved)
            check(job, self._where, trains=trains)
        except ConfigError as error:
            raise ConfigError(map(self.table.blamed, error.faults)) from error
        return job

    def _fields(self, world_size: int | None, default_name: str) -> dict[str, Any]:
        self._unknown_sections()
        # No key of the optimizer's, so groups stay where an upper file names another one.
        entries = self.table.at("optimizer").pop("groups", None)
        read = {name: self._divided(config, self.table.at(name), name) for name, config in SECTIONS.items()}
        fields: dict[str, Any] = {name: section for name, (section, _) in read.items()}
        self.resolved |= {name: resolved_table(section) if section else {} for name, section in fields.items()}
        for contract in ONE_OF:
            section = contract.section
            fields[section], self.resolved[section] = self._plugin(contract, self.table.at(section), section)
        fields["optimizer"] = groups.grouped(fields["optimizer"], entries, self._where, self.faults, self.resolved)
        fields["sources"] = self._sources(read["data"][1])
        fields["validation_data"] = self._validation_data(*read["validation"])
        fields["trackers"] = self._trackers(read["metrics"][1])
        fields["layout"], fields["techniques"] = self._layout_and_techniques(world_size)
        if fields["train"] is not None:
            self._batch(fields["train"], fields["layout"])
        if self.faults:
            raise ConfigError(self.faults)
        if not fields["run"].name:
            fields["run"] = replace(fields["run"], name=default_name)
            self.resolved["run"]["name"] = default_name
        return fields

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
        """A table of the host, parsed, and the keys in it that are not the host's, where a plugin may have them."""
        own = values.keys() if ".".join(path) in HOST_ONLY else keys_of(config)
        host = self._parse(config, {key: value for key, value in values.items() if key in own}, *path)
        return host, {key: value for key, value in values.items() if key not in own}

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
        if issubclass(plugin, Model) and (preset := values.pop("preset", None)) is not None:
            if str(preset) not in plugin.presets:
                hint = did_you_mean(str(preset), plugin.presets)
                self._fault("model", "preset", f"= {str(preset)!r}: unknown preset{hint}")
            values = {**plugin.presets.get(str(preset), {}), **values}
        outdated = {key for key in values.keys() - keys_of(plugin.Config) if (place, key) in self.table.outdated}
        config = self._parse(plugin.Config, {k: value for k, value in values.items() if k not in outdated}, place)
        if config is None:
            return None, {}
        return made(plugin, config), {"name": plugin.name, **resolved_table(config)}

    def _sources(self, dataset: dict[str, Any]) -> tuple[Source, ...]:
        mixture_key = ("data", "mixture")
        if "mixture" in dataset:  # it replaces the dataset of lower files, as a name does their mixture
            lower = [key for key in dataset if key != "mixture" and self.table.above(mixture_key, ("data", key))]
            if "name" in dataset and self.table.above(("data", "name"), mixture_key):
                lower = ["mixture"]
            dataset = {key: value for key, value in dataset.items() if key not in lower}
        if "mixture" not in dataset:
            plugin, table = self._plugin(Dataset, dataset, "data")
            self.resolved["data"] |= table
            return (Source(plugin, 1.0),) if plugin is not None else ()
        mixture = dataset.pop("mixture")
        for key in dataset:
            self._fault("data", key, "cannot stand beside a mixture; move it into an entry of [[data.mixture]]")
        if not isinstance(mixture, list) or not mixture or not all(isinstance(entry, dict) for entry in mixture):
            self._fault("data", "mixture", "must be a list of tables, [[data.mixture]]")
            return ()
        sources, self.resolved["data"]["mixture"] = [], []
        for number, entry in enumerate(mixture):
            share, entry = self._divided(_Weight, entry, place := f"data.mixture.{number}")
            plugin, table = self._plugin(Dataset, entry, place)
            if share is not None and plugin is not None:
                sources.append(Source(plugin, share.weight))
                self.resolved["data"]["mixture"].append({**table, "weight": share.weight})
        return tuple(sources)

    def _validation_data(self, validation: Any, dataset: dict[str, Any]) -> Any:
        if "name" in dataset:
            plugin, table = self._plugin(Dataset, dataset, "validation")
            self.resolved["validation"] |= table
            return plugin
        datasets = registry.of_kind(Dataset.kind)
        if dataset or (validation and validation.every > 0):
            known = ", ".join(plugin.name for plugin in datasets)
            why = "" if dataset else f", for validation.every = {self.table.at('validation').get('every')}"
            self._fault("validation", "name", f"missing{why}; name a dataset ({known})")
        keys = {*keys_of(SECTIONS["validation"]), *(key for plugin in datasets for key in keys_of(plugin.Config))}
        for key in (key for key in dataset if key not in keys):
            self._fault("validation", key, f"unknown key{did_you_mean(key, keys)}")
        return None

    def _trackers(self, given: dict[str, Any]) -> tuple[Tracker, ...]:
        known: dict[str, Any] = {plugin.name: plugin for plugin in registry.of_kind(Tracker.kind)}
        for key in [key for key, value in given.items() if key not in known and not isinstance(value, dict)]:
            self._fault("metrics", key, f"unknown key{did_you_mean(key, {*known, *keys_of(SECTIONS['metrics'])})}")
            del given[key]
        usual = {name: {"enabled": plugin.default} for name, plugin in known.items()}
        stated = self._switched(Tracker, given, usual)
        return tuple(made(known[name], config) for name, (on, config) in stated.items() if on and config is not None)

    def _switched(
        self, contract: type[Plugin], given: Mapping[str, Any], usual: Mapping[str, Any]
    ) -> dict[str, tuple[bool, Any]]:
        """Whether each plugin with a table of its own is on, and its options; None where they are faulty.

        usual: tables of plugins that the job does not name.
        """
        stated: dict[str, tuple[bool, Any]] = {}
        for name, values in {**usual, **given}.items():
            place, plugin = (contract.section, name), registry.find(contract.kind, name)
            sentence = registry.trouble(contract.kind, name) if name in given else ""
            if sentence or plugin is None:
                self._fault(contract.section, name, sentence)
            elif not isinstance(values, dict):
                self._fault(contract.section, name, f"must be a table, [{'.'.join(place)}]")
                stated[name] = False, None
            else:
                switch, values = self._divided(_Switch, values, *place)
                on, config = switch is None or switch.enabled, self._parse(plugin.Config, values, *place)
                stated[name] = on, config
                if config is not None:
                    self.resolved[contract.section][name] = {"enabled": on, **resolved_table(config)}
        return stated

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
        self.resolved |= {"mesh": dict(layout.degrees), "plugins": {"path": list(tables.plugin_folders(self.table))}}
        given = {name: values for name, values in self.table.at("plugins").items() if name != "path"}
        stated = self._switched(Technique, given, {})
        on = chosen_techniques(known, {name: enabled for name, (enabled, _) in stated.items()}, layout)
        for axis, sentence in unattended(known, on, layout):
            self._fault("mesh", axis, sentence)
        stated |= self._switched(Technique, {}, {plugin.name: {} for plugin in on if plugin.name not in stated})
        techniques = [made(plugin, config) for plugin in on if (config := stated[plugin.name][1]) is not None]
        self.faults += [ConfigIssue(self.source, sentence) for sentence in agree(techniques)]
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
