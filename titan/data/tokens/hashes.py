"""SHA-256 of files, remembered beside the tokenized text so that a second run does not read a corpus to know it.

A file is hashed first and read later; of a large corpus, either takes hours. It is known to be the same by its size,
its mtime and its ctime, which cannot be set back. Inode numbers say no more, and some network file systems give out new
ones. `unchanged` compares the three again when all text has been read. Where ctime alone differs, which a link or a
mode changes too, it hashes the file again.

Times have a granularity: what is written twice within it looks the same. As git does it, a file that was changed less
than `RACY_S` before it was hashed is not remembered, and `unchanged` hashes it again. Its age is that of its ctime, as
users may set mtime to any time, by the clock of the file system that the cache is on; that of the corpus is trusted to
agree with it within these seconds.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from titan.data.tokens.unfinished import clock_ns, unfinished
from titan.errors import DataError, by_errno

RACY_S = 2
"""The coarsest granularity of times among file systems (FAT), in seconds."""


_TRIES = 5


@dataclass(frozen=True)
class Mark:
    """By what a file is known to be the same: its size in bytes, mtime and ctime in nanoseconds."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> "Mark":
        """The mark in what `stat` has found."""
        return Mark(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def key(self, file: Path) -> str:
        """What a file with this mark is remembered by."""
        return f"{file.absolute()}|{self.size}|{self.mtime_ns}|{self.ctime_ns}"

    def change(self, now: "Mark") -> str:
        """How size or mtime of a later mark differ; empty where they do not."""
        if now.size != self.size:
            return f"{self.size:,} bytes before, {now.size:,} now"
        if now.mtime_ns != self.mtime_ns:
            return f"modified {_shown(self.mtime_ns)} before, {_shown(now.mtime_ns)} now"
        return ""


def _shown(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Content:
    """A file's SHA-256 (hex), and by what it is known to have this content still. racy: only another hash can tell."""

    file: Path
    mark: Mark
    digest: str
    racy: bool = False


def content_hashes(files: Sequence[Path], memory: Path, threads: int) -> list[Content]:
    """The content of each file. `memory` is a JSON file of what was hashed before, by path and mark; one that cannot be
    understood is written anew.

    Raises:
        DataError: a file cannot be read, or changes while it is.
        OSError: `memory` cannot be written.
    """
    known = _recall(memory)
    contents: dict[Path, Content] = {}
    for file in files:
        mark = _mark(file)
        if digest := known.get(mark.key(file)):
            contents[file] = Content(file, mark, digest)
    unknown = [file for file in files if file not in contents]
    if unknown:
        # Asked for before any of them is read: what is written later is younger than that.
        now_ns = _now_ns(memory.parent)
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda file: _hash(file, now_ns), unknown))
        contents.update((content.file, content) for content in found)
        settled = {content.mark.key(content.file): content.digest for content in found if not content.racy}
        if settled:
            _remember(memory, settled)
    return [contents[file] for file in files]


def _now_ns(cache: Path) -> int:
    """The time in a cache; before all others in one that cannot be written, which remembers nothing."""
    try:
        return clock_ns(cache)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return 0


def unchanged(contents: Sequence[Content], threads: int) -> None:
    """See that files that have been read since have the content they had then.

    Raises:
        DataError: one has not, or cannot be read any more; names the file and what has changed.
    """
    with ThreadPoolExecutor(threads) as pool:
        changes = zip(contents, pool.map(_change, contents), strict=True)
        changed = [(content.file, change) for content, change in changes if change]
    if changed:
        raise _changed(*changed[0], others=len(changed) - 1)


def _change(content: Content) -> str:
    with _opened(content.file) as file:
        now = Mark.of(os.fstat(file.fileno()))
        change, doubtful = content.mark.change(now), content.racy or now != content.mark
        if not change and doubtful and hashlib.file_digest(file, "sha256").hexdigest() != content.digest:
            change = "same size and mtime, but another SHA-256"
        return change


def _changed(file: Path, change: str, others: int = 0) -> DataError:
    more = f", and {others} more files of the dataset changed" if others else ""
    return DataError(
        f"{file} changed while the dataset was tokenized: {change}{more}; no tokens were kept."
        " Stop whatever writes to the dataset's files, then run again"
    )


def _mark(file: Path) -> Mark:
    try:
        return Mark.of(file.stat())
    except OSError as error:
        raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None


def _hash(file: Path, now_ns: int) -> Content:
    with _opened(file) as opened:
        before = Mark.of(os.fstat(opened.fileno()))
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        after = Mark.of(os.fstat(opened.fileno()))
        if change := before.change(after):
            raise _changed(file, change)
    racy = after != before or before.ctime_ns > now_ns - RACY_S * 10**9
    return Content(file, before, digest, racy)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """A file open for reading; on NFS, whose attributes may be those of a minute ago, that asks the server for them."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise by_errno(error, DataError(f"{path} cannot be read: {error.strerror}")) from None


def _recall(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}  # absent or damaged: everything is hashed again
    if not isinstance(known, dict) or not all(isinstance(digest, str) for digest in known.values()):
        return {}
    return known


def _remember(memory: Path, found: dict[str, str]) -> None:
    """Add what was found to the memory as it is by now: hashing takes long, and others have done so meanwhile."""
    partial = unfinished(memory.parent)
    try:
        for _ in range(_TRIES):
            partial.write_text(json.dumps(_recall(memory) | found), encoding="utf-8")
            os.replace(partial, memory)
            if found.items() <= _recall(memory).items():
                break  # or another's was read before ours was there, and has taken its place
    finally:
        partial.unlink(missing_ok=True)
