"""What a process writes to its terminal: reports, and on stderr errors and warnings; a closed terminal ends nothing."""

import codecs
import errno
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from titan.errors import TitanError

GONE = (errno.EPIPE, errno.EIO)  # of a write to a terminal or pipe that has been closed

TRACEBACK_FLAG = "--traceback"
_TRACEBACK = "TITAN_TRACEBACK"


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


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a report on stdout: a line per key, or one JSON object, in which numbers that are not finite are null."""
    if as_json:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
        print(json.dumps(finite, allow_nan=False))
        return
    width = max(map(len, report))
    for key, value in report.items():
        shown = f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{key:<{width}}  {'-' if shown is None else shown}")


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
    """Characters that a stream cannot have, as TOML and JSON write them; bytes of names as they were."""
    assert isinstance(error, UnicodeEncodeError)
    numbers = list(map(ord, error.object[error.start : error.end]))
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
    warned = os.environ.get("TITAN_WARNED", "").splitlines()
    if text in warned:
        return
    os.environ["TITAN_WARNED"] = "\n".join([*warned, text])  # the ranks that this process starts read the same job
    ranks = (os.environ.get(name) for name in ("RANK", "NODE_RANK", "SLURM_PROCID"))
    if next(filter(None, ranks), "0") == "0":
        say(f"warning: {text}")


def _trace(error: Exception) -> None:
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
