"""A checkpoint gets its name when all of it is on the disk, and the name is on the disk when the save is done."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from bench import mutations
from tests.checkpoints import checkpointer_of, made, raising
from titan.checkpoint import storage
from titan.checkpoint.disk.manifest import MANIFEST, METADATA, STATE
from titan.errors import CheckpointError


def test_what_is_synced_before_and_after_a_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    before: dict[str, bool] = {}
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def look(path: Path, target: Path) -> Path:
        if target.suffix == "" and path.is_dir():
            before.update({file.name: file.stat().st_ino in synced for file in (path, *path.iterdir())})
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", look)
    saved = mutations.save(tmp_path)
    names = {file.name for file in saved.iterdir()}
    assert before == dict.fromkeys({f"{saved.name}.tmp", *names}, True) and {METADATA, STATE, MANIFEST} < names
    assert tmp_path.stat().st_ino in synced


@pytest.mark.parametrize("aside", [1, 1 << 62])
def test_a_data_file_has_the_hash_of_its_bytes(aside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "HASHED_ASIDE", aside)
    monkeypatch.setattr(storage, "SYNCED_EARLY", 1 << 10)
    path = tmp_path / "data"
    with storage._DataFile.created(path) as file:
        for count in (1, 1 << 16, 3):
            torch.save(torch.arange(count), file)
    written = path.read_bytes()
    assert (file.size, file.digest.digest()) == (len(written), hashlib.sha256(written).digest())


def test_a_disk_that_is_full_at_an_early_sync_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells an error of writing back to one sync alone: that at the end of the file would succeed."""

    monkeypatch.setattr(storage, "SYNCED_EARLY", 1)
    monkeypatch.setattr(storage, "_sync_data", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(CheckpointError, match="disk full while saving step 1"):
        checkpointer_of(tmp_path).save(1, *made(), {})
    assert list(tmp_path.iterdir()) == []
