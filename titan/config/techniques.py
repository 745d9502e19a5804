"""Which techniques are enabled, and whether they are compatible."""

from collections.abc import Iterable, Mapping, Sequence

from titan.contracts import Technique
from titan.contracts.base.layout import Layout
from titan.contracts.plugin.registry import lacking
from titan.contracts.technique import SUMMED_GRADIENTS


def chosen_techniques(
    known: Sequence[type[Technique]], stated: Mapping[str, bool], layout: Layout
) -> list[type[Technique]]:
    """The enabled techniques: those with a table, those with an axis above 1 that no other covers, and the default
    providers of capabilities that these require and none of them provides.

    stated: technique name -> enabled, by the tables of the TOML, in order. They come first, then the others by name.
    """
    by_name = {plugin.name: plugin for plugin in known}
    on = [by_name[name] for name, enabled in stated.items() if enabled]
    by_axis = [p for p in known if p.name not in stated and any(layout.degree(axis.name) > 1 for axis in p.axes)]
    covered = {axis for plugin in (*on, *by_axis) for axis in plugin.covers}
    on += [p for p in by_axis if any(layout.degree(a.name) > 1 and a.name not in covered for a in p.axes)]
    for capability in dict.fromkeys(capability for plugin in on for capability in _required(plugin)):
        if not any(capability in (p.name, *p.provides) for p in on):
            willing = [p for p in known if p.default and capability in p.provides and stated.get(p.name, True)]
            on += willing[:1]
    return on


def unattended(
    known: Iterable[type[Technique]], on: Iterable[type[Technique]], layout: Layout
) -> list[tuple[str, str]]:
    """(axis, sentence) for each axis above 1 that no enabled technique owns or covers."""
    attended = {name for plugin in on for name in (*plugin.covers, *(axis.name for axis in plugin.axes))}
    return [
        (axis.name, f"= {layout.degree(axis.name)}: needs [plugins.{plugin.name}], which has enabled = false")
        for plugin in known
        for axis in plugin.axes
        if layout.degree(axis.name) > 1 and axis.name not in attended
    ]


def _required(plugin: type[Technique] | Technique) -> list[str]:
    """Capabilities that a technique requires: those that it says, and one that an axis of its own implies."""
    slices = any(axis.data == "sliced" for axis in plugin.axes)
    return list(dict.fromkeys((*plugin.requires, *([SUMMED_GRADIENTS] if slices else ()))))


def agree(techniques: Iterable[Technique]) -> list[str]:
    """A sentence for each pair of conflicting techniques and each missing requirement."""
    on = {technique.name: technique for technique in techniques}
    provided = {capability for technique in on.values() for capability in technique.provides} | set(on)
    clashes = {  # by pair, as both may say so
        frozenset((name, other)): f"[plugins.{name}] and [plugins.{other}] cannot be enabled together: {why}"
        for name, technique in on.items()
        for against, why in technique.conflicts.items()
        for other, that in on.items()
        if other != name and against in (other, *that.provides)
    }
    sentences = list(clashes.values())
    sentences += [
        f"[plugins.{name}] {lacking(capability)}"
        for name, technique in on.items()
        for capability in _required(technique)
        if capability not in provided
    ]
    owners = [name for name, technique in on.items() if type(technique).split is not Technique.split]
    if len(owners) > 1:
        sentences.append(f"only one technique may define split(), but these do: {', '.join(owners)}")
    return sentences
