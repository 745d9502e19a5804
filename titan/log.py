"""Logging that knows ranks: rank 0 alone talks to the terminal, every rank writes its own file."""

import logging
import sys
from pathlib import Path

log = logging.getLogger("titan")


class _Plain(logging.Formatter):
    """Words as they are; anything above INFO says its level first."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


def set_up(rank: int, folder: Path | None = None) -> None:
    """Send this rank's words to stderr (rank 0) and, once a run has a folder, to `folder`/rank-N.log.

    What is logged at level DEBUG goes to the file alone.
    """
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if rank == 0:
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.INFO)
        console.setFormatter(_Plain("%(message)s"))
        log.addHandler(console)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(folder / f"rank-{rank}.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(to_file)
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def file() -> str | None:
    """This rank's log; None before the run has a folder."""
    return next((one.baseFilename for one in log.handlers if isinstance(one, logging.FileHandler)), None)
