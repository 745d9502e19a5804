"""Unfinished folders of the shared cache: their names, and the removal of those that killed processes left.

Processes of several nodes and containers make things in one cache. Neither a host's name nor a process id tells them
apart: containers share the former and start the latter at 1. So a name ends in 64 random bits, and what is left behind
is known by its age alone: a process that is still at work writes to its folder more often than every `STALE_S`.

Ages are differences of times that the cache's own file system has given out, where clients do not set them: the clock
of another host, or this one's, is not compared with them.
"""

import secrets
import shutil
import socket
from pathlib import Path

from titan.log import log

STALE_S = 24 * 3600
"""Seconds without a write after which a folder is a leftover. A process that sleeps longer and goes on, as a suspended
job does, fails: its folder was renamed before it was removed, so nothing incomplete is ever published."""

_PREFIX = ".partial-"


def unfinished(folder: Path) -> Path:
    """A path in `folder` that nobody else makes anything at. The host's name in it is for people to read."""
    # tempfile's functions would make files and folders that only their owner can read: the cache is shared.
    return folder / f"{_PREFIX}{socket.gethostname()}-{secrets.token_hex(8)}"


def clock_ns(folder: Path) -> int:
    """Now, in ns, by the clock that gives files in `folder` their times; OSError: none can be written there."""
    probe = unfinished(folder)
    try:
        probe.write_bytes(b"\0")
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)


def sweep(cache: Path) -> None:
    """Remove what nobody has written to for `STALE_S`. What cannot be removed is named in a warning and stays. OSError:
    the cache cannot be written to."""
    now = clock_ns(cache)
    for left in sorted(cache.glob(f"{_PREFIX}*")):
        try:
            if now - max(path.stat().st_mtime_ns for path in (left, *left.rglob("*"))) > STALE_S * 10**9:
                _remove(left)
        except FileNotFoundError:
            continue  # published, or removed by another process
        except OSError as error:
            log.warning(f"the unfinished folder {left} cannot be removed: {error.strerror}")


def _remove(left: Path) -> None:
    # A process that wakes up finds its folder whole or absent, and never half removed.
    doomed = unfinished(left.parent)
    left.rename(doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed)
    else:
        doomed.unlink()
