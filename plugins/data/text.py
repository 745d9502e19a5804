"""Plain text files.

`path` names files, folders or globs. Each file is one document, or several separated by `separator`
(such as TinyStories' `<|endoftext|>`). UTF-8; a byte-order mark is dropped; names that end in .gz or .zst are unpacked.

All else is kept: indentation, blank lines, and line ends as they are, LF or CR LF. A line end right after a separator
is part of it. To drop the one before it too, begin `separator` with "\\n", which matches CR LF as well. It then also
matches at the start of the file, and one that ends in "\\n" at the end of the file. Blank documents are skipped.

Cost: a file is held in memory while it is tokenized, at about 40 bytes per token. Split larger text
into several files, or use JSON lines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.data.tokens.files import COMPRESSED, as_list, find, read_text


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]`: which files are read, and how they divide into documents."""

    path: str | tuple[str, ...] = option(REQUIRED, "files, folders or globs", path=True)
    glob: str | tuple[str, ...] = option(
        ("*.txt", "*.md", "*.rst", "*.py"),
        "patterns of the files to read in a folder, at any depth; with or without .gz or .zst",
    )
    separator: str = option("", "string that separates documents in a file; empty: each file is one document")


@register
class Text(Dataset):
    """Files, folders or globs of plain text; .gz and .zst too."""

    name = "text"
    Config = Config

    def files(self) -> list[Path]:
        globs = as_list(self.config.glob)
        return find(as_list(self.config.path), [name + end for name in globs for end in ("", *COMPRESSED)])

    def documents(self, file: Path) -> Iterator[Document]:
        """The file's text, whole or cut at the separator."""
        text, separator = read_text(file), self.config.separator
        for piece in _pieces(text, separator) if separator else (text,):
            yield Document(piece, str(file))


def _pieces(text: str, separator: str) -> Iterator[str]:
    plain, end = separator.replace("\r\n", "\n"), r"\r?\n"
    cut = re.escape(plain).replace("\\\n", end)
    if plain.strip("\n"):
        if plain.startswith("\n"):  # its line end may be that of the separator before
            cut = rf"(?:{end}|^)" + cut.removeprefix(end)
        cut = cut.removesuffix(end) + rf"(?:{end}|\Z)" if plain.endswith("\n") else rf"{cut}(?:{end})?"
    return (piece for piece in re.split(cut, text, flags=re.MULTILINE) if piece.strip())
