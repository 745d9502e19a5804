"""The registry: kinds of plugins, their names, and the three places they are loaded from.

A contract (`titan/contracts/`) is a subclass of `Plugin` that sets `kind`. A plugin is a subclass of a contract that
sets `name` and `Config` and carries `@register`. It may define the public names of its contract and no others.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from titan.contracts.plugin.conformance import check_class, file_of, technique_clashes
from titan.contracts.plugin.options import did_you_mean
from titan.errors import PluginError
from titan.paths import expanded
from titan.terminal import warn

ENTRY_POINTS = "titan.plugins"
BUILT_IN = "titan.plugins"


class Plugin:
    """Base of every contract.

    kind, section: kind of plugin and its TOML table, set by the contract.
    name: name of the plugin in a TOML.  Config: its options, a frozen keyword-only dataclass of `option(...)` fields.
    default: the plugin is used (a technique: is on) when the TOML names none.
    """

    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""
    name: ClassVar[str] = ""
    Config: ClassVar[type]
    default: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config


P = TypeVar("P", bound=type[Plugin])

Key = tuple[str, str]
"""Kind and name of a plugin."""

plugins: dict[Key, type[Plugin]] = {}
"""Every registered plugin of this process."""

opened: set[str] = set()
"""Where plugins have been loaded from, each once: `BUILT_IN`, files, and `ENTRY_POINTS` with a colon."""

_brought_by: dict[Key, str] = {}  # plugin -> the entry point that brought it
_left_out: dict[str, str] = {}  # entry point that failed -> why
_contested: dict[Key, str] = {}  # name that an entry point has claimed too -> who else has it


class NameTakenError(PluginError):
    """Two plugins have the same name; `key` is the kind and the name."""

    def __init__(self, message: str, key: Key) -> None:
        super().__init__(message)
        self.key = key


def register(plugin: P) -> P:
    """Class decorator: register a plugin; a PluginError where its name is taken, or it breaks its contract."""
    if not isinstance(plugin, type):
        raise PluginError(f"{file_of(plugin)}: @register decorates a class, but found {plugin!r}")
    place = f"{plugin.__qualname__} in {file_of(plugin)}"
    contract = next((base for base in plugin.__mro__[1:] if base.__dict__.get("kind")), None)
    if contract is None:
        raise PluginError(f"{place} must subclass a contract of titan.contracts, such as Technique")
    check_class(plugin, contract)
    key = (plugin.kind, plugin.name)
    owner = plugins.get(key)
    # One file imported under two module names registers the same plugin again.
    if owner is not None and (file_of(owner) != file_of(plugin) or owner.__module__ == plugin.__module__):
        both = f"{owner.__qualname__} in {file_of(owner)} and {place}"
        raise NameTakenError(f"two plugins are called {plugin.kind} {plugin.name!r}: {both}; rename one of them", key)
    plugins[key] = plugin
    return plugin


def find(kind: str, name: str) -> type[Plugin] | None:
    """The plugin of this kind and name, or None."""
    return plugins.get((kind, name))


def every() -> list[type[Plugin]]:
    """All registered plugins, by kind and name."""
    return [plugins[key] for key in sorted(plugins)]


def of_kind(kind: str) -> list[type[Plugin]]:
    """All registered plugins of a kind, by name."""
    return [plugin for plugin in every() if plugin.kind == kind]


def lacking(capability: str) -> str:
    """What is said where no enabled technique provides a capability: which to enable."""
    having = [p.name for p in of_kind("technique") if capability in (p.name, *getattr(p, "provides", ()))]
    enable = " or ".join(f"[plugins.{name}]" for name in having) or "a plugin that does"
    return f"requires {capability}, which no enabled technique provides; enable {enable}"


def chosen(kind: str, name: Any) -> type[Plugin] | None:
    """The plugin of this name, or the kind's default where a TOML names none; None where there is none."""
    return next((plugin for plugin in of_kind(kind) if plugin.default), None) if name is None else find(kind, str(name))


def trouble(kind: str, name: str) -> str:
    """Why a plugin that a user names cannot be used; empty where it can."""
    if (kind, name) in _contested or (kind, name) in plugins:
        return _contested.get((kind, name), "")
    return f"unknown {kind}{did_you_mean(name, [plugin.name for plugin in of_kind(kind)])}{left_out()}"


