"""The source of the Python standard library.

Every .py file of the running interpreter's standard library is a document, in the order of its path: about 12 MB, or
3.5 million tokens with the built-in byte pairs, on every machine, with nothing to download. Its tests are left out
(they are three fifths of the text and much of them is tables), as are installed packages and files that are empty or
not UTF-8.

`split` divides the files: about one in 25, chosen by a hash of its path, is the validation split. The same path is in
the same split with any interpreter.

Limit: the text is the interpreter's, so two minor versions of Python give two datasets.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan.contracts import Dataset, Document, option, register
from titan.errors import DataError, by_errno

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
VALIDATION = 25
"""One file in this many is in the validation split."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]`: which split of the files is read."""

    split: Literal["all", "train", "validation"] = option(
        "all", "validation: one file in 25, by a hash of its path; train: the other files"
    )


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
        files = [file for file in files if file.stat().st_size]
        if not files:
            raise DataError(f"this Python has no standard library source in {root}; set data.name to another dataset")
        by_name = {file.relative_to(root).as_posix(): file for file in files}
        return [by_name[name] for name in sorted(by_name) if self.config.split in ("all", _split(name))]

    def documents(self, file: Path) -> Iterator[Document]:
        """The file as one document; none where it is not UTF-8."""
        try:
            yield Document(file.read_text(encoding="utf-8"), str(file))
        except UnicodeDecodeError:
            return
        except OSError as error:
            raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None


def _split(name: str) -> str:
    digest = hashlib.sha256(name.encode()).digest()
    return "train" if int.from_bytes(digest[:8], "little") % VALIDATION else "validation"
