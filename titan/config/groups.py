"""`[[optimizer.groups]]`: parameters that the run's optimizer treats by options of their own.

Each group is the same plugin, of whatever name, with its options merged over those of `[optimizer]`; what each builds
is joined into one optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from titan.contracts import Costs, Job, Model, ModelSpec, Optimizer
from titan.contracts.base.spec import ParameterKind, glob_matches
from titan.contracts.objective import NamedParameter
from titan.contracts.optimizers import joined
from titan.contracts.plugin.conformance import made, sentences
from titan.contracts.plugin.options import (
    CliText,
    Where,
    as_table,
    coerce,
    did_you_mean,
    from_text,
    options_of,
    parse,
    resolved_table,
    shown,
)
from titan.errors import ConfigIssue

Word = Literal["matrix", "table", "head", "vector", "expert"]
WORDS: tuple[Word, ...] = get_args(Word)
"""What `match` may name besides globs: a `ParameterKind`, in which "matrix" leaves stacks of weights to "expert"."""


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own.

    match: words and globs, of which any may fit.  optimizer: with the group's options.  stated: its resolved table.
    """

    match: tuple[str, ...]
    optimizer: Optimizer
    stated: Mapping[str, Any]

    def takes(self, name: str, kind: ParameterKind, ndim: int) -> bool:
        """Whether a parameter belongs to the group."""
        what = word_of(kind, ndim)
        return any(what == word if word in WORDS else glob_matches(word, name) for word in self.match)

    @property
    def decays(self) -> bool:
        """Whether the group states a weight decay, which then all of its parameters have, norms and embeddings too."""
        over = {each.key for each in options_of(type(self.optimizer.config)) if each.spec.over == "weight_decay"}
        return bool(self.stated.keys() & {"weight_decay", *over})

    def __str__(self) -> str:
        return f"match = {shown(self.match[0] if len(self.match) == 1 else list(self.match))}"


def listed(optimizer: Optimizer) -> list[str]:
    """A line for each group of an optimizer, with its options."""
    if not isinstance(optimizer, GroupedOptimizer):
        return []
    own = [", ".join(f"{k} = {v}" for k, v in group.stated.items() if k != "match") for group in optimizer.groups]
    return [f"optimizer group {group}: {o or 'as the rest'}" for group, o in zip(optimizer.groups, own, strict=True)]


def word_of(kind: ParameterKind, ndim: int) -> Word:
    """The word by which `match` names a parameter of this kind and number of dimensions."""
    return "expert" if kind == "matrix" and ndim > 2 else kind


class GroupedOptimizer(Optimizer):
    """An optimizer whose groups have options of their own; `rest` updates what is in none."""

    def __init__(self, rest: Optimizer, groups: Sequence[Group]) -> None:
        super().__init__(rest.config)
        self.rest, self.groups = rest, tuple(groups)

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """What the plugin builds of each group that this rank has parameters of, as one."""
        return joined([plugin.build(members) for plugin, _, members in self._dealt(parameters) if members])

    def cost(self, costs: Costs, job: Job) -> Costs:
        """That of `[optimizer]`: the same optimizer updates every group."""
        return self.rest.cost(costs, job)

    def check(self, job: Job) -> Iterator[str]:
        """What the plugin says under the options of `[optimizer]`, and under those of each group; each once."""
        plugins = (self.rest, *(group.optimizer for group in self.groups))
        yield from dict.fromkeys(sentence for plugin in plugins for sentence in plugin.check(job))

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """A line for each group that this rank has parameters of, and one for the rest."""
        lines = []
        for plugin, group, members in self._dealt(parameters):
            if members:
                count = f"{f'group {group}, ' if group else ''}{len(members)} tensors"
                lines.append(": ".join(filter(None, (count, plugin.describe(members)))))
        return "\n  ".join(lines)

    def misfits(self, model: Model, spec: ModelSpec) -> Iterator[tuple[int, str]]:
        """(number of a group, what is wrong with its match) for this model; builds it on the meta device."""
        with torch.device("meta"):
            parameters = [(name, p.ndim) for name, p in model.build().named_parameters()]
        kinds = {name: (spec.parameter(name, ndim).kind, ndim) for name, ndim in parameters}
        owners: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            for word in group.match:
                if not any(replace(group, match=(word,)).takes(name, *kind) for name, kind in kinds.items()):
                    yield number, f"{word!r} matches no parameter{_nearest(word, kinds)}"
            mine = [name for name, kind in kinds.items() if group.takes(name, *kind)]
            if twice := next((name for name in mine if name in owners), ""):
                other = self.groups[owners[twice]]
                yield number, f"{twice} is also in the group with {other}; a parameter may be in one group"
            owners |= dict.fromkeys(mine, number)

    def _dealt(
        self, parameters: Sequence[NamedParameter]
    ) -> Iterator[tuple[Optimizer, Group | None, list[NamedParameter]]]:
        """(plugin, group, its parameters) of each group, and first of the rest."""
        members: list[list[NamedParameter]] = [[] for _ in range(1 + len(self.groups))]
        for p in parameters:
            takers = (i for i, group in enumerate(self.groups, 1) if group.takes(p.name, p.kind, p.parameter.ndim))
            members[next(takers, 0)].append(p)
        yield self.rest, None, members[0]
        for group, own in zip(self.groups, members[1:], strict=True):
            yield group.optimizer, group, [replace(p, decays=True) for p in own] if group.decays else own


