"""Fixtures that several files of unit tests share."""

import errno
import shutil
from collections.abc import Callable, Iterator
from logging import INFO
from pathlib import Path

import pytest

from titan.log import log


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Warnings and errors the run has said so far."""
    log.addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(r.message for r in caplog.records if r.name == log.name and r.levelno > INFO))
    log.removeHandler(caplog.handler)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`titan checkpoint` with words: its exit code, its output and what it says of errors."""
    from titan import cli  # three seconds, which tests without it need not wait

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def held_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No folder can be removed, as on NFS while somebody has a file of it open; returns what lets go of them."""

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        (path / ".nfs0000").touch()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    return monkeypatch.undo


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of six small files of text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text("".join(f"{number}{line}" * line + "\n" for line in range(20)))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where a cache of tokens will be made."""
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small llama in the format of Hugging Face."""
    from tests.huggingface import plugin, write  # half a second, which tests without it need not wait

    write(tmp_path / "llama", plugin("llama"))
    return tmp_path / "llama"
