"""Text files whose paragraphs, separated by empty lines, are documents.

Cost: a file is in memory while it is tokenized.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import REQUIRED, Dataset, Document, option, register
from titan.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]` with `name = "example"`."""

    path: str = option(REQUIRED, "folder of text files", path=True)
    glob: str = option("*.txt", "pattern of the names of files to read")


@register
class Example(Dataset):
    """Paragraphs of the text files in a folder."""

    name = "example"
    Config = Config

    def files(self) -> list[Path]:
        """In the same order in every process."""
        c = self.config
        found = sorted(Path(c.path).glob(c.glob))
        if not found:
            raise DataError(f"data.path = {c.path}: no file matches {c.glob}; change data.path or data.glob")
        return found

    def documents(self, file: Path) -> Iterator[Document]:
        """Called in worker processes; `place` is what messages about a document say."""
        for number, paragraph in enumerate(file.read_text(encoding="utf-8").split("\n\n"), 1):
            if paragraph.strip():
                yield Document(paragraph.strip(), f"{file}, paragraph {number}")
