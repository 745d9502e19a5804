"""The JSON Schema of a job, made from the same declarations that parse it."""

import types
import typing
from typing import Any, Literal, Union

from titan.config.groups import WORDS
from titan.config.sections import ONE_OF
from titan.contracts import Dataset, Model, Optimizer, Technique, Tracker
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import REQUIRED, Option, options_of
from titan.contracts.plugin.registry import Plugin
from titan.contracts.sections import SECTIONS

JsonSchema = dict[str, Any]


def schema() -> JsonSchema:
    """The schema of every TOML that `load_job` takes, with the plugins known now."""
    registry.load_plugins()
    axes = [axis for plugin in registry.of_kind(Technique.kind) for axis in getattr(plugin, "axes", ())]
    degrees = {a.name: {"type": "integer", "description": a.doc, "default": a.default} for a in axes}
    properties: JsonSchema = {
        "base": {"type": "string", "description": "file to inherit from; keys of this file override it"},
        **{name: _object(_options(section)) for name, section in SECTIONS.items()},
        **{contract.section: _object(_any_of(contract)) for contract in ONE_OF},
        "mesh": _object(degrees),
        "plugins": {
            **_object({"path": {"type": "array", "items": {"type": "string"}}, **_switchable(Technique.kind)}),
            "additionalProperties": True,
        },
    }
    options = {key: found for key, found in _any_of(Optimizer).items() if key != "name"}
    match = {"description": f"globs of parameters, or any of {', '.join(WORDS)}", "type": ["string", "array"]}
    properties["optimizer"]["properties"]["groups"] = _list_of(_object({"match": match, **options}))
    dataset = _any_of(Dataset)
    entry = _object({**dataset, "weight": {"type": "number", "exclusiveMinimum": 0}})
    properties["data"]["properties"] |= dataset | {"mixture": _list_of(entry)}
    properties["validation"]["properties"] |= dataset
    properties["metrics"]["properties"] |= _switchable(Tracker.kind)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "titan job",
        **_object(properties),
    }


def _object(properties: JsonSchema) -> JsonSchema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _list_of(entry: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": entry}


def _switchable(kind: str) -> JsonSchema:
    switch = {"enabled": {"type": "boolean"}}
    return {plugin.name: _object(_options(plugin.Config) | switch) for plugin in registry.of_kind(kind)}


def _any_of(contract: type[Plugin]) -> JsonSchema:
    """The keys of any of the kind's plugins, since the name may come from a base file."""
    plugins = registry.of_kind(contract.kind)
    merged: JsonSchema = {"name": {"enum": [plugin.name for plugin in plugins]}}
    for plugin in plugins:
        for key, found in _options(plugin.Config).items():
            merged[key] = found if merged.get(key, found) == found else {"description": "depends on name"}
    presets = sorted({preset for plugin in plugins if issubclass(plugin, Model) for preset in plugin.presets})
    return merged | ({"preset": {"enum": presets}} if presets else {})


def _options(config: type) -> JsonSchema:
    return {option.key: _value(option) for option in options_of(config)}


def _value(option: Option) -> JsonSchema:
    spec = option.spec
    found: JsonSchema = {"description": spec.doc + (f" [{spec.unit}]" if spec.unit else ""), **_type(option.hint)}
    keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    bounds = zip(keys, (spec.at_least, spec.above, spec.at_most, spec.below), strict=True)
    found |= {key: bound for key, bound in bounds if bound is not None}
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
