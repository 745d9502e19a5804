"""TOML files and overrides merged into one table that records which file set each key; differences of two tables."""

import re
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import titan.configs
from titan.contracts.plugin.options import CliText, absolute, coerce, did_you_mean
from titan.errors import ConfigError, ConfigIssue, by_errno
from titan.paths import dangling, expanded, undecoded

BUILT_IN = Path(next(iter(titan.configs.__path__)))
"""The folder of the configs that come with titan."""
QUICKSTART = BUILT_IN / "quickstart.toml"

Path_ = tuple[str, ...]
COMMAND_LINE = "command line"
PRESET = ("model", "preset")


@dataclass
class Table:
    """Merged tables of a job: nested values, and for each key's path the file (or command line) that set it.

    origins: in the order in which keys were set last.
    outdated: keys that stood in a table when a file above it gave the table another `name`.
    outranked: sizes of the model in files below one (or the command line) with a preset, which states all sizes.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)
    outdated: set[Path_] = field(default_factory=set)
    outranked: dict[str, Any] = field(default_factory=dict)

    def merge(self, other: Mapping[str, Any], origin: str, at: Path_ = ()) -> None:
        """Merge `other` over this one: tables merge, any other value replaces."""
        here = self.values
        for key in at:
            here = here.setdefault(key, {})
        for key, value in other.items():
            if isinstance(value, Mapping):
                if not isinstance(here.setdefault(key, {}), dict):
                    here[key] = {}
                self.merge(value, origin, (*at, key))
            else:
                if key == "name" and here.get(key, value) != value:
                    self.outdated |= {(*at, k) for k, o in self.origins_in(*at).items() if o != origin}
                if (*at, key) == PRESET:
                    lower = [k for k, o in self.origins_in(*at).items() if o != origin and k not in ("name", key)]
                    self.outranked |= {k: here.pop(k) for k in lower if k in here}
                here[key] = value
            self.outdated.discard((*at, key))
            self.origins.pop((*at, key), None)
            self.origins[(*at, key)] = origin

    def above(self, key: Path_, other: Path_) -> bool:
        """Whether a file above that of `other`, or the command line, set `key`; both are set."""
        order = list(self.origins)
        return self.origins[key] != self.origins[other] and order.index(key) > order.index(other)

    def at(self, *path: str) -> Any:
        """The value at a path; an empty table where there is none."""
        here: Any = self.values
        for key in path:
            here = here.get(key, {}) if isinstance(here, dict) else {}
        return here

    def origins_in(self, *path: str) -> dict[str, str]:
        """Key -> file or command line that set it, for the table at a path."""
        return {at[-1]: origin for at, origin in self.origins.items() if at[:-1] == path}

    def blamed(self, issue: ConfigIssue) -> ConfigIssue:
        """A fault of a file; of the command line, if that set a key that the sentence names with its table."""
        words = set(re.findall(r"\w+", issue.what))
        given = [at for at, origin in self.origins.items() if origin == COMMAND_LINE and len(at) > 1]
        # Names of axes stand in sentences without their table.
        named = any(at[-1] in words and at[-2] in ("mesh", *words) for at in given)
        return replace(issue, where=COMMAND_LINE) if named else issue


def split_arguments(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """`--config F` out of a command line; the rest are overrides."""
    left, rest, config = iter(words), [], None
    for word in left:
        if word.startswith("--config="):
            config = Path(word.removeprefix("--config="))
        elif word == "--config" and (following := next(left, None)) is not None:
            config = Path(following)
        else:
            rest.append(word)
    return config, rest


def read(path: Path, overrides: Sequence[str]) -> Table:
    """The file merged over its base files, with the command line on top.

    Relative paths are searched in the working directory, then among the built-in configs.

    Raises:
        ConfigError: a file is missing or is no TOML, base files are circular, or a word is no override.
    """
    table = Table()
    _merge_files(table, _locate(expanded(path, "--config")))
    override(table, overrides)
    return table


def said_of(path: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """Sentences on a job (None: the quickstart) where a preset overrides model sizes of files below it, and where the
    data of training are chosen above those of validation."""
    table = read(path or QUICKSTART, overrides)
    found, name, section = [], ("validation", "name"), table.at("validation")
    if lost := ", ".join(f"{key} = {value!r}" for key, value in table.outranked.items()):
        preset = f"[model] preset = {str(table.at(*PRESET))!r} ({table.origins[PRESET]})"
        found.append(f"{preset} overrides what files below it set: {lost}")
    ways = [key for key in (("data", "name"), ("data", "mixture"), ("data", "path")) if key in table.origins]
    above = [key for key in ways if name in table.origins and table.above(key, name)]
    if above and str(section.get("every", 0)) != "0":
        own = f"[validation] name = {str(section['name'])!r} ({table.origins[name]})"
        place = "on the command line" if table.origins[above[0]] == COMMAND_LINE else "by another file"
        why = f"while [data] {above[0][1]} is set {place}"
        then = "to validate on text of one's own, set validation.name and its path too; for none, validation.every = 0"
        found.append(f"validation is on other text than training: {own}, {why}; {then}")
    return found


def override(table: Table, words: Sequence[str]) -> None:
    """Merge the overrides of a command line, `--table.key value`, into a table; a ConfigError where a word is none."""
    faults, left = [what for what in map(undecoded, words) if what], deque(words)
    while left:
        word = left.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        *tables, key = path = name.split(".")
        if not word.startswith("--") or not all(path) or not tables:
            faults.append(f"{word}: expected --table.key value")
        elif not equals and (not left or left[0].startswith("--")):
            faults.append(f"{word}: needs a value")
        else:
            nested: dict[str, Any] = {key: CliText(value if equals else left.popleft())}
            for end in range(len(tables), 0, -1):
                if not isinstance(table.at(*tables[:end]), dict):
                    faults.append(f"--{name}: {tables[end - 1]} is a value, not a table")
                nested = {tables[end - 1]: nested}
            table.merge(nested, COMMAND_LINE)
    if faults:
        raise ConfigError([ConfigIssue(COMMAND_LINE, what) for what in faults])


def _locate(path: Path) -> Path:
    for candidate in (path, BUILT_IN / path, BUILT_IN.parent / path, BUILT_IN / f"{path}.toml"):
        if candidate.is_file():
            return candidate
    if link := dangling(path):
        raise ConfigError(link)
    if path.name and path.exists():
        raise ConfigError("is no regular file; a config is read more than once", str(path))
    there = [file.stem for file in BUILT_IN.glob("*.toml")]
    raise ConfigError(f"no such config file{did_you_mean(path.stem, there)}", str(path))


def _merge_files(table: Table, path: Path, above: tuple[Path, ...] = ()) -> None:
    """Merge a file over its base files. above: the files that inherit from it, resolved."""
    files = (*above, path.resolve())
    if files[-1] in above:
        raise ConfigError("circular base files: " + " -> ".join(file.name for file in files), str(path))
    values = read_toml(path)
    base, plugins = values.pop("base", None), values.get("plugins")
    if isinstance(plugins, dict) and isinstance(folders := plugins.get("path"), list):  # relative to this file
        plugins["path"] = [absolute(f, path.parent) if isinstance(f, str) else f for f in folders]
    if isinstance(base, str):
        beside = path.parent / base
        _merge_files(table, beside if beside.is_file() else _locate(expanded(base, "base")), files)
    elif base is not None:
        raise ConfigError(f"base = {base!r}: must be the path of a TOML file", str(path))
    table.merge(values, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML; a ConfigError where it is none, or a ResourceError where the machine cannot read it now."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8, as a TOML is: {error}; save it as UTF-8", str(path)) from None
    except (ValueError, RecursionError) as error:  # no TOML, thousands of digits, or of brackets
        raise ConfigError(f"is not TOML: {error}", str(path)) from None
    except OSError as error:
        raise by_errno(error, ConfigError(f"cannot be read: {error.strerror}", str(path))) from None


def plugin_folders(table: Table) -> tuple[str, ...]:
    """The folders and files that `[plugins] path` names, absolute."""
    plugins = table.at("plugins")
    try:
        folders: tuple[str, ...] = coerce(plugins.get("path", ()) if isinstance(plugins, dict) else (), tuple[str, ...])
    except ValueError as error:
        raise ConfigError(f"[plugins] path: {error} of folders or .py files") from None
    return tuple(absolute(folder) for folder in folders)


class Difference(NamedTuple):
    """A key of two tables with its value in each; None where it is absent."""

    key: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Every key of two jobs whose values JSON would write differently. A section that one of them lacks is empty.

    Lists of equally many tables are compared entry by entry, with keys such as `data.mixture.1.weight`.
    """
    for section in dict.fromkeys((*before, *now)):
        sections = [before.get(section), now.get(section)]
        if any(isinstance(values, Mapping) for values in sections):
            sections = [values or {} for values in sections]
        yield from _within(section, *sections)


def _within(key: str, before: Any, now: Any) -> Iterator[Difference]:
    before, now = plain(before), plain(now)
    lists = isinstance(before, list) and isinstance(now, list) and before and len(before) == len(now)
    if lists and all(isinstance(entry, Mapping) for entry in (*before, *now)):
        before, now = ({str(place): table for place, table in enumerate(tables)} for tables in (before, now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _within(f"{key}.{name}", before.get(name), now.get(name))
    elif before != now:
        yield Difference(key, before, now)


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
