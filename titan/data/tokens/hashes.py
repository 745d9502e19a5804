"""SHA-256 of files, remembered beside the tokenized text so that a second run does not read a corpus to know it.

A file is hashed first and read later; of a large corpus, either takes hours. It is known to be the same by its size,
its mtime and its ctime, which cannot be set back; inode numbers are new ones on some network file systems. `unchanged`
compares the three again when all text has been read. Where ctime alone differs, which a link or a mode changes too, it
hashes the file again.

Times have a granularity: what is written twice within it looks the same. As git does it, a file that was changed less
than `RACY_S` before it was hashed is not remembered, and `unchanged` hashes it again. Its age is that of its ctime, as
users may set mtime to any time, by the clock of the file system that the cache is on; that of the corpus is trusted to
agree with it within these seconds.
"""

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from titan.data.tokens.files import reading
from titan.data.tokens.unfinished import clock_ns, unfinished
from titan.errors import DataError

RACY_S = 2  # the coarsest granularity of times among file systems (FAT), in seconds


@dataclass(frozen=True)
class Mark:
    """By what a file is known to be the same: its size in bytes, mtime and ctime in nanoseconds."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> "Mark":
        """The mark of a file with this status."""
        return Mark(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def key(self, file: Path) -> str:
        """What a file with this mark is remembered by."""
        return f"{file.absolute()}|{self.size}|{self.mtime_ns}|{self.ctime_ns}"

    def change(self, now: "Mark") -> str:
        """How size or mtime of a later mark differ; empty where they do not."""
        if now.size != self.size:
            return f"{self.size:,} bytes before, {now.size:,} now"
        if now.mtime_ns != self.mtime_ns:
            times = (datetime.fromtimestamp(mark.mtime_ns / 1e9, UTC) for mark in (self, now))
            return "modified {} before, {} now".format(*(time.isoformat(timespec="milliseconds") for time in times))
        return ""


@dataclass(frozen=True)
class Content:
    """A file's SHA-256 (hex), and by what it is known to have this content still. racy: only another hash can tell."""

    file: Path
    mark: Mark
    digest: str
    racy: bool = False


def content_hashes(files: Sequence[Path], memory: Path, threads: int) -> list[Content]:
    """The content of each file. `memory` is a JSON file of what was hashed before; a damaged one is written anew.
    DataError: a file cannot be read, or changes while it is.  OSError: `memory` cannot be written."""
    known = _recall(memory)
    contents: dict[Path, Content] = {}
    for file in files:
        with reading(file):
            mark = Mark.of(file.stat())
        if digest := known.get(mark.key(file)):
            contents[file] = Content(file, mark, digest)
    if unknown := [file for file in files if file not in contents]:
        # Asked for before any of them is read: what is written later is younger than that.
        now_ns = _now_ns(memory.parent)
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda file: _hash(file, now_ns), unknown))
        contents.update((content.file, content) for content in found)
        if settled := {content.mark.key(content.file): content.digest for content in found if not content.racy}:
            remember(memory, settled)
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
    """See that files read since have the content they had then; DataError: one has not, or cannot be read."""
    with ThreadPoolExecutor(threads) as pool:
        changes = zip(contents, pool.map(_change, contents), strict=True)
        changed = [(content.file, change) for content, change in changes if change]
    if changed:
        raise _changed(*changed[0], others=len(changed) - 1)


def _change(content: Content) -> str:
    with reading(content.file), content.file.open("rb") as file:  # on NFS, that asks the server for its attributes
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


def _hash(file: Path, now_ns: int) -> Content:
    with reading(file), file.open("rb") as opened:
        before = Mark.of(os.fstat(opened.fileno()))
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        after = Mark.of(os.fstat(opened.fileno()))
    if change := before.change(after):
        raise _changed(file, change)
    racy = after != before or before.ctime_ns > now_ns - RACY_S * 10**9
    return Content(file, before, digest, racy)


def _recall(memory: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):  # absent or damaged: everything is hashed again
        known = json.loads(memory.read_bytes())
        if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()):
            return known
    return {}


def remember(memory: Path, found: dict[str, str]) -> None:
    """Add what was found to the memory as it is by now: hashing takes long, and others have done so meanwhile."""
    partial = unfinished(memory.parent)
    try:
        for _ in range(5):
            partial.write_text(json.dumps(_recall(memory) | found), encoding="utf-8")
            os.replace(partial, memory)
            if found.items() <= _recall(memory).items():
                break  # or another's was read before ours was there, and has taken its place
    finally:
        partial.unlink(missing_ok=True)