def left_out() -> str:
    """What to add to a message about an unknown name: entry points that failed to load, which may have had it."""
    return "".join(f"; {entry} was not loaded: {why}" for entry, why in _left_out.items())


def load_plugins(paths: Iterable[str | Path] = ()) -> None:
    """Import every plugin: built-in, in `paths`, and from entry points of installed packages. Idempotent.

    An entry point that fails, or brings a technique that clashes with others, is left out with a warning.
    paths: folders, or single .py files; in folders, files whose name starts with _ are skipped.

    Raises:
        PluginError: a path is missing, or a plugin cannot be imported, breaks its contract or clashes with another.
    """
    if BUILT_IN not in opened:
        for shelf in _inside(BUILT_IN):
            for name in _inside(shelf):
                _import(functools.partial(importlib.import_module, name), f"plugin {name}", name)
        opened.add(BUILT_IN)
    for path in (expanded(path, "[plugins] path") for path in paths):
        if not path.is_dir() and (path.suffix != ".py" or not path.is_file()):
            raise PluginError(f"plugin path {path}: no such folder or .py file")
        inside = [file for file in sorted(path.rglob("*.py")) if not file.name.startswith("_")]
        for file in inside if path.is_dir() else [path]:
            _open_file(file.resolve())
    if ENTRY_POINTS + ":" not in opened:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            _open_entry(entry)
        opened.add(ENTRY_POINTS + ":")
    faults = []
    for key, plugin in [(key, plugin) for key, plugin in plugins.items() if plugin.kind == "technique"]:
        others = [other for other in plugins.values() if other.kind == "technique"]
        for sentence in technique_clashes(plugin, others, not _left_out):
            if key in _brought_by:
                _leave_out(_brought_by[key], PluginError(sentence))
                break
            faults.append(sentence)
    if faults:
        raise PluginError("\n".join(faults))


def _inside(name: str) -> list[str]:
    """The modules of a package, but not of packages in it: what a plugin of several files needs it imports itself."""
    path = getattr(importlib.import_module(name), "__path__", ())
    return [module.name for module in pkgutil.iter_modules(path, name + ".")]


def _open_file(file: Path) -> None:
    if str(file) in opened:
        return
    # No other file's, and the same in a process that has to import it again: one that finds another module under a
    # plugin's name cannot unpickle the plugin. Without dots, as in /home/jane.doe, which would make it a module of a
    # package that nobody has. The digest tells a/b.py from a_b.py.
    readable = "_".join(file.with_suffix("").parts[1:]).replace(".", "_")
    module = f"titan_plugin_{readable}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    _import(functools.partial(spec.loader.exec_module, loaded), f"plugin {file}", module)
    opened.add(str(file))


def _open_entry(entry: EntryPoint) -> None:
    package = f"package {entry.dist.name}" if entry.dist is not None else "a package"
    name = f"{package} (entry point {entry.name} = {entry.value})"
    before = set(plugins)
    try:
        _import(entry.load, "it", entry.module.partition(".")[0])
    except PluginError as error:
        if isinstance(error, NameTakenError):
            _contested[error.key] = str(error)
        _leave_out(name, error)
    _brought_by.update(dict.fromkeys(plugins.keys() - before, name))


def _leave_out(entry: str, error: PluginError) -> None:
    for key in [key for key, name in _brought_by.items() if name == entry]:
        del plugins[key], _brought_by[key]
    _left_out[entry] = str(error)
    warn(f"{entry} is not loaded: {error}", error)


def _import(load: Callable[[], Any], what: str, module: str) -> None:
    """Import plugins; where that fails, none of them stays, and a PluginError says the file and the line.

    module: the start of the names of the modules whose lines a user can mend.
    """
    before = dict(plugins)
    try:
        load()
    except (Exception, SystemExit) as error:
        plugins.clear()
        plugins.update(before)
        if isinstance(error, PluginError):
            raise
        said = error.msg if isinstance(error, SyntaxError) else (str(error).splitlines() or [""])[0]
        told = f"{_line(error, module) or what} cannot be imported: {type(error).__name__}: {said}"
        raise PluginError(f"{told} (add --traceback for the whole stack)") from error


def _line(error: BaseException, module: str) -> str:
    """`plugin FILE:LINE`, the last in a module of that name that an error came through; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"plugin {error.filename}:{error.lineno}"
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(module):
            found = f"plugin {frame.f_code.co_filename}:{line}"
    return found
