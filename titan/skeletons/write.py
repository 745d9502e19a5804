"""Write the skeleton of a plugin and its test: two files, or a package that pip installs."""

import keyword
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from titan.contracts.base import registry
from titan.contracts.sections import MetricsSection
from titan.errors import ConfigError, ConfigIssue

FOLDER = Path(__file__).parent
KINDS = ("model", "technique", "optimizer", "lr_schedule", "loss", "dataset", "tokenizer", "tracker")

HOST_KEYS = {
    "technique": ("plugins", ("path",)),
    "tracker": ("metrics", tuple(field.name for field in fields(MetricsSection))),
}
"""Kind whose plugins have tables of their names in a section -> the section, and its keys that are no plugin's."""

FOUND_BY_FILE = 'PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))'
FOUND_BY_ENTRY_POINT = "PLUGINS = ()  # titan finds the entry point of the installed package"

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


def write(kind: str, name: str, package: Path | None) -> list[Path]:
    """Write a plugin called `name` with its test, and return the files.

    package: folder of a package to make; None: a plugin file and its test in the working directory.

    Raises:
        ConfigError: the name cannot be a plugin's, or a file is there already; nothing is written.
    """
    files = _single(kind, name) if package is None else _package(kind, name, package)
    if there := [str(path) for path in files if path.exists()]:
        raise ConfigError(
            [ConfigIssue("", f"{', '.join(there)}: exists, and is not overwritten; move it or choose another name")]
        )
    if why := _unfit(kind, name):
        raise ConfigError([ConfigIssue("", f"plugin name {name!r} {why}")])
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _unfit(kind: str, name: str) -> str:
    """Why a plugin cannot have this name; empty where it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return "must be lower-case letters, digits and underscores, begin with a letter, and be no word of Python's"
    if name.startswith("test_"):
        return "begins with test_, so pytest would take the plugin for a test; choose another name"
    section, keys = HOST_KEYS.get(kind, ("", ()))
    if name in keys:
        return f"is a key of [{section}], where a {kind} has its table; choose another name"
    registry.load_plugins()
    if owner := registry.find(kind, name):
        return f"is taken by the {kind} {owner.__qualname__} of {owner.__module__}; choose another name"
    if find_spec(name) is not None:
        return "is the name of a Python module that is installed, which the file would hide; choose another name"
    return ""


def _single(kind: str, name: str) -> dict[Path, str]:
    return {
        Path(f"{name}.py"): skeleton("plugin", kind, name),
        Path(f"test_{name}.py"): skeleton("test", kind, name),
    }


def _package(kind: str, name: str, folder: Path) -> dict[Path, str]:
    module = folder / "src" / f"titan_{name}"
    test = skeleton("test", kind, name)
    found_by_file = FOUND_BY_FILE.replace("example", name)
    assert found_by_file in test, f"the test of the skeleton of a {kind} does not say where its plugin is"
    distribution = name.replace("_", "-")
    return {
        folder / "pyproject.toml": PYPROJECT.format(kind=kind, name=name, distribution=distribution),
        module / "__init__.py": f'"""The {kind} {name}, a plugin of titan."""\n',
        module / f"{name}.py": skeleton("plugin", kind, name),
        folder / "tests" / f"test_{name}.py": test.replace(found_by_file, FOUND_BY_ENTRY_POINT),
    }


def skeleton(part: str, kind: str, name: str) -> str:
    """The text of a skeleton under another name: example becomes my_plugin, Example MyPlugin."""
    text = (FOLDER / part / f"{kind}.py").read_text(encoding="utf-8")
    words = "".join(word.capitalize() for word in name.split("_"))
    return re.sub(r"\bExample\b", words, re.sub(r"\bexample\b", name, text))
