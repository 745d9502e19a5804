"""JSON lines: a JSON object on each line, one of whose fields is a document's text.

`path` names files, folders or globs; names that end in .gz or .zst are unpacked. Empty lines are skipped. Any other
line that is not an object with the field as a string stops the run, naming file and line. UTF-8; a byte-order mark is
dropped. Where no field is named `meta.text`, that is the field `text` of the object `meta`.

Cost: one line is held in memory at a time.
Limit: what other fields hold more than 100 levels deep is not checked where it is too deep for Python's JSON.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.data.tokens.files import COMPRESSED, as_list, decoded, find, opened
from titan.errors import DataError

_DEEP = 100
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')
"""A string, which may hold brackets, or a bracket."""
_ARRAY = "; one object per line is read, no JSON array; convert the file: jq -c '.[]' FILE > NEW_FILE"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]`: which files are read, and which field of a line."""

    path: str | tuple[str, ...] = option(REQUIRED, "files, folders (*.jsonl at any depth) or globs", path=True)
    field: str = option("text", "field that holds a document's text")


@register
class Jsonl(Dataset):
    """JSON lines with a field of text; .gz and .zst too."""

    name = "jsonl"
    Config = Config

    def files(self) -> list[Path]:
        return find(as_list(self.config.path), ["*.jsonl" + end for end in ("", *COMPRESSED)])

    def documents(self, file: Path) -> Iterator[Document]:
        """One document per non-empty line: the string in the configured field."""
        with opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if text := decoded(line, str(file), number).strip():
                    place = f"{file}:{number}"
                    yield Document(self._text(text, place), place)

    def _text(self, line: str, place: str) -> str:
        try:
            return self._value(_parsed(line, place), place)
        except RecursionError:
            return self._value(_parsed(_shallow(line), place), place)

    def _value(self, row: Any, place: str) -> str:
        if not isinstance(row, dict):
            advice = _ARRAY if isinstance(row, list) else ""
            raise DataError(f"{place}: must be a JSON object, not a {type(row).__name__}{advice}")
        field, value = self.config.field, row
        for name in [field] if field in row else field.split("."):
            if not isinstance(value, dict) or name not in value:
                raise DataError(f"{place}: no field {field!r}; set data.field to one of: {_fields(row)}")
            value = value[name]
        if not isinstance(value, str):
            raise DataError(f"{place}: field {field!r} is {json.dumps(value)[:40]}, not a string")
        return value


def _parsed(line: str, place: str, parse_int: Callable[[str], Any] | None = None) -> Any:
    try:
        return json.loads(line, parse_int=parse_int)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error}{_advice(line, error.pos)}") from None
    except ValueError:  # an integer of more digits than Python converts
        return _parsed(line, place, float)


def _advice(line: str, position: int) -> str:
    """What is usually wrong with a line like this one, and what to do."""
    if nul := line.count("\0"):
        return f"; it has {nul:,} NUL bytes, as after a crash or on a full disk: write the file again or delete them"
    if line[:position].endswith("\r"):
        return r"; lines end in CR, not in LF; convert the file: tr '\r' '\n' < FILE > NEW_FILE"
    if line.startswith("["):
        return _ARRAY
    return "; an object must be on one line; convert the file: jq -c . FILE > NEW_FILE" if line == "{" else ""


def _fields(row: dict[str, Any]) -> str:
    """The fields of an object, and of the objects in it."""
    names = [[f"{key}.{name}" for name in value] if isinstance(value, dict) else [key] for key, value in row.items()]
    return ", ".join(repr(name) for several in names for name in several) or "none"


def _shallow(line: str) -> str:
    """A line with null for what is nested more than _DEEP levels deep, whatever it is."""
    depth, start, pieces = 0, 0, []
    for token in _TOKEN.finditer(line):
        if token[0] in ("[", "{"):
            depth += 1
            if depth == _DEEP:
                pieces.append(line[start : token.start()] + "null")
                start = len(line)
        elif token[0] in ("]", "}"):
            depth -= 1
            if depth == _DEEP - 1:
                start = token.end()
    return "".join(pieces) + line[start:]
