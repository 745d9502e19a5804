"""Text files: expanding the paths of `[data] path`, and opening plain or compressed files. For dataset plugins."""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from titan.errors import DataError, by_errno, install

COMPRESSED = (".gz", ".zst")

_PIECE_BYTES = 16 << 10
"""Compressed bytes that are unpacked at a time: of text some 50 KiB, of the most repetitive data 512 MiB."""

_BUFFER_BYTES = 64 << 10
"""Content that is fetched at a time: each time costs a call in Python."""


def as_list(path: str | tuple[str, ...]) -> tuple[str, ...]:
    """An option that takes one path or several, as several."""
    return (path,) if isinstance(path, str) else path


def find(paths: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """The files meant by `paths`, in their order, each once.

    A path is a file, a folder (all files below it whose names match one of `patterns`, sorted) or a glob (`**` crosses
    folders; sorted).

    Raises:
        DataError: a path means no file, or a folder cannot be read.
    """
    if not paths:
        raise DataError("a dataset needs a path")
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(file for file in _below(path, patterns) if file.is_file())
            if not files:
                raise DataError(f"folder {path} holds no file that matches {', '.join(patterns)}")
        else:
            files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
            if not files:
                raise DataError(f"{path}: no such file or folder")
        found.update(dict.fromkeys(files))
    return list(found)


def _below(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Paths below a folder whose names match a pattern. `rglob` would leave out a folder that it may not read."""

    def refuse(error: OSError) -> None:
        raise by_errno(error, DataError(f"folder {error.filename} cannot be read: {error.strerror}")) from None

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name ends in .gz or .zst.

    A compressed file may hold several members (.gz) or frames (.zst), one after another. One that was cut between two
    of them cannot be told from a shorter file.

    Raises:
        DataError: it cannot be opened, is empty, is cut short or is broken on the way; names the file.
    """
    try:
        if path.stat().st_size == 0:
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
        zstandard = _zstandard(path)
        try:
            frames = _ZstdFrames(raw, zstandard.ZstdDecompressor().decompressobj)
            yield io.BufferedReader(frames, _BUFFER_BYTES)
        except zstandard.ZstdError as error:
            raise DataError(f"{path} cannot be unpacked: {error}") from None
    else:
        yield raw


class _ZstdFrames(io.RawIOBase):
    """The content of all zstd frames of a file.

    The stream reader of zstandard ends a frame that is cut short as it ends a whole one, without an error. Its
    decompression objects, one a frame, tell whether theirs is complete.

    Raises (as it is read):
        EOFError: the file ends within a frame.
        zstandard.ZstdError: what stands there is no frame, or a damaged one.
    """

    def __init__(self, packed: IO[bytes], begin: Callable[[], Any]) -> None:
        """packed: the file.  begin: makes the object that decompresses the next frame."""
        self._packed, self._begin = packed, begin
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is content at hand; 0 at the end of the file."""
        while not self._content:
            if not self._unpack():
                return 0
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size

    def _unpack(self) -> bool:
        """Decompress the next piece, which may have no content; False at the end of the file."""
        packed = b""
        if self._frame is not None and self._frame.eof:
            packed, self._frame = self._frame.unused_data, None
        packed = packed or self._packed.read(_PIECE_BYTES)
        if not packed:
            if self._frame is not None:
                raise EOFError
            return False
        if self._frame is None:
            self._frame = self._begin()
        self._content = memoryview(self._frame.decompress(packed))
        return True


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: reading .zst needs the zstandard package: {install('zst')}") from None
    return zstandard


def read_text(path: Path) -> str:
    """A whole file as text.

    Raises:
        DataError: it cannot be read (see `opened`) or is not UTF-8; names the file and the byte.
    """
    with opened(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start:,}") from None
