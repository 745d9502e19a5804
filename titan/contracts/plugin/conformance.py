"""Checks plugins against their contracts: a class when it is registered, and what its hooks return.

What a contract demands are its own methods and annotated class attributes.
"""

import inspect
import traceback
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar, cast

from titan.contracts.plugin.options import coerce, did_you_mean, options_of, shown
from titan.errors import PluginError, TitanError

T = TypeVar("T")


def file_of(plugin: type) -> str:
    """The file a plugin class is written in."""
    return inspect.getsourcefile(plugin) or plugin.__module__


def label(plugin: type[Any]) -> str:
    """`technique 'x' in FILE`: how messages name a plugin class."""
    return f"{plugin.kind} {plugin.name!r} in {file_of(plugin)}"


def check_class(plugin: type[Any], contract: type[Any]) -> None:
    """Check a plugin class against its contract.

    Raises:
        PluginError: no name or docstring; a Config without documented options; a public name that the contract does not
            have, or has with another type or other parameters; or a required name that is missing.
    """
    place = f"{plugin.__qualname__} in {file_of(plugin)}"
    own_name = plugin.__dict__.get("name", "")
    if not isinstance(own_name, str) or not own_name.isidentifier():
        raise PluginError(f"{place}: name = {own_name!r}: must be a Python identifier")
    if not (plugin.__doc__ or "").strip():
        raise PluginError(f"{place}: needs a docstring; its first line is what `titan plugins` prints")
    try:
        options_of(plugin.Config)
    except (TypeError, AttributeError) as error:
        raise PluginError(f"{place}: Config: {error}") from None
    if fault := next(_faults(plugin, contract), ""):
        raise PluginError(f"{label(plugin)}: {fault}")


def _faults(plugin: type[Any], contract: type[Any]) -> Iterator[str]:
    declared = typing.get_type_hints(contract).items()
    facts = ((name, hint) for name, hint in declared if typing.get_origin(hint) is ClassVar and name != "Config")
    hints = {name: typing.get_args(hint)[0] for name, hint in facts}
    known = {name for name in dir(contract) if not name.startswith("_")} | {"Config", *hints}
    bases = [base for base in plugin.__mro__ if base not in contract.__mro__]
    for name in dict.fromkeys(name for base in bases for name in vars(base) if not name.startswith("_")):
        found = getattr(plugin, name)
        if name in ("kind", "section") and found != getattr(contract, name):
            yield f"{name} = {shown(found)}: the contract sets it; remove the line"
        elif name not in known:
            what = f"{name}() is not a hook" if _is_method(found) else f"{name} is not an attribute"
            hint = did_you_mean(name, known)
            yield f"{what} of a {contract.kind}{hint}; start the names of helpers with _"
        elif name in hints:
            try:
                _fit(found, hints[name])
            except ValueError as error:
                yield f"{name} = {shown(found)}: {error}"
        elif name != "Config":
            yield from _hook_faults(plugin, contract, name)
    for name, hint in hints.items():
        if not hasattr(plugin, name):
            yield f"missing `{name}`, which must be {_wanted(hint)}"
    if missing := sorted(getattr(plugin, "__abstractmethods__", ())):
        yield f"missing {', '.join(missing)}(); define it"


def _is_method(found: Any) -> bool:
    return callable(found) and not inspect.isclass(found)


def _hook_faults(plugin: type[Any], contract: type[Any], name: str) -> Iterator[str]:
    found, ours = getattr(plugin, name), getattr(contract, name)
    if not _is_method(ours):
        if isinstance(ours, (property, cached_property)) and _is_method(found):
            yield f"{name}() is a method; it must be a property or a value"
        return
    signature = inspect.signature(ours)
    wanted = ", ".join(signature.parameters)
    if not _is_method(found):
        yield f"{name} = {shown(found)}: must be a method, {name}({wanted})"
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        yield f"{name}() is async; it must be an ordinary method"
    if inspect.isgeneratorfunction(found) and "Itera" not in str(signature.return_annotation):
        yield f"{name}() contains `yield`, so a call runs nothing; it must return"
    kinds = [type(inspect.getattr_static(owner, name)) for owner in (plugin, contract)]
    if kinds[0] in (staticmethod, classmethod) and kinds[0] is not kinds[1]:
        yield f"{name}() is a {kinds[0].__name__}; it must be a method that takes self"
    if (given := ", ".join(inspect.signature(found).parameters)) != wanted:
        yield f"{name}({given}): its parameters must be ({wanted})"


