"""Parquet: tables, one of whose columns holds a document's text in each row.

`path` names files, folders or globs. The column must be one of strings; a row without a string stops the run, naming
file and row. No other column is read.

Cost: 1,024 rows of that column in memory at a time, and what the file's own row groups make pyarrow hold.
Limits: needs the pyarrow package (the extra "parquet"); a column inside another one cannot be named.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.data.tokens.files import as_list, find
from titan.errors import DataError, by_errno, install

ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which files, and which column."""

    path: str | tuple[str, ...] = option(
        REQUIRED, "files, folders or globs; of a folder, *.parquet at any depth", path=True
    )
    field: str = option("text", "the column that holds a document's text")


@register
class Parquet(Dataset):
    """Tables in Parquet files with a column of text."""

    name = "parquet"
    Config = Config

    def files(self) -> list[Path]:
        """The files `path` means, those of a folder sorted."""
        return find(as_list(self.config.path), ["*.parquet"])

    def documents(self, file: Path) -> Iterator[Document]:
        """The text of each row.

        Raises:
            DataError: the package is missing, the file is no Parquet, or a row has no text; names file and row.
        """
        package = _package(file)
        row = 0
        try:
            with package.ParquetFile(file) as table:
                self._check_column(file, table.schema_arrow)
                for batch in table.iter_batches(ROWS, columns=[self.config.field]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        yield Document(self._text(text, f"{file}, row {row}"), f"{file}, row {row}")
        except OSError as error:
            raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror or error}")) from None
        except ValueError as error:  # pyarrow's own are ValueErrors too
            raise DataError(f"{file} cannot be read after row {row}: {str(error).splitlines()[0]}") from None

    def _check_column(self, file: Path, schema: Any) -> None:
        field = self.config.field
        if field not in schema.names:
            raise DataError(f"{file}: no column {field!r}; there is {', '.join(map(repr, schema.names)) or 'none'}")
        if str(schema.field(field).type) not in ("string", "large_string", "string_view"):
            raise DataError(f"{file}: column {field!r} is of {schema.field(field).type}, not of strings")

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
