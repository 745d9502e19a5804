"""Checks plugins against their contracts: a class when it is registered, and what its hooks return.

A class is checked against the contract's own methods and annotated class attributes: a contract that gains an attribute
needs no change here.
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


# --- the class --------------------------------------------------------------------------------------------------


def check_class(plugin: type[Any], contract: type[Any]) -> None:
    """Check a plugin class against its contract.

    Raises:
        PluginError: no name or docstring; a Config that is not a frozen keyword-only dataclass of documented options; a
            public name that the contract does not have, or has with another type or other parameters; or a required
            name that is missing.
    """
    _check_identity(plugin)
    hints = _declared(contract)
    known = {name for name in dir(contract) if not name.startswith("_")} | {"Config", *hints}
    for name in _public_names(plugin, contract):
        found = getattr(plugin, name)
        if name in ("kind", "section") and found != getattr(contract, name):
            raise PluginError(f"{label(plugin)}: {name} = {shown(found)}: the contract sets it; remove the line")
        if name not in known:
            what = f"{name}() is not a hook" if _is_method(found) else f"{name} is not an attribute"
            hint = did_you_mean(name, known)
            raise PluginError(f"{label(plugin)}: {what} of a {contract.kind}{hint}; start the names of helpers with _")
        if name in hints:
            _check_value(plugin, name, found, hints[name])
        elif name != "Config":
            _check_hook(plugin, contract, name, found)
    for name, hint in hints.items():
        if not hasattr(plugin, name):
            raise PluginError(f"{label(plugin)}: missing `{name}`, which must be {_wanted(hint)}")
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"{label(plugin)}: missing {', '.join(missing)}(); define it")


def _check_identity(plugin: type[Any]) -> None:
    place = f"{plugin.__qualname__} in {file_of(plugin)}"
    name = plugin.__dict__.get("name", "")
    if not isinstance(name, str) or not name.isidentifier():
        raise PluginError(f"{place}: name = {name!r}: must be a Python identifier")
    if not (plugin.__doc__ or "").strip():
        raise PluginError(f"{place}: needs a docstring; its first line is what `titan plugins` prints")
    try:
        options_of(plugin.Config)
    except (TypeError, AttributeError) as error:
        raise PluginError(f"{place}: Config: {error}") from None


def _public_names(plugin: type, contract: type) -> list[str]:
    """What the class and its bases below the contract define, in the order of the file."""
    own = [base for base in plugin.__mro__ if base not in contract.__mro__]
    return list(dict.fromkeys(name for base in own for name in vars(base) if not name.startswith("_")))


def _declared(contract: type) -> dict[str, Any]:
    """Types of the class attributes that a contract declares; `Config` is checked on its own."""
    hints = typing.get_type_hints(contract)
    values = {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is ClassVar}
    return {name: hint for name, hint in values.items() if name != "Config"}


def _is_method(found: Any) -> bool:
    return callable(found) and not inspect.isclass(found)


def _check_hook(plugin: type[Any], contract: type[Any], name: str, found: Any) -> None:
    ours = getattr(contract, name)
    if not _is_method(ours):
        if isinstance(ours, (property, cached_property)) and _is_method(found):
            raise PluginError(f"{label(plugin)}: {name}() is a method; it must be a property or a value")
        return
    if not _is_method(found):
        raise PluginError(f"{label(plugin)}: {name} = {shown(found)}: must be a method, {name}({_parameters(ours)})")
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise PluginError(f"{label(plugin)}: {name}() is async; it must be an ordinary method")
    if inspect.isgeneratorfunction(found) and "Itera" not in str(inspect.signature(ours).return_annotation):
        raise PluginError(f"{label(plugin)}: {name}() contains `yield`, so a call runs nothing; it must return")
    kinds = [type(inspect.getattr_static(owner, name)) for owner in (plugin, contract)]
    if kinds[0] in (staticmethod, classmethod) and kinds[0] is not kinds[1]:
        raise PluginError(f"{label(plugin)}: {name}() is a {kinds[0].__name__}; it must be a method that takes self")
    if _parameters(found) != _parameters(ours):
        raise PluginError(
            f"{label(plugin)}: {name}({_parameters(found)}): its parameters must be ({_parameters(ours)})"
        )


def _parameters(method: Any) -> str:
    return ", ".join(inspect.signature(method).parameters)


def _check_value(plugin: type[Any], name: str, found: Any, hint: Any) -> None:
    try:
        _fit(found, hint)
    except ValueError as error:
        raise PluginError(f"{label(plugin)}: {name} = {shown(found)}: {error}") from None


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
    if origin is Sequence:
        return f"a tuple or list of {_name(args[0])}"
    if origin is Mapping:
        return f"a dictionary of {_name(args[0])} to {_name(args[1])}"
    return f"of type {_name(hint)}"


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else _wanted(hint)


# --- techniques beside each other -----------------------------------------------------------------------------------


def technique_clashes(plugin: type[Any], others: Sequence[type[Any]], all_known: bool) -> Iterator[str]:
    """Sentences about a technique among the `others`, those registered before it first; each names the plugin.

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
    yield from _misfolded(plugin, {axis.name: axis for other in (plugin, *others) for axis in other.axes})
    names = {other.name for other in others}
    provided = names | {capability for other in others for capability in other.provides}
    axes = {axis.name for other in others for axis in other.axes}
    for attribute, known, what in (
        ("conflicts", provided, "technique or capability"), ("requires", provided, "technique or capability"),
        ("covers", axes, "axis"),
    ):  # fmt: skip
        for name in getattr(plugin, attribute):
            if name not in known:
                yield f"{label(plugin)}: {attribute}: no plugin has the {what} {name!r}{did_you_mean(name, known)}"