def _nearest(word: str, kinds: Mapping[str, tuple[ParameterKind, int]]) -> str:
    words = {word_of(*kind) for kind in kinds.values()}
    if word in WORDS:
        return f": the model has none of that kind, only {', '.join(map(repr, sorted(words)))}"
    globs = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in kinds}
    return did_you_mean(word, globs | words)


def grouped(
    plugin: Any, given: Any, where: Callable[..., Where], faults: list[ConfigIssue], resolved: dict[str, Any]
) -> Any:
    """An optimizer with the groups of a TOML, if there are any. Adds to `faults` and to `resolved`."""
    entries = from_text(given) if isinstance(given, CliText) else given
    if entries in (None, []) or plugin is None:
        return plugin
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        what = "must be a list of tables, [[optimizer.groups]]"
        if isinstance(given, CliText) and entries == given:
            what = f"= {shown(given)}: is not TOML; write it as [{{match = 'head', lr = 1e-3}}]"
        faults.append(where(Optimizer.section).fault("groups", what))
        return plugin
    groups = [_group(plugin, entry, _place(where, number), faults) for number, entry in enumerate(entries)]
    found = [group for group in groups if group is not None]
    if found:
        resolved[Optimizer.section]["groups"] = [dict(group.stated) for group in found]
    own = {name: getattr(plugin, name) for name in ("name", "separable", "takes_grad_scale", "rounds", "Config")}
    return type(type(plugin).__name__, (GroupedOptimizer,), own)(plugin, found)


def check(optimizer: Optimizer, job: Job, where: Callable[..., Where]) -> list[ConfigIssue]:
    """What an optimizer says of the job, and which of its groups do not fit the model."""
    found = [where(Optimizer.section).fault("", sentence) for sentence in sentences(optimizer, "check", job)]
    if isinstance(optimizer, GroupedOptimizer):
        misfits = optimizer.misfits(job.model, job.spec)
        found += [_place(where, number).fault("match", what) for number, what in misfits]
    return found


def _place(where: Callable[..., Where], number: int) -> Where:
    source = where(Optimizer.section).origin("groups")  # of all of them: they are replaced at once
    return replace(where(f"{Optimizer.section}.groups.{number}"), source=source, shared=("match",))


def _group(plugin: Optimizer, entry: Mapping[str, Any], where: Where, faults: list[ConfigIssue]) -> Group | None:
    """A group from its table, with the options of `[optimizer]` where it states none."""
    own = {key: value for key, value in entry.items() if key != "match"}
    below = as_table(plugin.config)
    for each in options_of(type(plugin).Config):
        if each.spec.over in own:
            below.pop(each.key, None)
    config, found = parse(type(plugin).Config, {**below, **own}, where)
    value, match = entry.get("match", []), ()
    try:
        match = coerce([value] if isinstance(value, str) else value, tuple[str, ...])
        if not match:
            known = ", ".join(map(repr, WORDS))
            found.append(where.fault("match", f"missing; name parameters by a glob, or by one of {known}"))
    except ValueError as error:
        found.append(where.fault("match", f"= {shown(value)}: {error} of strings, or a string"))
    faults += found
    if config is None or not match:
        return None
    stated = {key: value for key, value in resolved_table(config).items() if key in own}
    return Group(match, made(type(plugin), config), {"match": entry["match"], **stated})
