"""The source of the Python standard library.

Every .py file of the running interpreter's standard library is a document, in the order of its path: about 12 MB, or
3.5 million tokens with the built-in byte pairs, on every machine, with nothing to download. Its tests are left out
(they are three fifths of the text and much of them is tables), as are installed packages and files that are not UTF-8.

Limit: the text is the interpreter's, so two minor versions of Python give two datasets.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.contracts import Dataset, Document, register
from titan.errors import DataError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing to choose."""


@register
class Stdlib(Dataset):
    """The Python standard library's own source; always there."""

    name = "stdlib"
    Config = Config
    default = True

    def files(self) -> list[Path]:
        """The library's .py files, by path below its folder."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in LEFT_OUT]
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        if not files:
            raise DataError(f"this Python keeps no source of its standard library in {root}")
        return sorted(files, key=lambda file: file.relative_to(root).as_posix())

    def documents(self, file: Path) -> Iterator[Document]:
        """The file as one document; none where it is not UTF-8."""
        try:
            yield Document(file.read_text(encoding="utf-8"), str(file))
        except UnicodeDecodeError:
            return
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None
