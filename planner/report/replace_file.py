"""Replaces a user's TOML and keeps what surrounds its text: symlink, mode, owner and line endings."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan.errors import ConfigError, ConfigIssue, TitanError, by_errno

ELSEWHERE = "or write a resolved TOML with --output FILE"


def text_to_replace(path: Path) -> str:
    r"""The text of a file that is replaced later, with its own line endings (`\n` or `\r\n`).

    path: the file, or a symlink to it.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8, or the file or its folder is not writable.
    """
    real = path.resolve()
    try:
        text, mode = real.read_bytes().decode(), stat.S_IMODE(real.stat().st_mode)
    except OSError as error:
        raise by_errno(error, ConfigError([ConfigIssue(str(path), f"cannot be read: {error.strerror}")])) from None
    except UnicodeDecodeError as error:
        raise ConfigError([ConfigIssue(str(path), f"is not TOML: {error}")]) from None
    if not mode & 0o222 or not os.access(real, os.W_OK):  # root may write any file, so access alone says nothing
        what = f"is not writable (mode {mode:04o}); make it writable with chmod u+w {real}, {ELSEWHERE}"
        raise ConfigError([ConfigIssue(str(path), what)])
    for folder in dict.fromkeys((path.parent, real.parent)):
        if not os.access(folder, os.W_OK | os.X_OK):
            what = f"cannot be replaced: its folder {folder} is not writable; change its mode, {ELSEWHERE}"
            raise ConfigError([ConfigIssue(str(path), what)])
    return text


def replace(path: Path, before: str, after: str) -> None:
    """Put a text in place of a file's text in one step; the file keeps its mode, and its owner where this is allowed.

    path: the file, or a symlink to it, which stays a symlink.  before: the text that the file must still have.

    Raises:
        ConfigError: the file has another text by now.
        OSError: the file cannot be written.
    """
    real = path.resolve()
    about = real.stat()
    with candidate(real, after) as fresh:
        with suppress(OSError):  # only root gives files away
            os.chown(fresh, about.st_uid, about.st_gid)
        fresh.chmod(stat.S_IMODE(about.st_mode))
        check_unchanged(path, before)
        fresh.replace(real)


def check_unchanged(path: Path, before: str) -> None:
    """Refuse a file that somebody edited.

    Raises:
        ConfigError: the file does not have this text, or cannot be read.
    """
    try:
        same = path.read_bytes() == before.encode()
    except OSError:
        same = False
    if not same:
        what = f"changed during the search, so nothing was written; search again, {ELSEWHERE}"
        raise ConfigError([ConfigIssue(str(path), what)])


@contextmanager
def candidate(path: Path, text: str) -> Iterator[Path]:
    """A new file with this text in the folder of a file; removed at the end, unless it was moved.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=".titan-", suffix=".toml", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> TitanError:
    """What to raise where a file could not be written: wrong input, or a fault of the machine."""
    return by_errno(error, ConfigError([ConfigIssue(str(path), f"cannot be written: {error.strerror}")]))
