"""Errors that a user can act on. Each carries the exit code of the command."""

import codecs
import errno
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_PREEMPTED = 75

GONE = (errno.EPIPE, errno.EIO)
"""errno values of a write to a terminal or pipe that has been closed."""

DISTRIBUTION = "titan-train"
"""Name of the package on the index; it is imported as `titan`."""

TRACEBACK_FLAG = "--traceback"
_TRACEBACK = "TITAN_TRACEBACK"
_WARNED = "TITAN_WARNED"


class TitanError(Exception):
    """Base of every error that is the user's to act on; printed as one line, never as a stack trace."""

    exit_code = EXIT_FAILED


class RankFailedError(TitanError):
    """A rank ended by an unexpected error, or no longer responds; its own log has the cause."""


@dataclass(frozen=True)
class ConfigIssue:
    """One thing wrong in a job: where it stands (file or command line, table, key) and what to do about it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class ConfigError(TitanError):
    """A job that cannot run as written. Holds all issues found, so that all can be fixed at once."""

    exit_code = EXIT_WRONG_INPUT

    def __init__(self, faults: Iterable[ConfigIssue] | str) -> None:
        self.faults = (ConfigIssue("", faults),) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class PluginError(TitanError):
    """A plugin that violates its contract, or two plugins with one name."""

    exit_code = EXIT_WRONG_INPUT


class CheckpointError(TitanError):
    """A path that leads to no weights, or to damaged or invalid ones, or to those of another model."""

    exit_code = EXIT_WRONG_INPUT


class UnreadableError(CheckpointError):
    """A checkpoint that the file system cannot read now. It may be intact, so no older one is used instead."""

    exit_code = EXIT_FAILED


class SaveError(CheckpointError):
    """A checkpoint that could not be written.

    exit_code: of the cause: that of wrong input where the next start would fail too.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FolderError(TitanError):
    """A run's folder that another run holds. A restart would not help, so the exit code is that of wrong input."""

    exit_code = EXIT_WRONG_INPUT


class DataError(TitanError):
    """Text or tokens that cannot be read; the message names file and place."""

    exit_code = EXIT_WRONG_INPUT


class MissingPackageError(DataError):
    """An optional package is not installed that reading the data or the tokenizer needs."""


class ResourceError(TitanError):
    """The machine or its file system failed, not the input: the same command may succeed later."""


class PreemptedError(TitanError):
    """A signal asked the run to stop while there was nothing to save; the same command goes on from where it was."""

    exit_code = EXIT_PREEMPTED


class DivergedError(TitanError):
    """The loss or a gradient is NaN or infinite."""


_WRONG_PATH = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ELOOP,
        errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENODEV,
    }
)  # fmt: skip
"""What the system says of a path that a user has to mend. Everything else it says, as EIO, ESTALE, ENOSPC or ETIMEDOUT,
tells of a disk, a network or a memory."""


_LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\r?\n(?:ext-.*\n)*oid sha256:[0-9a-f]{64}\r?\nsize (\d+)\s*"
)
"""All of a pointer file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md): at most 1,023 bytes."""


def by_errno(error: Exception, wrong_input: TitanError) -> TitanError:
    """What to raise where `error` ended a system call: `wrong_input`, or a `ResourceError` with its words.

    Exit code 2 keeps a run from being started again, so it is only for what the user has to mend. An `error` that is
    not of a system call, such as that of a file in another format, is wrong input.
    """
    return ResourceError(str(wrong_input)) if of_machine(error) else wrong_input


def of_machine(error: Exception) -> bool:
    """Whether an error of a system call tells of the machine, and not of a wrong path."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _WRONG_PATH


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


def install(extra: str) -> str:
    """The command that installs an extra into this Python: of the clone that titan runs from, or of its package."""
    root = Path(__file__).resolve().parents[1]
    clone = (root / "scripts" / "python.sh").is_file()
    what = ["-e", f"{root}[{extra}]"] if clone else [f"{DISTRIBUTION}[{extra}]"]
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*pip, "install", *what])


def take_traceback_flag(words: Sequence[str]) -> list[str]:
    """A command line without `--traceback`; with it, `report` shows stack traces here and in processes started here."""
    if TRACEBACK_FLAG in words:
        os.environ[_TRACEBACK] = "1"
    return [word for word in words if word != TRACEBACK_FLAG]


def say(line: str) -> None:
    """Print a line on stderr. If stderr has been closed, the line is dropped and the process goes on."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno not in GONE:
            raise
        let_go(sys.stderr)


def is_shown() -> bool:
    """Whether what is written to stderr may be read: stderr has not been closed, nor sent to /dev/null."""
    try:
        return not os.path.samestat(os.fstat(sys.stderr.fileno()), os.stat(os.devnull))
    except (OSError, ValueError):  # no file: a test or a notebook reads it
        return True


def stand_in_for_closed() -> None:
    """Give stdin, stdout and stderr that were closed somewhere to go. To be called first: a file opened later would get
    their numbers, and with them what native code writes there. Characters that stdout cannot have are written as
    `\\u00e4`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("titan", _escaped)
        sys.stdout.reconfigure(errors="titan")


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that a stream cannot have: as TOML and JSON write them, and bytes of names as they
    were."""
    assert isinstance(error, UnicodeEncodeError)
    numbers = [ord(character) for character in error.object[error.start : error.end]]
    if all(0xDC80 <= number <= 0xDCFF for number in numbers):
        return bytes(number - 0xDC00 for number in numbers), error.end
    return "".join(f"\\U{n:08x}" if n > 0xFFFF else f"\\u{n:04x}" for n in numbers), error.end


def let_go(stream: TextIO) -> None:
    """Have what is written to a terminal or pipe that is gone, now and later, go nowhere."""
    # Others write there too, and what is left in Python's own buffer would be the exit code of the process.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def report(error: TitanError, rank: int = 0) -> None:
    """Print an error on stderr, one line per issue; with `--traceback` after its stack trace."""
    _trace(error)
    prefix = "error: " if rank == 0 else f"rank {rank}: error: "
    for line in str(error).splitlines():
        say(prefix + line)


def warn(text: str, error: Exception) -> None:
    """Print a warning on stderr, on rank 0 only, about an error that does not end the command."""
    if os.environ.get("RANK", "0") == "0":
        _trace(error)
        say(f"warning: {text}")


def warn_once(text: str) -> None:
    """Print a warning on stderr, on rank 0 only, and only once in this process and the processes it starts."""
    warned = os.environ.get(_WARNED, "").splitlines()
    if text in warned:
        return
    os.environ[_WARNED] = "\n".join([*warned, text])  # the ranks that this process starts read the same job
    ranks = (os.environ[name] for name in ("RANK", "NODE_RANK", "SLURM_PROCID") if os.environ.get(name))
    if next(ranks, "0") == "0":
        say(f"warning: {text}")


def _trace(error: Exception) -> None:
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
