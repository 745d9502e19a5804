"""The tables of a job and the dataclass that declares the options of each."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from titan.contracts import Dataset, Loss, LrSchedule, Model, Optimizer, Technique, Tokenizer, Tracker
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import default_table, keys_of
from titan.contracts.plugin.registry import Plugin
from titan.contracts.sections import SECTIONS

ONE_OF: tuple[type[Plugin], ...] = (Model, Tokenizer, Loss, Optimizer, LrSchedule)

SHARED: Mapping[str, Sequence[str]] = {
    "data": [*keys_of(SECTIONS["data"]), "name", "weight", "mixture"],
    "validation": [*keys_of(SECTIONS["validation"]), "name"],
    **{contract.section: ["name"] for contract in ONE_OF},
    "model": ["name", "preset"],
    "optimizer": ["name", "groups"],
    "plugins.": ["enabled"],
    "metrics.": ["enabled"],
}
"""Keys of tables that titan shares with a plugin; with a dot, of the tables below."""

At = tuple[str | int, ...]
"""Path to a table of a job; a number counts the entries of a mixture."""


def declared_tables(job: Mapping[str, Any]) -> list[tuple[At, type]]:
    """Each table of a job and the dataclass of its options; a table that host and plugin share comes twice.

    Plugins that are unknown, and values that should be tables and are not, are left out.
    """
    return [(path, config) for path, config in _all_tables(job) if isinstance(table_at(job, path), dict)]


def table_at(job: Any, path: At) -> Any:
    """The value at a path of a job; None where there is none."""
    for part in path:
        if isinstance(part, int):
            job = job[part] if isinstance(job, list) else None
        else:
            job = job.get(part) if isinstance(job, Mapping) else None
    return job


def filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """A saved job, a table of tables, with the defaults of options that are not in it: under the default of a new one,
    a run does what it did before. It has its switches, and the names of its datasets. What is unknown stays as it is.

    A technique that the table lacks was not there, and is not added; a tracker or an axis likewise.
    """
    found = {**{name: {} for name in (*SECTIONS, *(contract.section for contract in ONE_OF))}, **deepcopy(dict(table))}
    for contract in ONE_OF:
        if usual := registry.chosen(contract.kind, None):
            found[contract.section].setdefault("name", usual.name)
    for path, config in declared_tables(found):
        if "groups" not in path:  # of the optimizer, which state what differs from it
            values = table_at(found, path)
            values.update({**default_table(config), **values})
    return found


def _all_tables(job: Mapping[str, Any]) -> Iterator[tuple[At, type]]:
    yield from (((name,), section) for name, section in SECTIONS.items())
    for contract in ONE_OF:
        yield from _of_plugin(job, contract, contract.section)
    groups, mixture = table_at(job, ("optimizer", "groups")), table_at(job, ("data", "mixture"))
    for number in range(len(groups) if isinstance(groups, list) else 0):
        for _, config in _of_plugin(job, Optimizer, "optimizer"):
            yield ("optimizer", "groups", number), config
    entries = [("mixture", number) for number in range(len(mixture))] if isinstance(mixture, list) else [()]
    for entry in entries:
        yield from _of_plugin(job, Dataset, "data", *entry)
    if table_at(job, ("validation", "name")) is not None:
        yield from _of_plugin(job, Dataset, "validation")
    for contract in (Technique, Tracker):
        for plugin in registry.of_kind(contract.kind):
            yield (contract.section, plugin.name), plugin.Config


def _of_plugin(job: Mapping[str, Any], contract: type[Plugin], *path: str | int) -> Iterator[tuple[At, type]]:
    if plugin := registry.chosen(contract.kind, table_at(job, (*path, "name"))):
        yield path, plugin.Config
