"""Write the skeleton of a plugin and its test: two files, a package that pip installs, or files of such a package."""

import keyword
import re
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from titan.contracts.plugin import registry
from titan.contracts.sections import MetricsSection
from titan.errors import ConfigError

SKELETONS = Path(__file__).parents[1] / "skeletons"

KINDS = ("model", "technique", "optimizer", "lr_schedule", "loss", "dataset", "tokenizer", "tracker")

HOST_KEYS = {
    "technique": ("plugins", ("path",)),
    "tracker": ("metrics", tuple(field.name for field in fields(MetricsSection))),
}
"""Kind whose plugins have tables of their names in a section -> the section, and its keys that are no plugin's."""

NEW = "new"
"""What follows `titan plugins` to write a plugin, so that no plugin of this name could be described."""

GROUP = 'project.entry-points."titan.plugins"'
ENTRIES = re.compile(
    r"""^\[project\.entry-points\.(["'])titan\.plugins\1\][^\n]*(?:\n(?![ \t\r]*$)[^\[\n][^\n]*)*""", re.MULTILINE
)
"""The table of a package's plugins: its header, and the lines up to an empty one or the next table."""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "titan-{distribution}"
version = "0.1.0"
description = "The {kind} {name}, a plugin of titan"
requires-python = ">=3.11"
dependencies = ["titan-train"]

[project.optional-dependencies]
test = ["titan-train[testing]"]

# Each entry is a module with plugins; titan imports it in every run.
[project.entry-points."titan.plugins"]
{name} = "titan_{name}.{name}"

[tool.setuptools.packages.find]
where = ["src"]
"""


def write(kind: str, name: str, package: Path | None, paths: Iterable[str] = ()) -> tuple[list[Path], Path | None]:
    """Write a plugin called `name` with its test.

    package: folder of a package to make, or of one to which the plugin is added; None: a plugin file and its test in
        the working directory.
    paths: folders and files of other plugins that will be used with it, whose names are taken.

    Returns the new files, and the pyproject.toml that has an entry more (None: none has).

    Raises:
        ConfigError: the name cannot be a plugin's, a file is there already, or the package's entry points are not
            found; nothing is written.
    """
    extended, text = None, ""
    if package is None:
        files = {
            Path(f"{name}.py"): skeleton("plugin", kind, name),
            Path(f"test_{name}.py"): skeleton("test", kind, name),
        }
    elif (package / "pyproject.toml").is_file():
        extended = package / "pyproject.toml"
        files, text = _added(kind, name, package, extended)
    else:
        files = _package(kind, name, package)
    if existing := [str(path) for path in files if path.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists, and is not overwritten; move it or choose another name")
    if why := _unfit(kind, name, paths):
        raise ConfigError(f"plugin name {name!r} {why}")
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    if extended is not None:
        extended.write_bytes(text.encode())
    return list(files), extended


def _unfit(kind: str, name: str, paths: Iterable[str]) -> str:
    """Why a plugin cannot have this name; empty where it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return "must be lower-case letters, digits and underscores, begin with a letter, and be no word of Python's"
    if name == NEW:
        return "is what `titan plugins` takes for its word that writes a plugin; choose another name"
    if name.startswith("test_"):
        return "begins with test_, so pytest would take the plugin for a test; choose another name"
    section, keys = HOST_KEYS.get(kind, ("", ()))
    if name in keys:
        return f"is a key of [{section}], where a {kind} has its table; choose another name"
    registry.load_plugins(paths)
    if owner := registry.find(kind, name):
        return f"is taken by the {kind} {owner.__qualname__} of {owner.__module__}; choose another name"
    if keyword.iskeyword(_class(name)) or re.search(rf"\b{_class(name)}\b", _template("plugin", kind)):
        return f"would give the class {_class(name)}, a name that its file uses for something else; choose another name"
    if find_spec(name) is not None:
        return "is the name of a Python module that is installed, which the file would hide; choose another name"
    return ""


def _package(kind: str, name: str, folder: Path) -> dict[Path, str]:
    module, project = folder / "src" / f"titan_{name}", folder / "pyproject.toml"
    return {
        project: PYPROJECT.format(kind=kind, name=name, distribution=name.replace("_", "-")),
        module / "__init__.py": f'"""The {kind} {name}, a plugin of titan."""\n',
        **_packaged(kind, name, folder, module),
    }


def _packaged(kind: str, name: str, folder: Path, module: Path) -> dict[Path, str]:
    """The plugin in the package's module, and its test."""
    test = skeleton("test", kind, name)
    by_file = f'PLUGINS = ("--plugins.path", str(Path(__file__).with_name("{name}.py")))'
    assert by_file in test, f"the test of the skeleton of a {kind} does not say where its plugin is"
    by_entry_point = "PLUGINS = ()  # titan finds the entry point of the installed package"
    return {
        module / f"{name}.py": skeleton("plugin", kind, name),
        folder / "tests" / f"test_{name}.py": test.replace(by_file, by_entry_point),
    }


def _added(kind: str, name: str, folder: Path, project: Path) -> tuple[dict[Path, str], str]:
    """New files of a package that is there, beside its first plugin; and its pyproject.toml with an entry more."""
    try:
        text = project.read_bytes().decode()
        points = tomllib.loads(text).get("project", {}).get("entry-points", {}).get("titan.plugins", {})
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{project}: is no TOML: {error}") from error
    entries = {str(name): str(module) for name, module in points.items()}
    table = ENTRIES.search(text)
    if not entries or table is None:
        what = f"has no entries in a table [{GROUP}], beside which the plugin could be written; name a new folder"
        raise ConfigError(f"{project}: {what}")
    if name in entries:
        raise ConfigError(f"{project}: has an entry {name} in [{GROUP}]; choose another name")
    inside = next(iter(entries.values())).partition(":")[0].rpartition(".")[0]
    places = [root.joinpath(*inside.split(".")) for root in (folder / "src", folder)]
    module = next((place for place in places if inside and place.is_dir()), None)
    if module is None:
        missing = f"there is no folder {places[0]}; name a new folder"
        raise ConfigError(f"{project}: names {', '.join(entries.values())} in [{GROUP}], but {missing}")
    line = f'\n{name} = "{inside}.{name}"' + ("\r" if table[0].endswith("\r") else "")
    return _packaged(kind, name, folder, module), text[: table.end()] + line + text[table.end() :]


def skeleton(part: str, kind: str, name: str) -> str:
    """The text of a skeleton under another name: example becomes my_plugin, Example MyPlugin."""
    return re.sub(r"\bExample\b", _class(name), re.sub(r"\bexample\b", name, _template(part, kind)))


def _template(part: str, kind: str) -> str:
    return (SKELETONS / part / f"{kind}.py").read_text(encoding="utf-8")


def _class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
