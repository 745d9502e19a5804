"""A chosen layout as the TOML of a job: a resolved one, or written into the job's own, whose comments and mode stay."""

import os
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomlkit

from titan.config import load_job
from titan.config.tables import Table, override, read
from titan.errors import ConfigError, TitanError, by_errno

ELSEWHERE = "or write a resolved TOML with --output FILE"

MARK = "\ufeff"
"""The byte-order mark, with which editors of Windows begin a file."""


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
        path.write_text(tomlkit.dumps(table), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


# --- into the job's own TOML --------------------------------------------------------------------------------------


def text_to_replace(path: Path) -> str:
    r"""The text of a file that is replaced after a search, with its own line endings (`\n` or `\r\n`).

    path: the file, or a symlink to it.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8, or the file or its folder is not writable.
    """
    real = path.resolve()
    try:
        text, mode = real.read_bytes().decode(), stat.S_IMODE(real.stat().st_mode)
    except OSError as error:
        raise by_errno(error, ConfigError(f"cannot be read: {error.strerror}", str(path))) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not TOML: {error}", str(path)) from None
    if not mode & 0o222 or not os.access(real, os.W_OK):  # root may write any file, so access alone says nothing
        what = f"is not writable (mode {mode:04o}); make it writable with chmod u+w {real}, {ELSEWHERE}"
        raise ConfigError(what, str(path))
    for folder in dict.fromkeys((path.parent, real.parent)):
        if not os.access(folder, os.W_OK | os.X_OK):
            what = f"cannot be replaced: its folder {folder} is not writable; change its mode, {ELSEWHERE}"
            raise ConfigError(what, str(path))
    return text


def write_layout(path: Path, text: str, overrides: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Write a chosen layout into the job's own TOML in one step. Comments, other keys, line endings and mode stay.

    Only keys are written whose value differs from what the file and its base files give. The new file is loaded before
    it replaces the old one.

    path: TOML of the job, or a symlink to it, which stays one.  text: what `text_to_replace` gave before the search.
    overrides: `--key=value` words, which are written too.  values: dotted keys of the layout.

    Returns:
        `key = value` of each key written.

    Raises:
        ConfigError: the job is invalid, the file has another text by now, cannot be edited or written, or would be
            another job than the one with this layout.
    """
    _check_unchanged(path, text)
    wanted = load_job(path, [*overrides, *_words(values)]).table
    given = Table()
    override(given, overrides)
    words = (".".join(key) for key in given.origins if not isinstance(given.at(*key), dict))
    keys = dict.fromkeys([*values, *words])
    changes = _changes(read(path, ()), load_job(path).table, {key: _at(wanted, key) for key in keys})
    try:
        edited = _edited(path, text, changes, wanted)
        if edited != text:
            _replace(path, text, edited)
    except OSError as error:
        raise _unwritable(path, error) from None
    return [f"{key} = {value!r}" for key, value in changes.items()]


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """The text of a TOML with these keys set; a key that it has keeps its place and comment. Another one follows the
    keys of its table, before the blank lines and comments that lead to the next.

    values: dotted key, its table first -> value.

    Raises:
        ValueError: the text is no TOML, or cannot be edited.
    """
    if text.startswith(MARK):
        return MARK + set_values(text.removeprefix(MARK), values)
    windows = 0 < text.count("\r\n") == text.count("\n")
    try:
        document, wanted = tomlkit.parse(text.replace("\r\n", "\n") if windows else text), tomllib.loads(text)
        for key, value in values.items():
            *tables, name = key.split(".")
            here, there = document, wanted
            for table in tables:
                if table not in here:
                    here[table] = tomlkit.table()
                here, there = here[table], there.setdefault(table, {})
            body: list[Any] = here.value.body if isinstance(here, tomlkit.items.Table) and name not in here else []
            last = max((place for place, (item, _) in enumerate(body) if item is not None), default=len(body) - 1)
            trailing = body[last + 1 :]
            del body[last + 1 :]
            here[name] = there[name] = value
            body.extend(trailing)
    except tomlkit.exceptions.TOMLKitError as error:
        raise ValueError(str(error)) from error
    edited: str = document.as_string()
    edited = edited.replace("\n", "\r\n") if windows else edited
    if tomllib.loads(edited) != wanted:
        raise ValueError("the keys of the layout stand in a form that cannot be edited")
    return edited


def _edited(path: Path, text: str, changes: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The text with these keys set, once it loads as the wanted job. path: relative base files are beside it."""
    try:
        edited = set_values(text, changes) if changes else text
        with candidate(path, edited) as fresh:
            table = load_job(fresh).table
        if _trained(table) != _trained(wanted):
            raise ValueError("it would not be the job that was searched; set options other than the layout in it first")
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"cannot take the layout: {error}; edit the file, {ELSEWHERE}", str(path)) from None
    return edited


def _replace(path: Path, before: str, after: str) -> None:
    """Replace a file's text, if it still is `before`; the file keeps its mode, and its owner where this is allowed."""
    real = path.resolve()
    about = real.stat()
    with candidate(real, after) as fresh:
        with suppress(OSError):  # only root gives files away
            os.chown(fresh, about.st_uid, about.st_gid)
        fresh.chmod(stat.S_IMODE(about.st_mode))
        _check_unchanged(path, before)
        fresh.replace(real)


def _check_unchanged(path: Path, before: str) -> None:
    with suppress(OSError):
        if path.read_bytes() == before.encode():
            return
    raise ConfigError(f"changed during the search, so nothing was written; search again, {ELSEWHERE}", str(path))


@contextmanager
def candidate(path: Path, text: str) -> Iterator[Path]:
    """A new file with this text in the folder of a file; removed at the end, unless it was moved.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=".titan-", suffix=".toml", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> TitanError:
    return by_errno(error, ConfigError(f"cannot be written: {error.strerror}", str(path)))


# --- which keys ---------------------------------------------------------------------------------------------------


def _changes(stated: Table, resolved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a file must set, of the wanted keys. stated: what it and its base files set.  resolved: with defaults."""
    changes: dict[str, Any] = {}
    for key, value in wanted.items():
        *table, name = key.split(".")
        if name == "enabled" or value is None or _at(resolved, key) == value:
            continue
        if _at(wanted, ".".join((*table, "enabled"))) is not False:
            changes[key] = value
    for key in (key for key in wanted if key.endswith(".enabled")):
        owner = key.removesuffix(".enabled")
        own = _at(stated.values, owner)
        there = own is not None or any(other.startswith(f"{owner}.") for other in changes)
        if wanted[key] != (there and (own or {}).get("enabled", True)):
            changes[key] = wanted[key]
    return changes


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
