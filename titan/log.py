"""Logging by rank: only rank 0 writes to the terminal; every rank writes its own file.

A closed terminal (`| head`, a lost connection) or a full disk loses log lines, but never ends the run.
"""

import logging
import sys
from pathlib import Path

from titan.terminal import GONE, let_go

log = logging.getLogger("titan")


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


class _Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif error.errno in GONE:
            let_go(self.stream)


class _File(logging.FileHandler):
    _told = False  # what the file cannot take for now stays in its buffer, and is tried again with the next line

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(error := sys.exc_info()[1], OSError):
            self._tell(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning(f"{self.baseFilename} cannot be written: {error.strerror}; lines may be lost")


def set_up(rank: int, folder: Path | None = None) -> None:
    """Send this rank's log to stderr (rank 0, without level DEBUG) and, if there is one, to `folder`/rank-N.log."""
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if rank == 0:
        console = _Terminal(sys.stderr)
        console.setLevel(logging.INFO)
        console.setFormatter(_Plain("%(message)s"))
        log.addHandler(console)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        to_file = _File(folder / f"rank-{rank}.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(to_file)
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def file() -> str | None:
    """This rank's log; None before the run has a folder."""
    return next((one.baseFilename for one in log.handlers if isinstance(one, logging.FileHandler)), None)
