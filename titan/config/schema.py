"""The JSON Schema of a job, made from the same declarations that parse it."""

import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, Union

from titan.config.groups import WORDS
from titan.config.sections import ONE_OF, SECTIONS
from titan.contracts import Dataset, Model, Optimizer, Technique, Tracker
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import REQUIRED, Option, options_of
from titan.contracts.plugin.registry import Plugin

JsonSchema = dict[str, Any]


def schema() -> JsonSchema:
    """The schema of every TOML that `load_job` takes, with the plugins known now."""
    registry.load_plugins()
    properties: JsonSchema = {
        "base": {"type": "string", "description": "file to inherit from; keys of this file override it"}
    }
    properties |= {name: _table(options_of(section)) for name, section in SECTIONS.items()}
    properties |= {contract.section: _one_of(contract) for contract in ONE_OF}
    properties["optimizer"]["properties"]["groups"] = _groups()
    properties["data"] = _data()
    properties["validation"]["properties"] |= _one_of(Dataset)["properties"]
    techniques = [plugin for plugin in registry.of_kind(Technique.kind) if issubclass(plugin, Technique)]
    axes = {axis.name: axis for plugin in techniques for axis in plugin.axes}
    properties["mesh"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {a.name: {"type": "integer", "description": a.doc, "default": a.default} for a in axes.values()},
    }
    properties["plugins"] = {
        "type": "object",
        "additionalProperties": True,
        "properties": {"path": {"type": "array", "items": {"type": "string"}}, **_switchable(techniques)},
    }
    properties["metrics"]["properties"] |= _switchable(registry.of_kind(Tracker.kind))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "titan job",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _switchable(plugins: Iterable[type[Plugin]]) -> JsonSchema:
    found = {}
    for plugin in plugins:
        found[plugin.name] = _table(options_of(plugin.Config))
        found[plugin.name]["properties"]["enabled"] = {"type": "boolean"}
    return found


def _one_of(contract: type[Plugin]) -> JsonSchema:
    """Any of the kind's plugins: the union of their keys, since the name may come from a base file."""
    plugins = registry.of_kind(contract.kind)
    merged: JsonSchema = {"name": {"enum": [plugin.name for plugin in plugins]}}
    for plugin in plugins:
        for key, found in _table(options_of(plugin.Config))["properties"].items():
            merged[key] = found if merged.get(key, found) == found else {"description": "depends on name"}
    presets = sorted({preset for plugin in plugins if issubclass(plugin, Model) for preset in plugin.presets})
    if presets:
        merged["preset"] = {"enum": presets}
    return {"type": "object", "additionalProperties": False, "properties": merged}


def _groups() -> JsonSchema:
    """Groups of parameters: `match`, and the options of an optimizer."""
    options = {key: found for key, found in _one_of(Optimizer)["properties"].items() if key != "name"}
    match = {"description": f"globs of parameters, or any of {', '.join(WORDS)}", "type": ["string", "array"]}
    entry = {"type": "object", "additionalProperties": False, "properties": {"match": match, **options}}
    return {"type": "array", "items": entry}


def _data() -> JsonSchema:
    source = _one_of(Dataset)
    entry = {**source, "properties": {**source["properties"], "weight": {"type": "number", "exclusiveMinimum": 0}}}
    host = _table(options_of(SECTIONS["data"]))
    host["properties"] |= source["properties"] | {"mixture": {"type": "array", "items": entry}}
    return host


def _table(options: Iterable[Option]) -> JsonSchema:
    return {"type": "object", "additionalProperties": False, "properties": {o.key: _value(o) for o in options}}


def _value(option: Option) -> JsonSchema:
    spec = option.spec
    found: JsonSchema = {"description": spec.doc + (f" [{spec.unit}]" if spec.unit else ""), **_type(option.hint)}
    bounds = {
        "minimum": spec.at_least,
        "exclusiveMinimum": spec.above,
        "maximum": spec.at_most,
        "exclusiveMaximum": spec.below,
    }
    found |= {key: bound for key, bound in bounds.items() if bound is not None}
    if option.default is not REQUIRED and option.default is not None:
        found["default"] = list(option.default) if isinstance(option.default, tuple) else option.default
    return found


def _type(hint: Any) -> JsonSchema:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        kinds = [_type(arg) for arg in args if arg is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is tuple:
        return {"type": "array", "items": _type(args[0])}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}
