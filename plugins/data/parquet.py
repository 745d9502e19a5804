"""Parquet tables with a column of strings: each row is a document.

`path` names files, folders or globs. The column must hold strings. A row without a string stops the run, naming file
and row, and so does a file with fewer rows than its metadata says. Checksums of pages are verified if the file has
them. No other column is read.

Cost: 1,024 rows of that column in memory at a time, beside a few pages of the file.
Limits: needs the pyarrow package (the extra "parquet"); nested columns are not supported. Damaged text in a file
without checksums is not detected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.data.tokens.files import as_list, find
from titan.errors import DataError, by_errno
from titan.packages import install
from titan.paths import refuse_lfs_pointer

ROWS = 1024
_READING = {"page_checksum_verification": True, "buffer_size": 1 << 20, "pre_buffer": False}
"""Of a file's row groups, pages and not whole columns are in memory."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]`: which files are read, and which column."""

    path: str | tuple[str, ...] = option(REQUIRED, "files, folders (*.parquet at any depth) or globs", path=True)
    field: str = option("text", "column that holds a document's text")


@register
class Parquet(Dataset):
    """Tables in Parquet files with a column of text."""

    name = "parquet"
    Config = Config

    def files(self) -> list[Path]:
        return find(as_list(self.config.path), ["*.parquet"])

    def documents(self, file: Path) -> Iterator[Document]:
        """The text of each row.

        Raises:
            DataError: the package is missing, the file is no Parquet, or a row has no text; names file and row.
        """
        refuse_lfs_pointer(file)
        package = _package(file)
        row = 0
        try:
            with package.ParquetFile(file, **_READING) as table:
                self._check_column(file, table.schema_arrow)
                for batch in table.iter_batches(ROWS, columns=[self.config.field]):
                    for text in batch.column(self.config.field):
                        row += 1
                        yield Document(self._text(text.as_py(), f"{file}, row {row}"), f"{file}, row {row}")
                if row != table.metadata.num_rows:
                    raise DataError(f"{file} is damaged: it gives {row} of its {table.metadata.num_rows} rows")
        except (OSError, ValueError, LookupError, NotImplementedError) as error:  # pyarrow raises each of them
            said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
            raise by_errno(error, DataError(f"{file} cannot be read after row {row}: {said}")) from None

    def _check_column(self, file: Path, schema: Any) -> None:
        field = self.config.field
        if schema.names.count(field) > 1:
            raise DataError(f"{file}: {schema.names.count(field)} columns are named {field!r}")
        if field not in schema.names:
            raise DataError(
                f"{file}: no column {field!r}; set data.field to one of: {', '.join(map(repr, schema.names)) or 'none'}"
            )
        given = schema.field(field).type
        held = given.value_type if str(given).startswith("dictionary<") else given
        if str(held) not in ("string", "large_string", "string_view"):
            raise DataError(f"{file}: column {field!r} has type {given}, not string")

    def _text(self, text: str | None, place: str) -> str:
        if text is None:
            raise DataError(f"{place}: {self.config.field!r} is null, not a string")
        return text


def _package(file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs the pyarrow package: {install('parquet')}") from None
    return pyarrow.parquet
