"""JSON lines: a JSON object on each line, one of whose fields is a document's text.

`path` names files, folders or globs; names that end in .gz or .zst are unpacked. Empty lines are skipped. Any other
line that is not an object with the field as a string stops the run, naming file and line.

Cost: one line is held in memory at a time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.data.tokens.files import COMPRESSED, as_list, find, opened
from titan.errors import DataError


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
        """The files `path` means, those of a folder sorted."""
        return find(as_list(self.config.path), ["*.jsonl" + end for end in ("", *COMPRESSED)])

    def documents(self, file: Path) -> Iterator[Document]:
        """One document per non-empty line: the string in the configured field."""
        with opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{file}:{number}"
                    yield Document(self._text(line.strip(), place), place)

    def _text(self, line: bytes, place: str) -> str:
        field = self.config.field
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 at byte {error.start} of the line") from None
        except ValueError as error:
            raise DataError(f"{place}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{place}: must be a JSON object, not a {type(row).__name__}")
        if field not in row:
            raise DataError(
                f"{place}: no field {field!r}; set data.field to one of: {', '.join(map(repr, row)) or 'none'}"
            )
        if not isinstance(row[field], str):
            raise DataError(f"{place}: field {field!r} is {json.dumps(row[field])[:40]}, not a string")
        return str(row[field])
