"""Who is there: kinds of plugins, their names, and the three doors they come through.

A contract (`titan/contracts/`) is a subclass of `Plugin` that sets `kind`; a plugin is a subclass of a contract
that sets `name` and `Config` and carries `@register`. What a plugin may define is exactly what its contract names:
public methods that the contract does not know, or with other parameters, are refused here, when the file is read.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from titan.contracts.base.options import did_you_mean, options_of
from titan.errors import PluginError

ENTRY_POINTS = "titan.plugins"
BUILT_IN = "titan.plugins"


class Plugin:
    """Base of every contract.

    kind: what it is, set by the contract.  section: the TOML table it is configured in, set by the contract.
    name: what the TOML calls it.  Config: its options, a frozen keyword-only dataclass.
    default: taken (or switched on) when the TOML says nothing.
    """

    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""
    name: ClassVar[str] = ""
    Config: ClassVar[type]
    default: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config


P = TypeVar("P", bound=type[Plugin])

_plugins: dict[tuple[str, str], type[Plugin]] = {}
_opened: set[str] = set()


def register(plugin: P) -> P:
    """Class decorator: check the plugin against its contract and make it known by its name.

    Raises:
        PluginError: no name, an undocumented or mutable Config, a method the contract does not know or with other
            parameters, a contract method left out, or a name that somebody else has.
    """
    contract = contract_of(plugin)
    _check_identity(plugin, contract)
    _check_methods(plugin, contract)
    key = (plugin.kind, plugin.name)
    owner = _plugins.get(key)
    if owner is not None and _file(owner) != _file(plugin):
        raise PluginError(f"two plugins are called {plugin.kind} {plugin.name!r}: {_file(owner)} and {_file(plugin)}")
    _plugins[key] = plugin
    return plugin


def contract_of(plugin: type[Plugin]) -> type[Plugin]:
    """The contract a plugin class fulfils: its nearest ancestor that sets `kind` itself."""
    for base in plugin.__mro__[1:]:
        if base.__dict__.get("kind"):
            assert issubclass(base, Plugin)
            return base
    raise PluginError(f"{plugin.__qualname__} in {_file(plugin)} derives from no contract of titan.contracts")


def _file(plugin: type) -> str:
    return inspect.getsourcefile(plugin) or plugin.__module__


def _check_identity(plugin: type[Plugin], contract: type[Plugin]) -> None:
    place = f"{plugin.__qualname__} in {_file(plugin)}"
    if not plugin.__dict__.get("name", "").isidentifier():
        raise PluginError(f"{place}: `name` must be a word a TOML key can be, not {plugin.name!r}")
    if not (plugin.__doc__ or "").strip():
        raise PluginError(f"{place}: needs a docstring; its first line is what `titan plugins` prints")
    try:
        options_of(plugin.Config)
    except (TypeError, AttributeError) as error:
        raise PluginError(f"{place}: Config: {error}") from None


def _check_methods(plugin: type[Plugin], contract: type[Plugin]) -> None:
    known = {name: member for name, member in inspect.getmembers(contract) if not name.startswith("_")}
    for name, member in inspect.getmembers(plugin):
        place = f"{contract.kind} {plugin.name!r} in {_file(plugin)}"
        if name.startswith("_") or not callable(member) or inspect.isclass(member):
            continue
        if name not in known:
            hint = did_you_mean(name, known)
            raise PluginError(f"{place}: {name}() is no hook of a {contract.kind}{hint}; helpers start with _")
        theirs, ours = (list(inspect.signature(m).parameters) for m in (member, known[name]))
        if theirs != ours:
            raise PluginError(f"{place}: {name}({', '.join(theirs)}) should be {name}({', '.join(ours)})")
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"{contract.kind} {plugin.name!r} in {_file(plugin)} lacks {', '.join(missing)}()")


def find(kind: str, name: str) -> type[Plugin] | None:
    """The plugin of that kind and name, or None."""
    return _plugins.get((kind, name))


def names(kind: str) -> list[str]:
    """The names known of a kind, sorted."""
    return sorted(name for of_kind, name in _plugins if of_kind == kind)


def every() -> Iterator[type[Plugin]]:
    """All plugins, by kind and name."""
    for key in sorted(_plugins):
        yield _plugins[key]


def of_kind(kind: str) -> list[type[Plugin]]:
    """All plugins of a kind, by name."""
    return [plugin for plugin in every() if plugin.kind == kind]


def default_of(kind: str) -> type[Plugin] | None:
    """The plugin of a one-of kind that stands in when the TOML names none."""
    return next((plugin for plugin in of_kind(kind) if plugin.default), None)


def open_doors(folders: Iterable[str | Path] = ()) -> None:
    """Import every plugin: the built-in ones, those in `folders`, those of installed packages. Idempotent.

    Raises:
        PluginError: a folder is missing, a file cannot be imported, a plugin breaks its contract.
    """
    if BUILT_IN not in _opened:
        for shelf in _inside(BUILT_IN):
            for name in _inside(shelf):
                importlib.import_module(name)
        _opened.add(BUILT_IN)
    for folder in folders:
        _open_folder(Path(folder).expanduser())
    if ENTRY_POINTS + ":" not in _opened:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            _import(lambda entry=entry: entry.load(), f"entry point {entry.name} = {entry.value}")
        _opened.add(ENTRY_POINTS + ":")


def _inside(name: str) -> list[str]:
    """The modules of a package, but not of packages in it: what a plugin of several files needs it imports itself."""
    path = getattr(importlib.import_module(name), "__path__", ())
    return [module.name for module in pkgutil.iter_modules(path, name + ".")]


def _open_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise PluginError(f"plugin folder {folder} is not a folder")
    for file in sorted(folder.rglob("*.py")):
        if str(file.resolve()) in _opened or file.name.startswith("_"):
            continue
        module = "titan_plugin_" + "_".join(file.resolve().with_suffix("").parts[1:])
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        _import(lambda spec=spec, loaded=loaded: spec.loader.exec_module(loaded), str(file))
        _opened.add(str(file.resolve()))


def _import(load: Any, place: str) -> None:
    try:
        load()
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"plugin {place} cannot be imported: {type(error).__name__}: {error}") from error
