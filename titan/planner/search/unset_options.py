"""Options for which memory decides: their values by the estimate for one device.

A technique names such options in `Technique.unset_options`, with tables of values from the fastest to what needs least
memory. The host takes the fastest ones with which the job's predicted peak is within the limit that a search keeps too
(`DeviceMemory.limit_gib`), and what techniques keep in a host's memory fits there, where a cluster file tells its size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from titan.config import Job
from titan.contracts import Technique
from titan.contracts.plugin.conformance import answer, label, made, sentences
from titan.contracts.plugin.options import did_you_mean, options_of, resolved_table
from titan.errors import PluginError, TitanError
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.machine.host import short_of
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, memories

Values = Mapping[str, Mapping[str, Any]]
"""Technique -> option -> value."""

UNDECIDED = (None, "auto")
"""Values of an option that leave it to memory."""


class _Need(NamedTuple):
    """What a job needs: GiB on the rank that needs most, and what the memory of the host lacks, in words."""

    gib: float
    host_short: str

    def fits(self, memory: DeviceMemory) -> bool:
        return self.gib <= memory.limit_gib and not self.host_short


def settle(job: Job, memory: DeviceMemory | None) -> tuple[Job, list[str]]:
    """The job with what `choose` decides, and its sentences."""
    values, sentences = choose(job, memory)
    return with_options(job, values), sentences


def choose(job: Job, memory: DeviceMemory | None) -> tuple[Values, list[str]]:
    """Values for options that memory decides, for `with_options`, and one sentence per such option.

    job: an option that it sets keeps its value.  memory: of one device; None: not known, so nothing is decided.

    The usual values are left out, so that they still follow the layout of whoever reads the job's resolved table. Only
    values that memory forced are there. The result depends on the arguments alone.

    Raises:
        PluginError: `unset_options` fails, or names an option that the technique does not have.
    """
    usual, *smaller = _combined(_tables(job))
    if not usual:
        return {}, []
    if memory is None:
        return {}, [f"{said}: the memory of the device is not known" for said in _said(job, usual)]
    most = _need(job, memory)
    if isinstance(most, str):
        return {}, [f"{said}: memory cannot be predicted ({most})" for said in _said(job, usual)]
    need = f"the job needs {most.gib:.1f} GiB per rank, and the limit is {memory.limit_text()}"
    need += most.host_short and f"; {most.host_short}"
    if most.fits(memory):
        return {}, [f"{said}: {need}" for said in _said(job, usual)]
    refused, best = "", (most, usual)
    for values in smaller:
        other = with_options(job, values)
        if found := [why for t in other.techniques for why in sentences(t, "check", other, other.spec)]:
            less = ", ".join(f"{key} = {_text(value)}" for table in values.values() for key, value in table.items())
            refused = f", but {less} is refused: {found[0]}"
            continue
        less_need = _need(other, memory)
        if not isinstance(less_need, str) and (less_need.fits(memory) or less_need.gib <= best[0].gib):
            best = less_need, values
            if less_need.fits(memory):
                break
    least, values = best
    said = _said(job, values)
    if values is usual:
        return {}, [f"{words}: {need}{refused}" for words in said]
    if not least.fits(memory):
        with_them = "it" if len(said) == 1 else "all of these values"
        too = f"the job needs {least.gib:.1f} GiB, which exceeds the limit too"
        need += f"; with {with_them} {too if least.gib > memory.limit_gib else least.host_short}"
    return values, [f"{words}: otherwise {need}" for words in said]


def _combined(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Values]:
    """Values of all techniques together: the usual ones of all, then those that are fewest places further."""
    places = product(*(range(len(each)) for each in tables.values()))
    for chosen in sorted(places, key=sum):
        yield {name: each[place] for (name, each), place in zip(tables.items(), chosen, strict=True)}


def least_gib(job: Job) -> list[tuple[float, float]]:
    """GiB that a job takes all the time, of each pipeline rank: on its device, and in its host's memory.

    On the device: weights and the optimizer's state. Zeros where costs cannot be predicted.
    """
    try:
        found = memories(costs_of(job), job.layout, DeviceMemory(0.0))
    except Exception:  # as below
        return [(0.0, 0.0)]
    return [((each.parameters + each.optimizer) / GIB, each.host / GIB) for each in found]


def _need(job: Job, memory: DeviceMemory) -> _Need | str:
    """What the job needs, or why that cannot be predicted."""
    try:
        found = memories(costs_of(job), job.layout, memory)
        short = short_of(memory, [each.host for each in found], job.layout.world_size)
        return _Need(max(each.total for each in found) / GIB, short)
    except Exception as error:  # training needs no estimate: whatever a model states, it goes on without one
        return str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"


def _said(job: Job, values: Values) -> list[str]:
    """Words for each value: that the job does not set the option, and what it is now."""
    configs = {technique.name: technique.config for technique in job.techniques}
    return [
        f"[{Technique.section}.{name}] {key} is {_given(configs[name], key)}, so {key} = {_text(value)}"
        for name, table in values.items()
        for key, value in table.items()
    ]


def _given(config: Any, key: str) -> str:
    value = getattr(config, {option.key: option.field for option in options_of(type(config))}[key])
    return "not set" if value is None else _text(value)


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tables(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Of each technique, the tables of those of its options that the job leaves to memory."""
    found = {}
    for technique in job.techniques:
        fields = {option.key: option.field for option in options_of(type(technique.config))}
        tables = answer(technique, "unset_options", list, job)
        for key in (key for table in tables for key in table):
            if key not in fields:
                what = f"unset_options() names {key!r}, which is no option of it{did_you_mean(key, fields)}"
                raise PluginError(f"{label(type(technique))}: {what}")
        if tables and all(getattr(technique.config, fields[key]) in UNDECIDED for key in tables[0]):
            found[technique.name] = tables
    return found


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
