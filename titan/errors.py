"""Errors that a user can act on. Each carries the exit code of the command."""

import errno
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_PREEMPTED = 75


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
    """A job that cannot run as written. Holds all issues found, so that all can be fixed at once.
    faults: the issues, or what is wrong.  where: where that stands, as `ConfigIssue.where`."""

    exit_code = EXIT_WRONG_INPUT

    def __init__(self, faults: Iterable[ConfigIssue] | str, where: str = "") -> None:
        self.faults = (ConfigIssue(where, faults),) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class PluginError(TitanError):
    """A plugin that violates its contract, or two plugins with one name."""

    exit_code = EXIT_WRONG_INPUT


class CheckpointError(TitanError):
    """A path that leads to no weights, or to damaged or invalid ones, or to those of another model.
    unreadable: see `UnreadableError`."""

    exit_code = EXIT_WRONG_INPUT
    unreadable = False


class UnreadableError(CheckpointError):
    """A checkpoint that the file system does not let us read. It may be intact, so no older one is used instead.
    exit_code: that of wrong input where the next start would fail too."""

    unreadable = True

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SaveError(CheckpointError):
    """A checkpoint that could not be written. exit_code: that of wrong input where the next start would fail too."""

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


_NAMES = "ENOENT ENOTDIR EISDIR EACCES EPERM EROFS EEXIST ELOOP ENAMETOOLONG EINVAL ENXIO ENODEV"
_WRONG_PATH = frozenset(getattr(errno, name) for name in _NAMES.split())
"""What the system says of a path that a user has to mend. Everything else it says, as EIO, ESTALE, ENOSPC or ETIMEDOUT,
tells of a disk, a network or a memory."""


def by_errno(error: Exception, wrong_input: TitanError) -> TitanError:
    """What to raise where `error` ended a system call: `wrong_input`, or a `ResourceError` with its words.
    Exit code 2 keeps a run from being started again, so it is only for what the user has to mend. An `error` that is
    not of a system call, such as that of a file in another format, is wrong input."""
    return ResourceError(str(wrong_input)) if of_machine(error) else wrong_input


def of_machine(error: Exception) -> bool:
    """Whether an error of a system call tells of the machine, and not of a wrong path."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _WRONG_PATH