def _fit(value: Any, hint: Any) -> None:
    """Raise ValueError where a value is not of a declared type; the message says what is."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin is not None and origin is not Literal:
        if not isinstance(value, origin) or isinstance(value, str):
            raise ValueError(f"must be {_wanted(hint)}")
        columns = (value.keys(), value.values()) if isinstance(value, Mapping) else (value,)
        for column, inner in zip(columns, args, strict=True):
            for item in column:
                _fit(item, inner)
    elif hint in (bool, int, float, str) or origin is Literal:
        coerce(value, hint)
    elif not isinstance(value, hint):
        raise ValueError(f"must be {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    """A declared type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    names = [_wanted(each).removeprefix("of type ") for each in args]
    if origin is Sequence:
        return f"a tuple or list of {names[0]}"
    if origin is Mapping:
        return f"a dictionary of {names[0]} to {names[1]}"
    return f"of type {getattr(hint, '__name__', str(hint))}"


def technique_clashes(plugin: type[Any], others: Sequence[type[Any]], all_known: bool) -> Iterator[str]:
    """Sentences about a technique among the `others`, those registered before it first.

    all_known: every plugin was loaded, so a name that no plugin has is a mistake.
    """
    earlier = others[: others.index(plugin)] if plugin in others else others
    owners = {axis.name: other for other in earlier for axis in other.axes}
    for axis in plugin.axes:
        if axis.name in owners:
            owner = label(owners[axis.name])
            yield f"{label(plugin)}: mesh axis {axis.name!r} is already owned by {owner}; rename the axis"
        owners[axis.name] = plugin
    contract = next(base for base in plugin.__mro__[1:] if "kind" in vars(base))
    splits, applies = (getattr(plugin, hook) is not getattr(contract, hook) for hook in ("split", "apply"))
    if splits != (plugin.phase == "split") or (splits and applies):
        rule = "split() is called in phase 'split' alone, which needs it, and apply() in the others"
        yield f"{label(plugin)}: phase = {plugin.phase!r}: {rule}"
    if not all_known:
        return
    axes = {axis.name: axis for other in (plugin, *others) for axis in other.axes}
    for axis, name in ((folding, name) for folding in plugin.axes for name in folding.folds):
        what = f"{label(plugin)}: mesh axis {axis.name!r}: folds"
        if name not in axes:
            yield f"{what}: no plugin has the axis {name!r}{did_you_mean(name, axes)}"
        elif axes[name].folds:
            yield f"{what} {name!r}, which folds other axes itself; name these"
        elif axes[name].weights != "copies":
            yield f'{what} {name!r}, whose ranks hold "{axes[name].weights}"; they must hold "copies"'
    provided = {name for other in others for name in (other.name, *other.provides)}
    for attribute in ("conflicts", "requires", "covers"):
        known, what = (axes, "axis") if attribute == "covers" else (provided, "technique or capability")
        for name in getattr(plugin, attribute):
            if name not in known:
                yield f"{label(plugin)}: {attribute}: no plugin has the {what} {name!r}{did_you_mean(name, known)}"


def made(plugin: type[T], config: Any) -> T:
    """A plugin instance with these options; a PluginError where `__init__` fails or does not call the contract's."""
    with _asked(plugin, "__init__"):
        instance: Any = plugin(config)  # type: ignore[call-arg]
    if not hasattr(instance, "config"):
        raise PluginError(f"{label(plugin)}: __init__() must call super().__init__(config)")
    return cast(T, instance)


def answer(plugin: Any, hook: str, wanted: type[T], *args: Any) -> T:
    """What a plugin's hook returns; a PluginError where the hook fails, or returns no `wanted`."""
    with _asked(type(plugin), hook):
        found = getattr(plugin, hook)(*args)
    if not isinstance(found, wanted):
        raise _misreturned(plugin, hook, found, f"it must return a {wanted.__name__}")
    return found


def sentences(plugin: Any, hook: str, *args: Any) -> list[str]:
    """The sentences that a plugin's hook returns; a PluginError where it fails, or returns no iterable of strings."""
    with _asked(type(plugin), hook):
        found = getattr(plugin, hook)(*args)
        listed = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else None
    if listed is None:
        rule = 'it must return an iterable of sentences, as in ["dim 30 does not divide by 4"]'
        raise _misreturned(plugin, hook, found, rule)
    for sentence in listed:
        if not isinstance(sentence, str):
            raise _misreturned(plugin, hook, sentence, "all its sentences must be strings")
    return listed


def _misreturned(plugin: Any, hook: str, value: Any, rule: str) -> PluginError:
    what = "None" if value is None else f"{shown(value)}, of type {type(value).__name__}"
    return PluginError(f"{label(type(plugin))}: {hook}() returned {what}; {rule}")


@contextmanager
def _asked(plugin: type, hook: str) -> Iterator[None]:
    """Name the plugin, its hook and the line where the hook fails."""
    try:
        yield
    except TitanError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}, at {last.filename}:{last.lineno}"
        raise PluginError(f"{label(plugin)}: {hook}() raised {what} (add --traceback for the whole stack)") from error
