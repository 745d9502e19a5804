"""Paths that depend on the user and the machine: home folders, temporary folders, sockets, the way names are encoded.

What cannot be had is a `ConfigError` with the key or the variable to set. Containers that run as a number without an
entry among the users have no home, and jobs of a scheduler often have long temporary folders.
"""

import contextlib
import multiprocessing.util
import os
import re
import sys
import tempfile
from pathlib import Path

from titan.errors import ConfigError, DataError, TitanError, by_errno

_SET_UTF8 = "set PYTHONUTF8=1, or a UTF-8 locale in LC_ALL"

# all of a pointer file, of at most 1,023 bytes (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)
_LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\r?\n(?:ext-.*\n)*oid sha256:[0-9a-f]{64}\r?\nsize (\d+)\s*"
)


def expanded(path: str | Path, key: str) -> Path:
    """A path whose leading `~` or `~user` is that user's home folder. A file that is called so, as `~draft`, is itself.
    key: what names the path, as `data.cache`, for messages.

    ConfigError: the home folder is not known, or the path has characters that file names here cannot have.
    """
    text = os.path.expanduser(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise ConfigError(f"{key} = {str(path)!a}: file names are {encoding} here; {_SET_UTF8}") from None
    first = Path(text).parts[:1]
    if "\0" in text:
        what = "no file name has a zero byte"
    elif not text.startswith("~") or (first != ("~",) and os.path.lexists(first[0])):
        return Path(text)
    elif first == ("~",):
        why = f"HOME is not set, and no entry of the users gives user {os.getuid()} a home folder"
        what = f"{why}; set HOME, or {key} to a path without ~"
    else:
        what = f"there is no user {first[0][1:]!r}; begin the name of a file with ./"
    raise ConfigError(f"{key} = {text!r}: {what}")


def temporary_folder() -> Path:
    """The folder for temporary files; a ConfigError where none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}; set TMPDIR to a folder that can be written to", "environment") from None


def check_writable(folder: Path, variable: str) -> None:
    """Make a folder that a variable of the environment names, if need be; a ConfigError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # access alone says nothing to root, or of quotas
    except OSError as error:
        what = f"{variable} cannot be written: {told(error, folder)}; set {variable} to another folder"
        raise by_errno(error, ConfigError(what, "environment")) from None


def sync(path: Path) -> None:
    """See a file's content, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path | None, flag: str) -> None:
    """A ConfigError, before long work, if a file is asked for that cannot be written, or is a folder."""
    if path is None:
        return
    real = os.path.realpath(path)
    what = dangling(path) or ("is a folder; name a file" if os.path.isdir(real) else "")
    above = real
    while not os.path.lexists(above):  # folders that are absent are made
        above = os.path.dirname(above)
    if not what and not os.path.isdir(above) and above != real:
        what = f"{above} is no folder"
    if what or not os.access(above, os.W_OK):
        raise ConfigError(f"{flag} {path}: {what or f'{above} may not be written'}", "command line")


def shorten_sockets() -> None:
    """Have `multiprocessing` put its sockets elsewhere where TMPDIR is too long for them, here and in processes that
    this one starts; a ConfigError where no shorter folder can be written to."""
    given = temporary_folder()
    if _fits(given):
        return
    for folder in filter(_fits, (Path("/tmp"), Path("/var/tmp"), Path("/usr/tmp"))):
        tempfile.tempdir = str(folder)
        try:
            multiprocessing.util.get_temp_dir()  # made once, and then remembered by itself
        except OSError:
            continue
        finally:
            tempfile.tempdir = str(given)
        return
    what = f"TMPDIR = {given}: longer than the path of a socket may be; set TMPDIR to a shorter folder"
    raise ConfigError(what, "environment")


def _fits(folder: Path) -> bool:
    # with what `multiprocessing` appends; the path of a socket has at most 103 bytes on macOS and BSD, 107 on Linux
    return len(os.fsencode(folder / "pymp-xxxxxxxx" / "listener-xxxxxxxx")) <= 103


def check_python() -> None:
    """Raise a ConfigError where this user may not start Python, as where it lies in the home folder of another."""
    if sys.executable and not os.access(sys.executable, os.X_OK):
        real = os.path.realpath(sys.executable)
        what = f"user {os.getuid()} may not execute {real}, of which processes are to be started"
        raise ConfigError(f"{what}; install Python where this user may", "environment")


def undecoded(word: str) -> str:
    """What is wrong with a word of the command line that holds bytes of no character; empty: nothing."""
    try:
        word.encode()
        return ""
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        return f"{word!a} is not {encoding}; {'rename what is called so' if encoding == 'utf-8' else _SET_UTF8}"


def told(error: OSError, path: str | Path = "") -> str:
    """Which path (where an error of the system names none, this one) it is about, and what it says."""
    named = os.fsdecode(error.filename or path)
    return dangling(named) or f"{named}: {error.strerror or error}"


def no_folder(path: str | Path) -> str:
    """Why a path is no folder."""
    return dangling(path) or ("is a file; name its folder" if os.path.isfile(path) else "no such folder")


def dangling(path: str | Path) -> str:
    """What is said of a path that is, or lies below, a link that leads nowhere; empty: it is none."""
    for each in (*reversed(Path(path).parents), Path(path)):
        # Called where the system has just failed, so what cannot be told is none.
        if os.path.islink(each) and not os.path.exists(each):
            with contextlib.suppress(OSError):
                return f"{each} is a link to {os.readlink(each)}, which is not there"
    return ""


def refuse_lfs_pointer(path: Path, error: type[TitanError] = DataError) -> None:
    """Raise `error` if a file is all that a clone without Git LFS has: a pointer. Silent if it cannot be read."""
    try:
        pointer = _LFS_POINTER.fullmatch(path.read_bytes()) if 0 < path.stat().st_size < 1024 else None
    except OSError:
        return
    if pointer:
        what = f"is a Git LFS pointer, not the file itself ({int(pointer[1]):,} bytes)"
        raise error(f"{path} {what}; fetch it with: git lfs pull")
