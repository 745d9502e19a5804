"""A saved job with the defaults of what it lacks: under the default of a new option, a run does what it did before."""

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
        plugins = {name: registry.find(Technique.kind, str(name)) for name in techniques}
        defaults = {name: {"enabled": True, **default_table(p.Config)} for name, p in plugins.items() if p}
        found["plugins"] = {k: _over(defaults[k], v) if k in defaults else v for k, v in techniques.items()}
    return found


def _over(defaults: Mapping[str, Any], values: Any) -> Any:
    return {**defaults, **(values or {})} if values is None or isinstance(values, Mapping) else values


def _with_plugin(values: Any, contract: type[Plugin]) -> Any:
    name = values.get("name") if isinstance(values, Mapping) else None
    plugin = registry.chosen(contract.kind, name)
    return _over({"name": plugin.name, **default_table(plugin.Config)} if plugin else {}, values)
