"""Former spellings of keys and values, replaced by the present ones before a job is read or compared.

Which option was spelt how stands beside the option (`titan.contracts.plugin.options.option`).
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from titan.config.sections import At, declared_tables, table_at
from titan.config.tables import Table
from titan.contracts.plugin.options import Where, renewed
from titan.errors import ConfigIssue
from titan.terminal import warn_once


def renew(table: Table, source: str) -> list[ConfigIssue]:
    """Respell a job in place and warn of each former spelling; plugins have to be loaded.

    source: where a key comes from of which the table does not say so.  Returns a fault for each option that one file
    gives under both names.
    """
    faults = []
    for path, config in declared_tables(table.values):
        names = tuple(map(str, path))
        listed = table.origins.get(names[:-1], source)  # of an entry of a mixture: the file that has the list
        where = Where(".".join(names), listed, table.origins_in(*names))
        renewal = renewed(config, table_at(table.values, path), where)
        _replace(table.values, path, renewal.values)
        for former, key in renewal.moved.items():
            table.origins[(*names, key)] = table.origins.pop((*names, former), listed)
        for line in renewal.lines:
            warn_once(line)
        faults += renewal.faults
    return faults


def renewed_job(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved job that an earlier version saved, in the present spelling, without warnings."""
    job = copy.deepcopy(dict(saved))
    for path, config in declared_tables(job):
        _replace(job, path, renewed(config, table_at(job, path), Where("")).values)
    return job


def renewed_keys(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The same for dotted keys of a job and their values."""
    nested = Table()
    for key, value in saved.items():
        nested.put(tuple(key.split(".")), value, "")
    return dict(_dotted(renewed_job(nested.values)))


def _dotted(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _replace(job: Any, path: At, values: Mapping[str, Any]) -> None:
    here = table_at(job, path)
    here.clear()
    here.update(values)
