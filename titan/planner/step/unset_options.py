"""Options that a job leaves unset and that follow from memory: their values by the estimate for one device.

A technique names such options and their values in `Technique.unset_options`. The host takes the usual values where the
job's predicted peak is within the limit that a search keeps too (`DeviceMemory.limit_gib`), and those that need less
memory where it is not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan.config import Job
from titan.contracts import Technique
from titan.contracts.base.conformance import answer, label, made, sentences
from titan.contracts.base.options import did_you_mean, options_of, resolved_table
from titan.errors import PluginError, TitanError
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, peak_bytes

Values = Mapping[str, Mapping[str, Any]]
"""Technique -> option -> value."""


def settle(job: Job, memory: DeviceMemory | None) -> tuple[Job, list[str]]:
    """The job with values for unset options that memory decides, and one sentence per such option.

    job: an option that it sets keeps its value.  memory: of one device; None: not known, so nothing is decided.

    The usual values stay unset in the returned job, so that they still follow the layout of whoever reads its resolved
    table. Values that memory forced are set there. The result depends on the arguments alone.

    Raises:
        PluginError: `unset_options` fails, or names an option that the technique does not have.
    """
    usual, frugal = (_values(job, fits) for fits in (True, False))
    if not usual:
        return job, []
    if memory is None:
        return job, [f"{said}: the memory of the device is not known" for said in _said(usual)]
    most = _peak_gib(job, memory)
    if isinstance(most, str):
        return job, [f"{said}: memory cannot be predicted ({most})" for said in _said(usual)]
    need = f"the job needs {most:.1f} GiB per rank, and the limit is {memory.limit_text()}"
    if most <= memory.limit_gib:
        return job, [f"{said}: {need}" for said in _said(usual)]
    smaller = _with(job, frugal)
    if refused := [why for t in smaller.techniques for why in sentences(t, "check", smaller, smaller.spec)]:
        less = ", ".join(f"{key} = {value}" for options in frugal.values() for key, value in options.items())
        return job, [f"{said}: {need}, but {less} is refused: {refused[0]}" for said in _said(usual)]
    said = _said(frugal)
    least = _peak_gib(smaller, memory)
    if not isinstance(least, str) and least > memory.limit_gib:
        with_them = "it" if len(said) == 1 else "all of these values"
        need += f"; with {with_them} the job needs {least:.1f} GiB, which exceeds the limit too"
    return smaller, [f"{words}: otherwise {need}" for words in said]


def _peak_gib(job: Job, memory: DeviceMemory) -> float | str:
    """GiB on the rank that needs most, or why they cannot be predicted."""
    try:
        return peak_bytes(costs_of(job), job.layout, memory) / GIB
    except Exception as error:  # training needs no estimate: whatever a model states, it goes on without one
        return str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"


def _said(values: Values) -> list[str]:
    """Words for each value: the option was not set, and what it is now."""
    return [
        f"[{Technique.section}.{name}] {key} is not set, so {key} = {value}"
        for name, options in values.items()
        for key, value in options.items()
    ]


def _values(job: Job, fits: bool) -> Values:
    """What techniques choose for their options that the job leaves unset."""
    found = {}
    for technique in job.techniques:
        fields = {option.key: option.field for option in options_of(type(technique.config))}
        chosen = answer(technique, "unset_options", dict, job, fits)
        for key in chosen:
            if key not in fields:
                what = f"unset_options() names {key!r}, which is no option of it{did_you_mean(key, fields)}"
                raise PluginError(f"{label(type(technique))}: {what}")
        unset = {key: value for key, value in chosen.items() if getattr(technique.config, fields[key]) is None}
        if unset:
            found[technique.name] = unset
    return found


def _with(job: Job, values: Values) -> Job:
    """The job with these options set, also in its resolved table."""
    techniques, plugins = [], dict(job.table[Technique.section])
    for technique in job.techniques:
        if options := values.get(technique.name):
            fields = {option.key: option.field for option in options_of(type(technique.config))}
            config = replace(technique.config, **{fields[key]: value for key, value in options.items()})
            technique = made(type(technique), config)
            plugins[technique.name] = {**plugins[technique.name], **resolved_table(config)}
        techniques.append(technique)
    return replace(job, techniques=tuple(techniques), table={**job.table, Technique.section: plugins})