def _misfolded(plugin: type[Any], axes: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about the axes that those of a technique fold; axes: those of all plugins, by name."""
    for axis in plugin.axes:
        for name in axis.folds:
            what = f"{label(plugin)}: mesh axis {axis.name!r}: folds"
            if name not in axes:
                yield f"{what}: no plugin has the axis {name!r}{did_you_mean(name, axes)}"
            elif axes[name].folds:
                yield f"{what} {name!r}, which folds other axes itself; name these"
            elif axes[name].weights != "copies":
                yield f'{what} {name!r}, whose ranks hold "{axes[name].weights}"; they must hold "copies"'


# --- what hooks return ------------------------------------------------------------------------------------------


def made(plugin: type[T], config: Any) -> T:
    """A plugin instance with these options.

    Raises:
        PluginError: `__init__` failed or did not call the contract's; names the plugin.
    """
    with _asked(plugin, "__init__"):
        instance: Any = plugin(config)  # type: ignore[call-arg]
    if not hasattr(instance, "config"):
        raise PluginError(f"{label(plugin)}: __init__() must call super().__init__(config)")
    return cast(T, instance)


def answer(plugin: Any, hook: str, wanted: type[T], *args: Any) -> T:
    """What a plugin's hook returns, checked to be of type `wanted`.

    Raises:
        PluginError: it is of another type, or the hook failed; names the plugin and the hook.
    """
    with _asked(type(plugin), hook):
        found = getattr(plugin, hook)(*args)
    if not isinstance(found, wanted):
        said = "None" if found is None else f"{shown(found)}, of type {type(found).__name__}"
        raise PluginError(f"{label(type(plugin))}: {hook}() returned {said}; it must return a {wanted.__name__}")
    return found


def sentences(plugin: Any, hook: str, *args: Any) -> list[str]:
    """The sentences that a plugin's hook returns.

    Raises:
        PluginError: it returns no iterable of strings, or failed; names the plugin and the hook.
    """
    with _asked(type(plugin), hook):
        found = getattr(plugin, hook)(*args)
        said = found if isinstance(found, str) or not isinstance(found, Iterable) else list(found)
    if not isinstance(said, list):
        what = "None" if said is None else f"{shown(said)}, of type {type(said).__name__}"
        wanted = 'an iterable of sentences, as in ["dim 30 does not divide by 4"]'
        raise PluginError(f"{label(type(plugin))}: {hook}() returned {what}; it must return {wanted}")
    for sentence in said:
        if not isinstance(sentence, str):
            what = f"{shown(sentence)}, of type {type(sentence).__name__}"
            raise PluginError(f"{label(type(plugin))}: {hook}() returned {what}; all its sentences must be strings")
    return said


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
