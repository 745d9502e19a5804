"""Checkpoints that were damaged: refused by name, or gone back from to the newest sound one, loudly."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.mutations import build, checkpointer
from tests.checkpoints import flip, steps_in
from titan.checkpoint.disk import manifest
from titan.errors import EXIT_WRONG_INPUT, CheckpointError

DATA = manifest.data_file(0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpointer(tmp_path).save(1, *build(), {"a": torch.ones(2)})
    return tmp_path / "step-00000001"


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_halve, r"{name} has [\d,]+ bytes, its manifest says [\d,]+"),
        (Path.unlink, "(lacks|missing)"),
        (flip, r"{name} has SHA-256 [0-9a-f]{{12}}, its manifest says [0-9a-f]{{12}}$"),
    ],
)
@pytest.mark.parametrize("name", ["titan.index", "state.json", DATA])
def test_damage_is_one_sentence(saved: Path, name: str, damage: Callable[[Path], None], said: str) -> None:
    damage(saved / name)
    parts, optimizer = build()
    optimizer.state.clear()
    before = {name: tensor.clone() for name, tensor in parts[0].module.state_dict().items()}
    with pytest.raises(CheckpointError, match=said.format(name=re.escape(name))) as refused:
        checkpointer(saved.parent).load(saved, parts, optimizer)
    assert str(saved) in str(refused.value) and name in str(refused.value)
    assert not optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts[0].module.state_dict().items())


def test_other_files_are_told_and_not_read(saved: Path, told: Callable[[], list[str]]) -> None:
    (saved / "README.md").write_text("mine")
    checkpointer(saved.parent).load(saved, *build())
    assert told() == [f"{saved} also holds README.md: not part of the checkpoint, ignored"]


@pytest.mark.parametrize("resume", ["auto", "required"])
@pytest.mark.parametrize("damage", [flip, _halve])
def test_resume_goes_back_to_the_newest_sound_one_and_says_so(
    tmp_path: Path, told: Callable[[], list[str]], resume: str, damage: Callable[[Path], None]
) -> None:
    first, second, third = (tmp_path / f"step-0000000{step}" for step in (1, 2, 3))
    parts, optimizer = build()
    saver = checkpointer(tmp_path)
    for step in (1, 2, 3):
        saver.save(step, parts, optimizer, {"at": step})
    damage(third / DATA)
    (second / "manifest.json").unlink()
    resumed = checkpointer(tmp_path, keep=1)
    assert resumed.find(resume) == first
    assert resumed.load(first, parts, optimizer) == {"at": 1}
    assert sorted(text.partition(" is damaged: ")[0] for text in told()) == [str(second), str(third)]
    for text in told():
        assert f"Resuming from {first} instead" in text and "`titan checkpoint rm" in text
        assert f"{DATA} has" in text or "it lacks manifest.json" in text
    for step, left in ((4, [2, 3, 4]), (3, [2, 3]), (5, [2, 5])):
        resumed.save(step, parts, optimizer, {})
        resumed.close()
        assert steps_in(tmp_path) == left


def test_when_all_are_damaged_nothing_starts(tmp_path: Path) -> None:
    paths = [tmp_path / f"step-0000000{step}" for step in (1, 2)]
    saver = checkpointer(tmp_path)
    for step, path in enumerate(paths, start=1):
        saver.save(step, *build(), {})
        flip(path / "titan.index")
    for resume in ("auto", "required"):
        with pytest.raises(CheckpointError, match="no sound checkpoint is left") as refused:
            checkpointer(tmp_path).find(resume)
        assert all(f"{path} is damaged: titan.index has SHA-256" in str(refused.value) for path in paths)
    assert checkpointer(tmp_path).find("never") is None


def test_a_damaged_one_that_is_named_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpointer(tmp_path).save(step, *build(), {})
    flip(tmp_path / "step-00000002" / DATA)
    for named in (tmp_path, tmp_path / "step-00000002"):
        with pytest.raises(CheckpointError, match=f"step-00000002 is damaged: {DATA}"):
            checkpointer(tmp_path).find(str(named))


def test_what_was_found_is_verified_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, hashed = manifest.entry_of, []
    monkeypatch.setattr(manifest, "entry_of", lambda file, *more: hashed.append(file.name) or read(file, *more))
    again = checkpointer(saved.parent)
    for _ in range(2):
        assert again.find("auto") == saved
        again.load(saved, *build())
        assert sorted(hashed) == [DATA, "state.json", "state.json", "titan.index"], "it also says which is the newest"
        hashed.clear()
    again.load(saved, *build())
    assert len(hashed) == 3


def test_what_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, opens, closed = checkpointer(tmp_path), Path.open, tmp_path / "step-00000002" / DATA
    for step in (1, 2):
        saver.save(step, *build(), {})

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="Permission denied; the file may be intact") as refused:
        checkpointer(tmp_path).find("auto")
    assert refused.value.exit_code == EXIT_WRONG_INPUT
