"""The registry: kinds of plugins, their names, and the three places they are loaded from.

A contract (`titan/contracts/`) is a subclass of `Plugin` that sets `kind`. A plugin is a subclass of a contract that
sets `name` and `Config` and carries `@register`. A plugin may define the public names of its contract and no others: an
unknown name, or a hook with other parameters, is refused when the file is loaded.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from titan.contracts.plugin.conformance import check_class, file_of
from titan.contracts.plugin.options import did_you_mean
from titan.errors import PluginError
from titan.paths import expanded
from titan.terminal import warn

ENTRY_POINTS = "titan.plugins"
BUILT_IN = "titan.plugins"


class Plugin:
    """Base of every contract.

    kind: kind of plugin, set by the contract.  section: its TOML table, set by the contract.
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

    @staticmethod
    def _clashes(plugin: Any, others: Sequence[Any], all_known: bool) -> Iterable[str]:
        """A contract's rules between plugins of one kind: sentences about `plugin` among `others`, in load order."""
        return ()


P = TypeVar("P", bound=type[Plugin])

Key = tuple[str, str]
"""Kind and name of a plugin."""

_plugins: dict[Key, type[Plugin]] = {}
_opened: set[str] = set()
_brought_by: dict[Key, str] = {}
"""Plugin -> the entry point that brought it."""
_left_out: dict[str, str] = {}
"""Entry point that failed -> why."""
_contested: dict[Key, str] = {}
"""Name that an entry point has claimed too -> who else has it."""


class NameTakenError(PluginError):
    """Two plugins have the same name; `key` is the kind and the name."""

    def __init__(self, message: str, key: Key) -> None:
        super().__init__(message)
        self.key = key


def register(plugin: P) -> P:
    """Class decorator: check the plugin against its contract and register it under its name.

    Raises:
        PluginError: the class breaks its contract (`conformance.check_class`), or its name is taken.
    """
    if not isinstance(plugin, type):
        raise PluginError(f"{file_of(plugin)}: @register decorates a class, but found {plugin!r}")
    check_class(plugin, contract_of(plugin))
    key = (plugin.kind, plugin.name)
    owner = _plugins.get(key)
    # One file imported under two module names registers the same plugin again.
    if owner is not None and (file_of(owner) != file_of(plugin) or owner.__module__ == plugin.__module__):
        both = f"{_place(owner)} and {_place(plugin)}"
        raise NameTakenError(f"two plugins are called {plugin.kind} {plugin.name!r}: {both}; rename one of them", key)
    _plugins[key] = plugin
    return plugin


def _place(plugin: type[Plugin]) -> str:
    return f"{plugin.__qualname__} in {file_of(plugin)}"


def contract_of(plugin: type[Plugin]) -> type[Plugin]:
    """The contract of a plugin class: its nearest ancestor that sets `kind` itself."""
    for base in plugin.__mro__[1:]:
        if base.__dict__.get("kind"):
            assert issubclass(base, Plugin)
            return base
    raise PluginError(
        f"{plugin.__qualname__} in {file_of(plugin)} must subclass a contract of titan.contracts, such as Technique"
    )


def find(kind: str, name: str) -> type[Plugin] | None:
    """The plugin of this kind and name, or None."""
    return _plugins.get((kind, name))


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(name for of_kind, name in _plugins if of_kind == kind)


def every() -> Iterator[type[Plugin]]:
    """All registered plugins, by kind and name."""
    for key in sorted(_plugins):
        yield _plugins[key]


def of_kind(kind: str) -> list[type[Plugin]]:
    """All registered plugins of a kind, by name."""
    return [plugin for plugin in every() if plugin.kind == kind]


def lacking(capability: str, known: Iterable[type[Plugin]] | None = None) -> str:
    """What is said where no enabled technique provides a capability: which of the known ones to enable.

    known: None: all techniques that are registered.
    """
    among = of_kind("technique") if known is None else known
    having = sorted(p.name for p in among if capability in (p.name, *getattr(p, "provides", ())))
    enable = " or ".join(f"[plugins.{name}]" for name in having) or "a plugin that does"
    return f"requires {capability}, which no enabled technique provides; enable {enable}"


def default_of(kind: str) -> type[Plugin] | None:
    """The plugin of a kind that is used when the TOML names none."""
    return next((plugin for plugin in of_kind(kind) if plugin.default), None)


def trouble(kind: str, name: str) -> str:
    """Why a plugin that a user names cannot be used; empty where it can."""
    if (kind, name) in _contested:
        return _contested[kind, name]
    if (kind, name) in _plugins:
        return ""
    return f"unknown {kind}{did_you_mean(name, names(kind))}{left_out()}"


def left_out() -> str:
    """What to add to a message about an unknown name: entry points that failed to load, which may have had it."""
    return "".join(f"; {entry} was not loaded: {why}" for entry, why in _left_out.items())


