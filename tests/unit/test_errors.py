"""What an error of the operating system is: the user's input, or a machine that may do better next time."""

import errno
import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from titan.config import load_job
from titan.data.tokens.bytepairs import read_ranks
from titan.data.tokens.files import opened, read_text
from titan.data.tokens.hashes import content_hashes
from titan.data.tokens.prepare import INDEX, loss_in
from titan.data.tokens.shards import open_shard
from titan.errors import CheckpointError, ConfigError, DataError, ResourceError, TitanError, by_errno
from titan.paths import refuse_lfs_pointer
from titan.planner.machine import cluster
from titan.terminal import warn_once

WRONG = DataError("a.txt cannot be read")


@pytest.mark.parametrize(
    "name",
    ["EIO", "ESTALE", "ENOSPC", "EDQUOT", "ETIMEDOUT", "EAGAIN", "ENOMEM", "EMFILE", "ENOTCONN", "EREMOTEIO", "EBUSY"],
)
def test_a_machine_that_fails_is_no_wrong_input(name: str) -> None:
    number = getattr(errno, name)
    error = by_errno(OSError(number, os.strerror(number)), WRONG)
    assert (type(error), str(error), error.exit_code) == (ResourceError, "a.txt cannot be read", 1)
    assert isinstance(pickle.loads(pickle.dumps(error)), ResourceError)


def test_a_git_lfs_pointer_is_no_file(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 1234567\n"
    file = tmp_path / "a.txt"
    extended = pointer.replace("oid", f"ext-0-fold sha256:{'1b' * 32}\noid")
    for text in (pointer, pointer.rstrip(), pointer.replace("\n", "\r\n"), extended):
        file.write_bytes(text.encode())
        with pytest.raises(DataError, match=r"a\.txt is a Git LFS pointer, not .* \(1,234,567 bytes\).* git lfs pull"):
            refuse_lfs_pointer(file)
    with pytest.raises(CheckpointError):
        refuse_lfs_pointer(file, CheckpointError)
    for text in (pointer + "is what a clone has", "A pointer:\n" + pointer, pointer + "\n" * 1024, pointer[:-9], ""):
        file.write_text(text)
        refuse_lfs_pointer(file)
    refuse_lfs_pointer(tmp_path / "absent")


@pytest.mark.parametrize("name", ["ENOENT", "EACCES", "EISDIR", "ENOTDIR", "EPERM", "EROFS", "ELOOP", "ENAMETOOLONG"])
def test_a_path_that_is_wrong_is_wrong_input(name: str) -> None:
    number = getattr(errno, name)
    assert by_errno(OSError(number, os.strerror(number)), WRONG) is WRONG


def test_what_is_no_error_of_a_system_call_is_wrong_input() -> None:
    assert by_errno(gzip.BadGzipFile("Not a gzipped file"), WRONG) is WRONG
    assert by_errno(ValueError("x"), WRONG) is WRONG


@pytest.mark.parametrize(
    ("read", "name", "wrong"),
    [
        (read_text, "a.txt", DataError),
        (open_shard, "a.bin", DataError),
        (read_ranks, "a.tiktoken", DataError),
        (lambda path: content_hashes([path], path.with_name("memory"), 1), "a.txt", DataError),
        (lambda path: loss_in(path.parent), INDEX, DataError),
        (lambda path: load_job(path, [], 1), "a.toml", ConfigError),
        (lambda path: cluster.load(str(path)), "a.toml", ConfigError),
    ],
    ids=["text", "shard", "ranks", "hashes", "cache", "config", "cluster"],
)
def test_reading(read: Callable[[Path], Any], name: str, wrong: type[TitanError], tmp_path: Path) -> None:
    """On a file system that fails, and that forbids."""
    path = tmp_path / name
    path.write_text("content")
    whole = Path.open

    def fail(number: int) -> Callable[..., Any]:
        def open_(self: Path, *args: Any, **named: Any) -> Any:
            if self != path:
                return whole(self, *args, **named)
            raise OSError(number, os.strerror(number), str(self))

        return open_

    for number, expected in ((errno.EIO, ResourceError), (errno.EACCES, wrong)):
        with patch.object(Path, "open", fail(number)), pytest.raises(expected, match=r"a\.|index\.json"):
            read(path)


def test_reading_on(tmp_path: Path) -> None:
    """What a read in the middle of a file raises is judged like what opening the file raises."""
    (tmp_path / "a.txt").write_text("content")
    with pytest.raises(ResourceError, match=r"a\.txt cannot be read: Input/output error"), opened(tmp_path / "a.txt"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_warning_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TITAN_WARNED", "")
    for _ in range(2):
        warn_once("here")
    for variable in ("RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "1")
        warn_once(f"of {variable}")
        monkeypatch.delenv(variable)
    assert capsys.readouterr().err == "warning: here\n"
