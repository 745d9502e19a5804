"""Words that cannot be written: a terminal that is gone, a disk that is full. Neither raises, neither is a trace."""

import errno
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan import log

GONE = """
import sys
from titan import log
log.set_up(0)
for number in range(1000):
    log.log.info(f"line {number}")
    print("and another", file=sys.stderr, flush=True) if number > 500 else None
"""
"""Goes on talking when nobody listens, also past logging."""


@pytest.fixture(autouse=True)
def _handlers_of_a_test_end_with_it() -> Iterator[None]:
    kept, propagate = list(log.log.handlers), log.log.propagate
    yield
    for handler in log.log.handlers:
        handler.close()
    log.log.handlers[:], log.log.propagate = kept, propagate


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    talking = subprocess.Popen([sys.executable, "-c", GONE], stderr=writing)
    os.close(writing)
    assert os.read(reading, 6) == b"line 0"
    os.close(reading)
    assert talking.wait() == 0


class _Full(io.StringIO):
    """A file on a full disk, redirected from a terminal."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_below_stderr_costs_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stderr", _Full())
    log.set_up(0, tmp_path)
    log.log.info("kept")
    assert (tmp_path / "rank-0.log").read_text().endswith("INFO kept\n")


def test_a_log_that_cannot_be_written_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_up(0, tmp_path)
    kept = next(handler for handler in log.log.handlers if isinstance(handler, logging.FileHandler))

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept, "flush", full)
    for word in ("one", "two"):
        log.log.info(word)
    log.set_up(0)
    said = capsys.readouterr().err
    file = tmp_path / "rank-0.log"
    assert said == f"one\nwarning: {file} cannot be written: No space left on device; lines may be lost\ntwo\n"
