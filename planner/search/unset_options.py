"""Options for which memory decides: their values by the estimate for one device.

Of the tables of values (`titan.config.unset_options`), the fastest is chosen with which the job's predicted peak is
within the limit of a search (`DeviceMemory.limit_gib`). What techniques keep in a host's memory fits there too, where a
cluster file tells its size.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from titan.config import Job
from titan.config.unset_options import Tables, described, left_to_memory, text_of, with_options
from titan.contracts.planner import Values
from titan.contracts.plugin.conformance import sentences
from titan.errors import TitanError
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.machine.host import short_of
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, memories


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
    usual, *smaller = _combined(left_to_memory(job))
    if not usual:
        return {}, []
    if memory is None:
        return {}, [f"{said}: the memory of the device is not known" for said in described(job, usual)]
    most = _need(job, memory)
    if isinstance(most, str):
        return {}, [f"{said}: memory cannot be predicted ({most})" for said in described(job, usual)]
    need = f"the job needs {most.gib:.1f} GiB per rank, and the limit is {memory.limit_text()}"
    need += most.host_short and f"; {most.host_short}"
    if most.fits(memory):
        return {}, [f"{said}: {need}" for said in described(job, usual)]
    refused, best = "", (most, usual)
    for values in smaller:
        other = with_options(job, values)
        if found := [why for t in other.techniques for why in sentences(t, "check", other, other.spec)]:
            less = ", ".join(f"{key} = {text_of(value)}" for table in values.values() for key, value in table.items())
            refused = f", but {less} is refused: {found[0]}"
            continue
        less_need = _need(other, memory)
        if not isinstance(less_need, str) and (less_need.fits(memory) or less_need.gib <= best[0].gib):
            best = less_need, values
            if less_need.fits(memory):
                break
    least, values = best
    said = described(job, values)
    if values is usual:
        return {}, [f"{words}: {need}{refused}" for words in said]
    if not least.fits(memory):
        with_them = "it" if len(said) == 1 else "all of these values"
        too = f"the job needs {least.gib:.1f} GiB, which exceeds the limit too"
        need += f"; with {with_them} {too if least.gib > memory.limit_gib else least.host_short}"
    return values, [f"{words}: otherwise {need}" for words in said]


def _combined(tables: Tables) -> Iterator[Values]:
    """Values of all techniques together: the usual ones of all, then those that are fewest places further."""
    places = product(*(range(len(each)) for each in tables.values()))
    for chosen in sorted(places, key=sum):
        yield {name: each[place] for (name, each), place in zip(tables.items(), chosen, strict=True)}


def _need(job: Job, memory: DeviceMemory) -> _Need | str:
    """What the job needs, or why that cannot be predicted."""
    try:
        found = memories(costs_of(job), job.layout, memory)
        short = short_of(memory, [each.host for each in found], job.layout.world_size)
        return _Need(max(each.total for each in found) / GIB, short)
    except Exception as error:  # training needs no estimate: whatever a model states, it goes on without one
        return str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
