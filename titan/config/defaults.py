"""A saved job with the defaults of what it lacks.

An option that is new has a default under which a run does what it did before there was the option, so a job that lacks
it is the job with the default. The same goes for a section and for the options of a plugin.
"""

from collections.abc import Mapping
from typing import Any

from titan.config.sections import ONE_OF, SECTIONS
from titan.contracts import Dataset, Technique
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import default_table
from titan.contracts.plugin.registry import Plugin


def filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with every key that has a default and is not in it. What is unknown here stays as it is.

    A technique that the table lacks was not there, and is not added; a tracker or an axis likewise.
    """
    found = dict(table)
    for name, section in SECTIONS.items():
        found[name] = _over(default_table(section), found.get(name))
    for contract in ONE_OF:
        found[contract.section] = _with_plugin(found.get(contract.section), contract)
    if isinstance(found["data"], dict) and isinstance(mixture := found["data"].get("mixture"), list):
        found["data"]["mixture"] = [_with_plugin(entry, Dataset) for entry in mixture]
    else:
        found["data"] = _with_plugin(found["data"], Dataset)
    if isinstance(found["validation"], dict) and "name" in found["validation"]:
        found["validation"] = _with_plugin(found["validation"], Dataset)
    if isinstance(techniques := found.get("plugins"), Mapping):
        found["plugins"] = {name: _technique(str(name), values) for name, values in techniques.items()}
    return found


def _over(defaults: Mapping[str, Any], values: Any) -> Any:
    if values is None:
        return dict(defaults)
    return {**defaults, **values} if isinstance(values, Mapping) else values


def _with_plugin(values: Any, contract: type[Plugin]) -> Any:
    """A table with the defaults of the plugin that its `name` picks, or of its kind's default."""
    if values is not None and not isinstance(values, Mapping):
        return values
    name = (values or {}).get("name")
    plugin = registry.default_of(contract.kind) if name is None else registry.find(contract.kind, str(name))
    if plugin is None:
        return values or {}
    return _over({"name": plugin.name, **default_table(plugin.Config)}, values)


def _technique(name: str, values: Any) -> Any:
    plugin = registry.find(Technique.kind, name)
    return values if plugin is None else _over({"enabled": True, **default_table(plugin.Config)}, values)
