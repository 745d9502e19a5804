"""Changes of a job since the checkpoint that it resumes: those that affect training are logged or rejected.

Keys that only say how and where a run is carried out leave the curve as it is, and are not mentioned. A key or section
that the saved job lacks counts as having its default.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from titan.config.sections import declared_tables, filled
from titan.config.tables import Difference, differences
from titan.contracts import Optimizer, Technique
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import options_of
from titan.errors import ConfigError, ConfigIssue

Table = Mapping[str, Any]

_SECTIONS = ("run.", "mesh.", "metrics.", "comm.", "checkpoint.", "validation.")
FREE = (*_SECTIONS, "data.cache", "data.workers", "data.prepare_workers", "train.micro_batch_size", "train.gc_every")
"""Keys that say how and where a run is carried out, not what it computes."""

SEED = "run.seed"
DATA = ("data.", "tokenizer.", SEED)
"""Keys that may change which samples there are and in which order; the fingerprint of the samples tells."""

FIXED = ("model.",)
"""Keys that say what the weights are of."""

MEANING = {
    "train.steps": "the run now ends at that step; a schedule that depends on the last step changes from here on",
    "train.global_batch_size": "the next step takes that many samples",
}
FROM_HERE_ON = "takes effect at the next step"
NEW_RUNS = "sets what a new run begins with; the state in the checkpoint takes precedence"


class Changes(NamedTuple):
    """What has changed since a checkpoint: sentences for the start of the run, and whether the samples are others.

    updates: keys with both values that may explain why the optimizer's state is another.
    """

    said: tuple[str, ...] = ()
    other_samples: bool = False
    updates: tuple[str, ...] = ()


def compare(saved: Mapping[str, Any], now: Table, fingerprint: str, other_tokenizer: str = "") -> Changes:
    """Compare a job with the job that saved a checkpoint.

    saved: what `Run.rest` gave.  now: the resolved job.  fingerprint: of its samples.  other_tokenizer: a sentence
    where the weights were trained with another one.
    Raises ConfigError: a changed key does not allow to resume; lists all such keys with both values.
    """
    changes = list(differences(filled(saved["config"]), now))
    other_data = saved.get("data", {}).get("fingerprint", fingerprint) != fingerprint
    section = now["checkpoint"]
    differ = "the samples differ from those of the checkpoint"
    refused = [
        f"{_sentence(change)}: the checkpoint is of another model; restore the old value, or set another --run.name"
        for change in changes
        if _in(change, FIXED)
    ]
    if other_data and not section["reset_data"]:
        keys = [_sentence(each) for each in changes if each.key == SEED or (_in(each, DATA) and not _in(each, FREE))]
        why = ", ".join(keys) or f"{'the tokenizer' if other_tokenizer else 'files of the datasets'} changed"
        mend = "set checkpoint.reset_data = true to keep the weights and restart the data"
        refused.append(f"{differ} ({why}); {mend}")
    if other_tokenizer and not section["change_tokenizer"]:
        refused.append(other_tokenizer)
    if refused:
        raise ConfigError([ConfigIssue("", sentence) for sentence in refused])
    changes = [change for change in changes if _takes_effect(change, saved.get("step", 0))]
    meaning = {**dict.fromkeys(_initial(now), NEW_RUNS), **MEANING}
    said = [f"{_sentence(change)}: {meaning.get(change.key, FROM_HERE_ON)}" for change in changes]
    if other_tokenizer:
        said.append(other_tokenizer)
    if other_data:
        said.append(f"{differ}; the data restarts at its first sample")
    # Of techniques and of the optimizer; of these its name alone, where that is another.
    name = f"{Optimizer.section}.name"
    own = name if any(change.key == name for change in changes) else f"{Optimizer.section}."
    updates = [_sentence(change) for change in changes if _in(change, (own, f"{Technique.section}."))]
    return Changes(tuple(said), other_data, tuple(updates))


def _sentence(change: Difference) -> str:
    return f"{change.key} = {_shown(change.now)}, the checkpoint has {_shown(change.before)}"


def _in(change: Difference, keys: tuple[str, ...]) -> bool:
    return any(change.key == key or (key.endswith(".") and change.key.startswith(key)) for key in keys)


def _initial(now: Table) -> Iterator[str]:
    # What only new runs read.
    for path, config in declared_tables(now):
        yield from (".".join(map(str, (*path, each.key))) for each in options_of(config) if each.spec.initial)


def _takes_effect(change: Difference, step: int) -> bool:
    if change.key == "train.steps" and change.now <= step:  # it leaves nothing to do, which the end of the run tells
        return False
    section, _, rest = change.key.partition(".")
    if section == Technique.section:
        name = rest.partition(".")[0]
        technique = registry.find(Technique.kind, name)
        return name != "path" and not getattr(technique, "preserves_numerics", False)
    return not _in(change, (*FREE, *DATA))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "on" if value.get("enabled", True) else "off"
    return "unset" if value is None else repr(value)
