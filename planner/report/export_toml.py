"""A chosen layout as the TOML of a job: a resolved one, or written into the job's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titan.config import load_job
from titan.config.load import BUILT_IN
from titan.config.tables import Table, override, read
from titan.errors import ConfigError, ConfigIssue
from titan.planner.report.edit_toml import set_values
from titan.planner.report.replace_file import ELSEWHERE, candidate, check_unchanged, replace, unwritable


def write_toml(path: Path, config: Path | None, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Write a job with a chosen layout as a resolved TOML. The job is loaded first, so that the file is valid.

    path: file to write; its folder is created.  config: TOML of the job; None: quickstart.  overrides: `--key=value`
    words.  values: dotted keys of the layout, which override both.

    Raises:
        ConfigError: the job is invalid, or the file cannot be written.
    """
    table = dict(load_job(config, [*overrides, *_words(values)]).table)
    table["run"] = {key: value for key, value in table["run"].items() if key != "name"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from None


def write_layout(path: Path, text: str, overrides: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Write a chosen layout into the job's own TOML, whose comments, other keys, line endings and mode stay.

    Only keys are written whose value differs from what the file and its base files give. The new file is loaded before
    it replaces the old one.

    path: TOML of the job, or a symlink to it.  text: what `text_to_replace` gave before the search.  overrides:
    `--key=value` words, which are written too.  values: dotted keys of the layout.

    Returns:
        `key = value` of each key written.

    Raises:
        ConfigError: the job is invalid, the file has another text by now, cannot be edited or written, or would be
            another job than the one with this layout.
    """
    check_unchanged(path, text)
    wanted = load_job(path, [*overrides, *_words(values)]).table
    given = Table()
    override(given, overrides)
    words = (".".join(key) for key in given.origins if not isinstance(given.at(*key), dict))
    keys = dict.fromkeys([*values, *words])
    changes = _changes(read(path, (), BUILT_IN), load_job(path).table, {key: _at(wanted, key) for key in keys})
    try:
        edited = _edited(path, text, changes, wanted)
        if edited != text:
            replace(path, text, edited)
    except OSError as error:
        raise unwritable(path, error) from None
    return [f"{key} = {value!r}" for key, value in changes.items()]


def _edited(path: Path, text: str, changes: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The text with these keys set, once it loads as the wanted job. path: relative base files are beside it."""
    try:
        edited = set_values(text, changes) if changes else text
        with candidate(path, edited) as fresh:
            table = load_job(fresh).table
        if _trained(table) != _trained(wanted):
            raise ValueError("it would not be the job that was searched; set options other than the layout in it first")
    except (ValueError, ConfigError) as error:
        what = f"cannot take the layout: {error}; edit the file, {ELSEWHERE}"
        raise ConfigError([ConfigIssue(str(path), what)]) from None
    return edited


def _changes(stated: Table, resolved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a file must set, of the wanted keys. stated: what it and its base files set.  resolved: with defaults."""
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        *table, name = key.split(".")
        if name == "enabled":
            continue
        if (
            value is not None
            and _at(resolved, key) != value
            and _at(wanted, ".".join((*table, "enabled"))) is not False
        ):
            found[key] = value
    for key in (key for key in wanted if key.endswith(".enabled")):
        *table, name = key.split(".")
        own = _at(stated.values, ".".join(table))
        there = own is not None or any(other.startswith(f"{'.'.join(table)}.") for other in found)
        if wanted[key] != (there and (own or {}).get(name, True)):
            found[key] = wanted[key]
    return found


def _at(table: Mapping[str, Any], key: str) -> Any:
    here: Any = table
    for part in key.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here


def _trained(table: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved job without its name, and without the options of techniques that are off."""
    run = {key: value for key, value in table["run"].items() if key != "name"}
    on = {name: t for name, t in table["plugins"].items() if name == "path" or t["enabled"]}
    return {**table, "run": run, "plugins": on}


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
