"""Paths that depend on the user and the machine: home folders, temporary folders, sockets, the way names are encoded.

What cannot be had is refused with the key or the variable to set, as a `ConfigError`: started again, a run would meet
the same. Containers that run as a number without an entry among the users have no home, and jobs of a scheduler often
have long temporary folders.
"""

import contextlib
import multiprocessing.util
import os
import re
import sys
import tempfile
from pathlib import Path

from titan.errors import ConfigError, ConfigIssue, DataError, TitanError, by_errno

_SET_UTF8 = "set PYTHONUTF8=1, or a UTF-8 locale in LC_ALL"

_SOCKET_BYTES = 103
"""Longest path of a socket: 103 on macOS and BSD, 107 on Linux."""

_SOCKET_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"
"""What `multiprocessing` appends to its temporary folder."""


_LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\r?\n(?:ext-.*\n)*oid sha256:[0-9a-f]{64}\r?\nsize (\d+)\s*"
)
"""All of a pointer file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md): at most 1,023 bytes."""


def expanded(path: str | Path, key: str) -> Path:
    """A path whose leading `~` or `~user` is that user's home folder. A file that is called so, as `~draft`, is itself.

    key: what names the path, as `data.cache`, for messages.

    Raises:
        ConfigError: the home folder is not known, or the path has characters that file names here cannot have.
    """
    text = os.path.expanduser(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        why = f"file names are {sys.getfilesystemencoding()} here; {_SET_UTF8}"
        raise ConfigError([ConfigIssue("", f"{key} = {str(path)!a}: {why}")]) from None
    if "\0" in text:
        raise ConfigError([ConfigIssue("", f"{key} = {text!r}: no file name has a zero byte")])
    first = Path(text).parts[:1]
    if not text.startswith("~") or (first != ("~",) and os.path.lexists(first[0])):
        return Path(text)
    if first == ("~",):
        why = f"HOME is not set, and no entry of the users gives user {os.getuid()} a home folder"
        raise ConfigError([ConfigIssue("", f"{key} = {text!r}: {why}; set HOME, or {key} to a path without ~")])
    what = f"there is no user {first[0][1:]!r}; begin the name of a file with ./"
    raise ConfigError([ConfigIssue("", f"{key} = {text!r}: {what}")])


def temporary_folder() -> Path:
    """The folder for temporary files.

    Raises:
        ConfigError: none can be written to.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        what = f"{error.strerror}; set TMPDIR to a folder that can be written to"
        raise ConfigError([ConfigIssue("environment", what)]) from None


def check_writable(folder: Path, variable: str) -> None:
    """Make a folder that a variable of the environment names, if need be, and see whether it can be written to.

    Raises:
        ConfigError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # access alone says nothing to root, or of quotas
    except OSError as error:
        what = f"{variable} cannot be written: {told(error, folder)}; set {variable} to another folder"
        raise by_errno(error, ConfigError([ConfigIssue("environment", what)])) from None


def check_output(path: Path | None, flag: str) -> None:
    """Find out before long work whether a file can be written; None: none is asked for.

    Raises:
        ConfigError: it cannot, as its folder is read-only, or it is a folder itself.
    """
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
        raise ConfigError([ConfigIssue("command line", f"{flag} {path}: {what or f'{above} may not be written'}")])


def shorten_sockets() -> None:
    """Have `multiprocessing` put its sockets elsewhere where TMPDIR is too long for them, in this process and those
    that it starts.

    Raises:
        ConfigError: no shorter folder can be written to.
    """
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
    raise ConfigError([ConfigIssue("environment", what)])


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len(_SOCKET_NAME) <= _SOCKET_BYTES


def check_python() -> None:
    """Refuse where processes of Python are to be started and this user may not start any.

    Raises:
        ConfigError: the user may not, as where Python lies in the home folder of another.
    """
    if sys.executable and not os.access(sys.executable, os.X_OK):
        real = os.path.realpath(sys.executable)
        what = f"user {os.getuid()} may not execute {real}, of which processes are to be started"
        raise ConfigError([ConfigIssue("environment", f"{what}; install Python where this user may")])


def undecoded(word: str) -> str:
    """What is wrong with a word of the command line that holds bytes of no character; empty: nothing."""
    try:
        word.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        mend = "rename what is called so" if encoding == "utf-8" else _SET_UTF8
        return f"{word!a} is not {encoding}; {mend}"
    return ""


def told(error: OSError, path: str | Path = "") -> str:
    """Which path an error of the system is about, and what it says; a link that leads nowhere is said to be one.

    path: where the error names none.
    """
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
    """Raise `error` if a file is what a clone without Git LFS has in its place: a few lines that name it.

    Text that goes on after these lines, or begins otherwise, is no pointer. Silent if the file cannot be read.
    """
    try:
        pointer = _LFS_POINTER.fullmatch(path.read_bytes()) if 0 < path.stat().st_size < 1024 else None
    except OSError:
        return
    if pointer:
        size = f"{int(pointer[1]):,} bytes"
        raise error(f"{path} is a Git LFS pointer, not the file itself ({size}); fetch it with: git lfs pull")
