"""Declared options: a TOML table becomes a frozen dataclass, and everything wrong with it is said at once.

Every section of the host and every plugin states its options the same way::

    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float = option(3e-4, "peak learning rate", above=0)
        mode: Literal["full", "every_n"] = option("full", "blocks to recompute")

The declaration is the only place: parsing, bounds, `--help`-like listings and the JSON Schema all come from it.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from titan.errors import ConfigIssue

T = TypeVar("T")
_KEY = "titan.option"

REQUIRED: Any = dataclasses.MISSING
"""Default of an option that the user must give."""


class CliText(str):
    """A value from the command line: its type is the option's to decide, so `--run.name 10` is a name."""


@dataclass(frozen=True)
class Spec:
    """What an option says about itself; see `option`."""

    doc: str
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    path: bool = False
    words: tuple[str, ...] = ()
    initial: bool = False
    over: str = ""


def option(
    default: T,
    doc: str,
    *,
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    path: bool = False,
    words: tuple[str, ...] = (),
    key: str = "",
    initial: bool = False,
    over: str = "",
) -> T:
    """Declare one option of a frozen dataclass.

    Bounds, inclusive for `at_*`, apply to the number, or to each number of a list.
    path: the value is a file, folder or glob, or several, unless it is one of `words`; a resolved job holds them
        absolute.
    key: the name in the TOML where it cannot be the field's (a Python keyword such as `async`).
    initial: only a new run reads the value; a resume, where the checkpoint's state counts, says so under another one.
    over: an option of an optimizer that this one takes the place of for some parameters. A group that states that one
        alone unsets this.
    """
    spec = Spec(doc, unit, at_least, above, at_most, below, path, words, initial, over)
    metadata = {_KEY: spec, "key": key}
    if default is REQUIRED:
        return typing.cast(T, dataclasses.field(metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option as read from its dataclass: TOML key, field, resolved type, default (or REQUIRED) and Spec."""

    key: str
    field: str
    hint: Any
    default: Any
    spec: Spec


def options_of(config: type) -> tuple[Option, ...]:
    """The options a config dataclass declares, in order.

    Raises:
        TypeError: it is not a frozen keyword-only dataclass, a field lacks its `option(...)`, or two have one key.
    """
    return _options_of(config)


@functools.cache  # half of the time in which a job is loaded would go into reading type hints again and again
def _options_of(config: type) -> tuple[Option, ...]:
    params = getattr(config, "__dataclass_params__", None)
    if params is None or not params.frozen or not all(field.kw_only for field in dataclasses.fields(config)):
        raise TypeError(f"{config.__qualname__} must be a @dataclass(frozen=True, kw_only=True)")
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        if _KEY not in field.metadata:
            raise TypeError(f"{config.__qualname__}.{field.name} needs option(default, doc)")
        key = field.metadata["key"] or field.name
        found.append(Option(key, field.name, hints[field.name], field.default, field.metadata[_KEY]))
    if undeclared := set(inspect.get_annotations(config)) - {declared.field for declared in found}:
        raise TypeError(f"{config.__qualname__}: {', '.join(sorted(undeclared))} is annotated but is no field")
    keys = [declared.key for declared in found]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise TypeError(f"{config.__qualname__}: {', '.join(sorted(twice))} is the key of two options")
    return tuple(found)


def keys_of(config: type) -> list[str]:
    """The TOML keys of the options that a config dataclass declares, in order."""
    return [declared.key for declared in options_of(config)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or the names there are when none is near; empty when there are none at all."""
    names = sorted(known)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    if near := difflib.get_close_matches(word, names, n=1, cutoff=0.6 if not longer else 0.8) or longer:
        return f" (did you mean {near[0]!r}?)"
    return f" (known: {', '.join(names)})" if names else ""


def parse(config: type[T], table: Mapping[str, Any], where: "Where") -> tuple[T | None, list[ConfigIssue]]:
    """Build `config` from a TOML table. Returns it, or None with every fault found."""
    declared = {option.key: option for option in options_of(config)}
    known = {*declared, *where.shared}
    faults = [where.fault(key, f"unknown key{did_you_mean(key, known)}") for key in table if key not in declared]
    values: dict[str, Any] = {}
    for key, declaration in declared.items():
        if key not in table:
            if declaration.default is REQUIRED:
                faults.append(where.fault(key, f"missing; required: {declaration.spec.doc}"))
            continue
        try:
            value = coerce(table[key], declaration.hint)
            check_bounds(value, declaration.spec)
            values[declaration.field] = value
        except ValueError as error:
            no_value = "none" if isinstance(table[key], CliText) else "left out"  # TOML has no word for it
            way_out = f", or {no_value}" if type(None) in typing.get_args(declaration.hint) else ""
            faults.append(where.fault(key, f"= {shown(table[key])}: {error}{way_out}"))
    return (None, faults) if faults else (config(**values), [])


@dataclass(frozen=True)
class Where:
    """The place of a table: its name, its file, and where another set a key, key -> file (or the command line).

    shared: keys of the table that are titan's, beside a plugin's; a misspelt key may mean one of them.
    """

    table: str
    source: str = ""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared: Iterable[str] = ()

    def fault(self, key: str, what: str) -> ConfigIssue:
        """A ConfigIssue at `key` of this table."""
        place = f"[{self.table}] {key}".strip() if self.table else key
        return ConfigIssue(self.origin(key), f"{place} {what}" if what.startswith("=") else f"{place}: {what}")

    def origin(self, key: str) -> str:
        """The file, or the command line, that set a key."""
        return self.origins.get(key, self.source)


def shown(value: Any) -> str:
    """A value as the user wrote it, cut to a line."""
    text = str(value) if isinstance(value, CliText) and value else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def coerce(value: Any, hint: Any) -> Any:
    """`value` as `hint`; TOML's types are strict (no 1 for true, no "3" for 3), the command line's follow the hint.

    A ValueError says what would fit.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args)
    takes_text = hint is str or origin is tuple or (origin is Literal and all(isinstance(a, str) for a in args))
    if isinstance(value, CliText) and not takes_text:
        value = from_text(value)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != any(isinstance(a, bool) for a in args):
            near = did_you_mean(value, [str(a) for a in args]) if isinstance(value, str) else ""
            raise ValueError(f"must be one of {', '.join(repr(a) for a in args)}" + (near if "mean" in near else ""))
        return args[args.index(value)]
    if origin is tuple:
        return _coerce_tuple(value, args)
    return _coerce_plain(value, hint)


def _coerce_union(value: Any, args: tuple[Any, ...]) -> Any:
    if type(None) in args and (value is None or (isinstance(value, CliText) and value == "none")):
        return None
    if isinstance(value, CliText) and value.startswith("["):
        value = from_text(value)
    problems = []
    for arg in (arg for arg in args if arg is not type(None)):
        try:
            return coerce(value, arg)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(", or ".join(problems))


def _coerce_tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, CliText):
        words = value.removeprefix("[").removesuffix("]").split(",") if value else []
        value = [CliText(word.strip().strip("'\"")) for word in words]
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list")
    hints = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
    if len(value) != len(hints):
        raise ValueError(f"must be a list of {len(args)}")
    return tuple(coerce(item, hint) for item, hint in zip(value, hints, strict=True))


LARGEST = 2**63 - 1
"""TOML's integers have 64 bits; Python's have no end."""


def _coerce_plain(value: Any, hint: Any) -> Any:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"must be an integer of 64 bits, at most {LARGEST}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint or (hint is str and isinstance(value, CliText)):
        if hint is float and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return str(value) if hint is str else value
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    raise ValueError(f"must be {names.get(hint, getattr(hint, '__name__', str(hint)))}")


def from_text(text: str) -> Any:
    """A command-line word as TOML would read it; a word that is no TOML value is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # ValueError: no TOML, or an integer of thousands of digits
        return str(text)


def check_bounds(value: Any, spec: Spec) -> None:
    """Raise ValueError when a number, or one number of a list, leaves the option's bounds."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if spec.at_least is not None and number < spec.at_least:
            raise ValueError(f"must be at least {spec.at_least}")
        if spec.above is not None and number <= spec.above:
            raise ValueError(f"must be above {spec.above}")
        if spec.at_most is not None and number > spec.at_most:
            raise ValueError(f"must be at most {spec.at_most}")
        if spec.below is not None and number >= spec.below:
            raise ValueError(f"must be below {spec.below}")


def as_table(config: Any) -> dict[str, Any]:
    """A config dataclass as a TOML table: keys in declared order, None left out."""
    return _listed({declared.key: getattr(config, declared.field) for declared in options_of(type(config))})


def resolved_table(config: Any) -> dict[str, Any]:
    """`as_table` with absolute paths, so that it means the same wherever it is read; `~` stays."""
    return _placed(as_table(config), type(config))


def default_table(config: type) -> dict[str, Any]:
    """What `resolved_table` gives of a config dataclass for the options that have a default."""
    defaults = {option.key: option.default for option in options_of(config) if option.default is not REQUIRED}
    return _placed(_listed(defaults), config)


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(one) if isinstance(one, tuple) else one for key, one in values.items() if one is not None}


def _placed(table: dict[str, Any], config: type) -> dict[str, Any]:
    """A table with its paths absolute."""
    for key, words in ((each.key, each.spec.words) for each in options_of(config) if each.spec.path):
        if isinstance(value := table.get(key), list):
            table[key] = [path if path in words else absolute(path) for path in value]
        elif value is not None and value not in words:
            table[key] = absolute(value)
    return table


def absolute(path: str, folder: Path = Path()) -> str:
    """A path, or a glob, from the root on, if it is meant relative to `folder`; an empty one and `~` stay."""
    return path if not path or path.startswith("~") else os.path.abspath(folder / path)
