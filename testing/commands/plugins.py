"""`titan plugins`: list all plugins, print the documentation and options of one, or write a new one."""

import argparse
import inspect
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.contracts import Loss, Measure, Model, Technique
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import REQUIRED, did_you_mean, options_of
from titan.contracts.plugin.registry import Plugin
from titan.errors import ConfigError
from titan.packages import install, program
from titan.testing.commands.skeleton import KINDS, NEW, write

HELP = "list all plugins, print the documentation and options of one, or write a new one"

NEW_HELP = f"""\
A new plugin:
  titan plugins new NAME --kind KIND                 write NAME.py and test_NAME.py here: working code to change
  titan plugins new NAME --kind KIND --package DIR   write a package that pip installs, with the plugin and its test;
                                                     or add both to such a package, and an entry to its pyproject.toml
  KIND is one of {", ".join(KINDS)}.
  No file is overwritten, and no name that --path takes is given. The commands that test the plugin and train with it
  are printed.
"""

NEW_USAGE = "titan plugins new NAME --kind KIND [--package DIR]"

USES = {kind: (f"--{kind}.name", NEW) for kind in ("model", "optimizer", "lr_schedule", "loss", "tokenizer")} | {
    "dataset": ("--data.name", NEW, "--data.path", ".", "--data.glob", "*.py"),
    "technique": (f"--plugins.{NEW}.enabled", "true"),
    "tracker": (f"--metrics.{NEW}.enabled", "true"),
}
"""Kind -> overrides of a job that uses a plugin called new."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's name (none: list all plugins), the form of the output, and what a new plugin is to be."""
    parser.epilog = NEW_HELP
    add = parser.add_argument
    add("name", nargs="?", help="plugin to describe; default: list all; new: write a new one")
    add("new_name", nargs="?", metavar="NAME", help="with new: name of the new plugin")
    about = "also load plugins from this folder or .py file; may be repeated"
    add("--path", action="append", default=[], metavar="P", help=about)
    add("--json", action="store_true", help="one JSON object")
    add("--kind", choices=KINDS, metavar="KIND", help="with new: kind of the new plugin")
    add("--package", type=Path, metavar="DIR", help="with new: folder of a package to write, or to add to")


def run(args: argparse.Namespace) -> int:
    """Print the list, or the description of one plugin; or write a new one."""
    if args.name == NEW:
        return _write_new(args)
    if args.new_name or args.kind or args.package:
        raise ConfigError(f"NAME, --kind and --package follow {NEW}: {NEW_USAGE}", "command line")
    registry.load_plugins(args.path)
    chosen = [plugin for plugin in registry.every() if args.name in (None, plugin.name)]
    if not chosen:
        hint = did_you_mean(args.name, {plugin.name for plugin in registry.every()})
        raise ConfigError(f"no plugin is named {args.name!r}{hint}{registry.left_out()}")
    if args.json:
        print(json.dumps({"plugins": [_as_json(plugin) for plugin in chosen]}, indent=2))
    elif args.name is None:
        _list(chosen)
    else:
        print("\n\n".join(_described(plugin) for plugin in chosen))
    return 0


def _write_new(args: argparse.Namespace) -> int:
    if not args.new_name or not args.kind:
        lacks = "--kind" if args.new_name else "NAME"
        raise ConfigError(f"{lacks} is missing: {NEW_USAGE}; KIND: {', '.join(KINDS)}", "command line")
    written, extended = write(args.kind, args.new_name, args.package, args.path)
    files = [str(path) for path in written]
    if args.json:
        print(json.dumps({"files": files} | ({"extended": str(extended)} if extended else {}), indent=2))
        return 0
    print("\n".join(f"wrote {path}" for path in files))
    if extended:
        print(f"added {args.new_name} to the entry points in {extended}")
    python = [sys.executable, "-m"]
    if find_spec("pytest") is None:
        print(install("testing"))
    if args.package:
        print(shlex.join([*python, "pip", "install", "-e", str(args.package)]))
        print(shlex.join([*python, "pytest", str(args.package)]))
    else:
        uses = [word.replace(NEW, args.new_name) for word in USES[args.kind]]
        train = [*program("titan", "titan.cli"), "train", "--plugins.path", files[0]]
        print(shlex.join([*python, "pytest", files[-1]]))
        print(shlex.join([*train, *uses, "--train.steps", "20"]))
    return 0


def _first_line(plugin: type[Plugin]) -> str:
    return (inspect.getdoc(plugin) or "").splitlines()[0]


def _list(plugins: list[type[Plugin]]) -> None:
    width = max(len(plugin.name) for plugin in plugins)
    for kind in dict.fromkeys(plugin.kind for plugin in plugins):
        print(kind)
        for plugin in (plugin for plugin in plugins if plugin.kind == kind):
            note = "default" if plugin.default else ""
            if issubclass(plugin, Technique):
                note = f"{plugin.phase}  {' '.join(f'mesh.{axis.name}' for axis in plugin.axes)}".strip()
            print(f"  {plugin.name:<{width}}  {note:<28}{_first_line(plugin)}")
        print()


def _described(plugin: type[Plugin]) -> str:
    module = inspect.getmodule(plugin)
    text = [f"{plugin.kind} {plugin.name}", "", inspect.getdoc(module) or "" if module else "", ""]
    nested = plugin.kind in ("technique", "tracker")
    table = f"{plugin.section}.{plugin.name}" if nested else plugin.section
    text.append(f"[{table}]")
    if not nested:
        text.append(f'name = "{plugin.name}"')
    for declared in options_of(plugin.Config):
        default = "required" if declared.default is REQUIRED else f"= {_toml(declared.default)}"
        unit = f" [{declared.spec.unit}]" if declared.spec.unit else ""
        text.append(f"{declared.key} {default}   # {_type_name(declared.hint)}{unit}: {declared.spec.doc}")
    if issubclass(plugin, Model) and plugin.presets:
        text.append(f"preset = one of {', '.join(plugin.presets)}")
    for axis in plugin.axes if issubclass(plugin, Technique) else ():
        text.append(f"mesh.{axis.name} = {axis.default}   # {axis.data}, {axis.weights}: {axis.doc}")
    text += [f"row key {name}   # {measure.join}: {measure.doc}" for name, measure in _measures(plugin).items()]
    return "\n".join(text)


def _measures(plugin: type[Plugin]) -> Mapping[str, Measure]:
    return plugin.measures if issubclass(plugin, Model | Loss | Technique) else {}


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value) if value is not None else "unset"


def _type_name(hint: Any) -> str:
    return (getattr(hint, "__name__", "") if isinstance(hint, type) else str(hint)).replace("typing.", "")


def _as_json(plugin: type[Plugin]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "kind": plugin.kind,
        "name": plugin.name,
        "summary": _first_line(plugin),
        "file": inspect.getsourcefile(plugin),
        "options": [
            {
                "key": o.key,
                "type": _type_name(o.hint),
                "default": None if o.default is REQUIRED else o.default,
                "required": o.default is REQUIRED,
                "unit": o.spec.unit,
                "doc": o.spec.doc,
            }
            for o in options_of(plugin.Config)
        ],
        "measures": {name: asdict(measure) for name, measure in _measures(plugin).items()},
    }
    if issubclass(plugin, Technique):
        axes = [{"name": a.name, "data": a.data, "weights": a.weights} for a in plugin.axes]
        about |= {"phase": plugin.phase, "axes": axes}
    return about
