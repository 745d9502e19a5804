"""Words that cannot be written: a terminal that is gone, a disk that is full. Neither raises, neither is a trace."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.sweeps import swept_case
from titan import log

GONE = """
import sys
from titan import log
log.set_up(0)
log.log.info("line 0")
sys.stdin.read()
for number in range(1, 1000):
    log.log.info(f"line {number}")
    print("and another", file=sys.stderr, flush=True)
"""
"""Once stdin ends, goes on writing to a terminal that is gone, first through logging and then past it."""


@pytest.fixture(autouse=True)
def _handlers_of_a_test_end_with_it() -> Iterator[None]:
    kept, propagate = list(log.log.handlers), log.log.propagate
    yield
    for handler in log.log.handlers:
        handler.close()
    log.log.handlers[:], log.log.propagate = kept, propagate


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    talking = subprocess.Popen([sys.executable, "-c", GONE], stdin=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert os.read(reading, 6) == b"line 0"
    os.close(reading)
    talking.communicate()
    assert talking.returncode == 0


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_what_was_closed_from_the_start_ends_nothing(closed: str, tmp_path: Path) -> None:
    """As some schedulers start programs; the next file opened must not be taken for stderr."""
    told, program = tmp_path / "told", tmp_path / "program.py"
    program.write_text(f"""
import os, sys
from titan import log
from titan.terminal import say, stand_in_for_closed
stand_in_for_closed()
log.set_up(0)
with open({str(told)!r}, "w") as file:
    log.log.info("line"), say("another"), os.write(2, b"native")
    file.write(str(sys.stderr.isatty()))
""")
    assert subprocess.run(f"{sys.executable} {program} {closed}", shell=True).returncode == 0
    assert told.read_text() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("words", [["config", "--config", "configs/debug.toml"], swept_case(["plugins", "--json"])])
def test_output_that_cannot_be_written_is_an_error_of_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "titan.cli", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (1, "error: the output: No space left on device\n")


def test_a_full_disk_below_stderr_costs_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(sys, "stderr", Mock(**{"write.side_effect": full}))
    log.set_up(0, tmp_path)
    log.log.info("kept")
    assert (tmp_path / "rank-0.log").read_text().endswith("INFO kept\n")


def test_a_log_that_cannot_be_written_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_up(0, tmp_path)
    kept = next(handler for handler in log.log.handlers if isinstance(handler, logging.FileHandler))
    monkeypatch.setattr(kept, "flush", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for word in ("one", "two"):
        log.log.info(word)
    log.set_up(0)
    said = capsys.readouterr().err
    file = tmp_path / "rank-0.log"
    assert said == f"one\nwarning: {file} cannot be written: No space left on device; lines may be lost\ntwo\n"
