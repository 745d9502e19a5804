"""Files of text: which ones a user's paths mean, and how they are opened. For dataset plugins."""

import glob
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from titan.errors import DataError, by_errno

COMPRESSED = (".gz", ".zst")


def as_list(path: str | tuple[str, ...]) -> tuple[str, ...]:
    """An option that takes one path or several, as several."""
    return (path,) if isinstance(path, str) else path


def find(paths: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """The files meant by `paths`, in their order, each once.

    A path is a file, a folder (all files below it whose names match one of `patterns`, sorted) or a glob (`**` crosses
    folders; sorted).

    Raises:
        DataError: a path means no file.
    """
    if not paths:
        raise DataError("a dataset needs a path")
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(file for pattern in patterns for file in path.rglob(pattern) if file.is_file())
            if not files:
                raise DataError(f"folder {path} holds no file that matches {', '.join(patterns)}")
        else:
            files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
            if not files:
                raise DataError(f"{path}: no such file or folder")
        found.update(dict.fromkeys(files))
    return list(found)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name ends in .gz or .zst.

    Raises:
        DataError: it cannot be opened, is empty, or is broken on the way; names the file.
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
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
                yield io.BufferedReader(file)
        except zstandard.ZstdError as error:
            raise DataError(f"{path} cannot be unpacked: {error}") from None
    else:
        yield raw


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(f'{path}: reading .zst needs the zstandard package: pip install "titan[zst]"') from None
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
