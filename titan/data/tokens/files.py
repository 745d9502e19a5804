"""Text files: expanding the paths of `[data] path`, and opening plain or compressed files. For dataset plugins."""

import codecs
import gzip
import io
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any

from titan.errors import DataError, by_errno
from titan.packages import install
from titan.paths import expanded, refuse_lfs_pointer
from titan.terminal import warn_once

COMPRESSED = (".gz", ".zst")

_PIECE_BYTES = 16 << 10
"""Compressed bytes that are unpacked at a time: of text some 50 KiB, of the most repetitive data 512 MiB."""

_BUFFER_BYTES = 64 << 10  # content that is fetched at a time: each time costs a call in Python

_MARKS, _HEAD_BYTES = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), 1024
"""By what UTF-16 and UTF-32 are recognized: the marks that begin a text, or where NUL bytes are in its head."""


def as_list(path: str | tuple[str, ...]) -> tuple[str, ...]:
    """An option that takes one path or several, as several."""
    return (path,) if isinstance(path, str) else path


def find(paths: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """The files meant by `paths`, in their order. Links are followed; a file with several names is given once.

    A path is a file, a folder (all files below it whose names match one of `patterns`, sorted) or a glob (`**` crosses
    folders; sorted). A folder that a glob matches is read like one that is named. Names that begin with a dot are left
    out unless the path, the glob or the pattern begins with that dot too.

    DataError: a path means no file, a folder cannot be read, or a link leads nowhere.
    """
    if not paths:
        raise DataError("a dataset needs a path")
    found: dict[str, Path] = {}
    real = cache(os.path.realpath)  # of folders: most files share theirs
    for text in paths:
        path = expanded(text, "data.path")
        with reading(path):
            hits = [path] if path.exists() else list(_expand(Path(), path.parts))
            files = sorted(file for hit in hits for file in _files(hit, patterns))
            folder = next(filter(Path.is_dir, hits), None)
        if not files:
            none = f"folder {folder} holds no file that matches {', '.join(patterns)}" if folder else ""
            raise DataError(none or f"{path}: no such file or folder")
        for file in files:
            name = os.path.realpath(file) if file.is_symlink() else os.path.join(real(file.parent), file.name)
            found.setdefault(name, file)
    return list(found.values())


def leads_outside(folder: Path, file: Path) -> bool:
    """Whether a file of an untrusted folder is a link out of it. The hub's cache keeps files in `blobs`."""
    home = folder.resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(map(file.resolve().is_relative_to, allowed))


def _files(path: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """A file itself; of a folder, all files at any depth whose names match."""
    if path.is_dir():
        for folder, entries in _walk(path):
            for entry in entries:
                if _matches(entry.name, patterns):
                    if entry.is_file():  # which asks the file system about links alone
                        yield folder / entry.name
                    elif entry.is_symlink():
                        raise _dangling(folder / entry.name)
    elif path.is_file():
        yield path
    elif path.is_symlink():
        raise _dangling(path)


def _dangling(path: Path) -> DataError:
    return DataError(f"{path} is a link to {os.readlink(path)}: no such file; restore it or remove the link")


def _expand(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """What the parts of a glob match. `glob.glob` runs in circles with links, and leaves out what it may not read."""
    if not parts:
        yield folder
    elif not folder.is_dir():
        return
    elif parts[0] == "**":
        for below, entries in _walk(folder):
            seen = (below / entry.name for entry in entries if entry.name[0] != ".")
            yield from _expand(below, parts[1:]) if parts[1:] else seen
    elif not set("*?[") & set(parts[0]):
        if os.path.lexists(folder / parts[0]):
            yield from _expand(folder / parts[0], parts[1:])
    else:
        for entry in _entries(folder):
            if _matches(entry.name, parts[:1]):
                yield from _expand(folder / entry.name, parts[1:])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) and (name[0] != "." or pattern[0] == ".") for pattern in patterns)


def _walk(top: Path) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """A folder and those below it, except hidden ones, each with its other entries. Each is given once, without a link
    in its path if there is such a path. So links in a circle come to an end."""
    seen: set[str] = set()
    waiting, dangling = deque([top]), []
    while waiting:
        folder = waiting.popleft()
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        others = []
        for entry in _entries(folder):
            link = entry.is_symlink()
            if not (os.path.isdir(entry.path) if link else entry.is_dir()):
                others.append(entry)
                if link and entry.name[0] != "." and not os.path.exists(entry.path):
                    dangling.append(entry.path)
            elif entry.name[0] != ".":
                (waiting.append if link else waiting.appendleft)(folder / entry.name)
        yield folder, others
    if dangling:
        warn_once(f"folder {top}: {len(dangling)} of its links lead nowhere, as {dangling[0]}")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with reading(f"folder {folder}"), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """In the body, an OSError becomes the error that `what` cannot be read."""
    try:
        yield
    except OSError as error:
        raise by_errno(error, DataError(f"{what} cannot be read: {error.strerror}")) from None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name ends in .gz or .zst.

    A compressed file may hold several members (.gz) or frames (.zst), one after another. One that was cut between two
    of them cannot be told from a shorter file. A frame's window, which its writer chose, is held in memory: 8 MiB or
    less from most, 2 GiB from `zstd --long=31`.

    DataError: it cannot be opened, is compressed and empty, is cut short, is broken on the way or a Git LFS pointer;
    names the file.
    """
    refuse_lfs_pointer(path)
    try:
        if path.suffix in COMPRESSED and path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        with path.open("rb") as raw, _unpacked(raw, path) as file:
            yield file
    except EOFError:
        raise DataError(f"{path} is cut short") from None
    except (OSError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise by_errno(error, DataError(f"{path} cannot be read: {said}")) from None


@contextmanager
def _unpacked(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=raw) as file:
            yield io.BufferedReader(file)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: reading .zst needs the zstandard package: {install('zst')}") from None
        try:
            content = _zstd_frames(raw, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj)
            yield io.BufferedReader(_Pieces(content), _BUFFER_BYTES)
        except zstandard.ZstdError as error:
            raise DataError(f"{path} cannot be unpacked: {error}") from None
    else:
        yield raw


def _zstd_frames(packed: IO[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    """The content of all zstd frames of a file, in pieces; EOFError where it ends within one. The stream reader of
    zstandard ends a frame that is cut short as it ends a whole one, without an error. Its decompression objects, which
    `begin` makes for one frame each, tell whether theirs is complete."""
    frame, rest = None, b""
    while piece := rest or packed.read(_PIECE_BYTES):
        frame = frame or begin()
        yield frame.decompress(piece)
        rest = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


class _Pieces(io.RawIOBase):
    """A file of pieces, some of which may be empty; one is read at a time."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._content = filter(None, pieces), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._content = self._content or memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size


def read_text(path: Path) -> str:
    """A whole file as text; DataError: it cannot be read (see `opened`) or is not UTF-8 (see `decoded`)."""
    with opened(path) as file:
        return decoded(file.read(), str(path))


def decoded(data: bytes, file: str, line: int = 0) -> str:
    """UTF-8 as text, without the byte-order mark that may begin it. line: its number, if `data` is one of the file.
    DataError: it is not UTF-8; names the place and the byte, or tells that it is UTF-16 or UTF-32."""
    place = f"{file}:{line}" if line else file
    whole = data.rstrip(b"\0")
    if not line and len(data) - len(whole) > 3 and b"\0" not in whole:
        then = "as after a crash or on a full disk: write the file again or delete them"
        raise DataError(f"{place}: ends in {len(data) - len(whole):,} NUL bytes, {then}")
    if data.startswith(_MARKS) or b"\0" in data[:_HEAD_BYTES]:
        for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
            head = data[:_HEAD_BYTES].decode(encoding, errors="replace")
            if head[:1] == "\ufeff" or ("\0" not in head and sum(map(str.isascii, head)) * 4 > len(head)):
                convert = f"iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
                raise DataError(f"{place}: is {encoding[:6]}, not UTF-8; convert the file: {convert}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start:,}{' of the line' if line else ''}") from None
