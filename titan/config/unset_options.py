"""Options that a job leaves to memory (`Technique.unset_options`): which there are, and a job with values for them.

A planner chooses among the tables (`titan.contracts.planner`); without a choice, an option has its usual value, which
may follow the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan.config.job import Job
from titan.contracts import Technique
from titan.contracts.planner import Values
from titan.contracts.plugin.conformance import answer, label, made
from titan.contracts.plugin.options import as_table, did_you_mean, keys_of, options_of, resolved_table
from titan.errors import PluginError

Tables = Mapping[str, Sequence[Mapping[str, Any]]]
"""Technique -> tables of option -> value; the first has those that options have where nobody chooses."""


def left_to_memory(job: Job) -> Tables:
    """Of each technique, the tables of those of its options that the job leaves to memory; a PluginError where
    `unset_options` fails, or names an option that the technique does not have."""
    left = {}
    for technique in job.techniques:
        known = keys_of(type(technique.config))
        tables = answer(technique, "unset_options", list, job)
        for key in (key for table in tables for key in table):
            if key not in known:
                what = f"unset_options() names {key!r}, which is no option of it{did_you_mean(key, known)}"
                raise PluginError(f"{label(type(technique))}: {what}")
        if tables and all(as_table(technique.config).get(key) in (None, "auto") for key in tables[0]):
            left[technique.name] = tables
    return left


def described(job: Job, values: Values) -> list[str]:
    """Words for each value: that the job does not set the option, and what it is now."""
    given = {technique.name: as_table(technique.config) for technique in job.techniques}
    return [
        f"[{Technique.section}.{name}] {key} is {text_of(given[name][key]) if key in given[name] else 'not set'}, "
        f"so {key} = {text_of(value)}"
        for name, table in values.items()
        for key, value in table.items()
    ]


def text_of(value: Any) -> str:
    """A value as a sentence has it."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def with_options(job: Job, values: Values) -> Job:
    """The job with these options set, also in its resolved table."""
    if not values:
        return job
    techniques, plugins = [], dict(job.table[Technique.section])
    for technique in job.techniques:
        if options := values.get(technique.name):
            fields = {option.key: option.field for option in options_of(type(technique.config))}
            config = replace(technique.config, **{fields[key]: value for key, value in options.items()})
            technique = made(type(technique), config)
            plugins[technique.name] = {**plugins[technique.name], **resolved_table(config)}
        techniques.append(technique)
    return replace(job, techniques=tuple(techniques), table={**job.table, Technique.section: plugins})