# --- loading --------------------------------------------------------------------------------------------------


def load_plugins(paths: Iterable[str | Path] = ()) -> None:
    """Import every plugin: built-in, in `paths`, and from entry points of installed packages. Idempotent.

    Args:
        paths: folders, or single .py files; in folders, files whose name starts with _ are skipped.

    An entry point that fails is skipped with a warning.

    Raises:
        PluginError: a path is missing, a file cannot be imported, or a plugin breaks its contract or clashes with
            another.
    """
    if BUILT_IN not in _opened:
        for shelf in _inside(BUILT_IN):
            for name in _inside(shelf):
                _import(functools.partial(importlib.import_module, name), f"plugin {name}", name)
        _opened.add(BUILT_IN)
    for path in paths:
        for file in _files(expanded(path, "[plugins] path")):
            _open_file(file)
    entries = () if ENTRY_POINTS + ":" in _opened else importlib.metadata.entry_points(group=ENTRY_POINTS)
    for entry in entries:
        _open_entry(entry)
    _opened.add(ENTRY_POINTS + ":")
    _refuse_clashes()


def _inside(name: str) -> list[str]:
    """The modules of a package, but not of packages in it: what a plugin of several files needs it imports itself."""
    path = getattr(importlib.import_module(name), "__path__", ())
    return [module.name for module in pkgutil.iter_modules(path, name + ".")]


def _files(path: Path) -> list[Path]:
    """The plugin files that a path means; in a folder, names that start with _ are no plugins."""
    if path.is_dir():
        return [file for file in sorted(path.rglob("*.py")) if not file.name.startswith("_")]
    if path.suffix != ".py" or not path.is_file():
        raise PluginError(f"plugin path {path}: no such folder or .py file")
    return [path]


def _open_file(file: Path) -> None:
    file = file.resolve()
    if str(file) in _opened:
        return
    module = _module_name(file)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    _import(functools.partial(spec.loader.exec_module, loaded), f"plugin {file}", module)
    _opened.add(str(file))


def _module_name(file: Path) -> str:
    """The name of a plugin file's module: no other file's, and the same in a process that has to import it again."""
    # Without dots, as in /home/jane.doe, which would make it a module of a package that nobody has. The digest tells
    # a/b.py from a_b.py; a process that finds another module under a plugin's name cannot unpickle the plugin.
    readable = "_".join(file.with_suffix("").parts[1:]).replace(".", "_")
    return f"titan_plugin_{readable}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"


def _open_entry(entry: EntryPoint) -> None:
    package = f"package {entry.dist.name}" if entry.dist is not None else "a package"
    name = f"{package} (entry point {entry.name} = {entry.value})"
    before = set(_plugins)
    try:
        _import(entry.load, "it", entry.module.partition(".")[0])
    except PluginError as error:
        if isinstance(error, NameTakenError):
            _contested[error.key] = str(error)
        _leave_out(name, error)
    _brought_by.update(dict.fromkeys(set(_plugins) - before, name))


def _leave_out(entry: str, error: PluginError) -> None:
    """Go on without what an entry point has brought."""
    for key in [key for key, name in _brought_by.items() if name == entry]:
        del _plugins[key], _brought_by[key]
    _left_out[entry] = str(error)
    warn(f"{entry} is not loaded: {error}", error)


def _import(load: Callable[[], Any], what: str, module: str) -> None:
    """Import plugins; where that fails, none of them stays.

    module: the start of the names of the modules whose lines a user can mend.

    Raises:
        PluginError: it failed; says the file and the line, and holds the error as its cause.
    """
    before = dict(_plugins)
    try:
        load()
    except (Exception, SystemExit) as error:
        _plugins.clear()
        _plugins.update(before)
        if isinstance(error, PluginError):
            raise
        said = error.msg if isinstance(error, SyntaxError) else (str(error).splitlines() or [""])[0]
        told = f"{_line(error, module) or what} cannot be imported: {type(error).__name__}: {said}"
        raise PluginError(f"{told} (add --traceback for the whole stack)") from error


def _line(error: BaseException, module: str) -> str:
    """`plugin FILE:LINE`, the last in a module of that name that an error came through; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"plugin {error.filename}:{error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith(module):
            found = f"plugin {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _refuse_clashes() -> None:
    """Hold all plugins of a kind against each other, in the order of registration.

    Raises:
        PluginError: some clash; those that entry points brought are left out instead.
    """
    faults = []
    for key, plugin in list(_plugins.items()):
        others = [other for other in _plugins.values() if other.kind == plugin.kind]
        for sentence in contract_of(plugin)._clashes(plugin, others, not _left_out):
            if key in _brought_by:
                _leave_out(_brought_by[key], PluginError(sentence))
                break
            faults.append(sentence)
    if faults:
        raise PluginError("\n".join(faults))
