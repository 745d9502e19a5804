"""A checkpoint gets its name when all of it is on the disk, and the name is on the disk when the save is done."""

import os
from pathlib import Path

import pytest

from bench import mutations
from titan.checkpoint.disk.manifest import MANIFEST, METADATA, STATE


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
