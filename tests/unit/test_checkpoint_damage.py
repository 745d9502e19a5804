"""Checkpoints that were damaged: refused by name, or gone back from to the newest sound one, loudly."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.mutations import build, checkpointer
from tests.checkpoints import flip, halve, steps_in
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.folder import step_folder
from titan.checkpoint.disk.manifest import INDEX, MANIFEST, STATE
from titan.errors import CheckpointError

DATA = manifest.data_file(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has saved steps 1, 2 and 3."""
    saver, (parts, optimizer) = checkpointer(tmp_path), build()
    for step in (1, 2, 3):
        saver.save(step, parts, optimizer, {"at": step})
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (halve, r"{name} has [\d,]+ bytes, its manifest says [\d,]+"),
        (Path.unlink, "(lacks {name}|{name} is missing)"),
        (flip, r"{name} has SHA-256 [0-9a-f]{{12}}, its manifest says [0-9a-f]{{12}}$"),
    ],
)
@pytest.mark.parametrize("name", [INDEX, STATE, DATA])
def test_damage_is_one_sentence(folder: Path, name: str, damage: Callable[[Path], None], said: str) -> None:
    saved = step_folder(folder, 3)
    damage(saved / name)
    with pytest.raises(CheckpointError, match=f"^{saved}.*{said.format(name=re.escape(name))}"):
        checkpointer(folder).load(saved, *build())


def test_other_files_are_told_and_not_read(folder: Path, told: Callable[[], list[str]]) -> None:
    saved = step_folder(folder, 3)
    (saved / "README.md").write_text("mine")
    checkpointer(folder).load(saved, *build())
    assert told() == [f"{saved} also holds README.md: not part of the checkpoint, ignored"]


@pytest.mark.parametrize("resume", ["auto", "required"])
def test_resume_goes_back_to_the_newest_sound_one_and_says_so(
    folder: Path, told: Callable[[], list[str]], resume: str
) -> None:
    first, second, third = (step_folder(folder, step) for step in (1, 2, 3))
    flip(third / DATA)
    (second / MANIFEST).unlink()
    resumed, (parts, optimizer) = checkpointer(folder, keep=1), build()
    assert resumed.find(resume) == first
    assert resumed.load(first, parts, optimizer) == {"at": 1}
    assert sorted(text.partition(" is damaged: ")[0] for text in told()) == [str(second), str(third)]
    for text in told():
        assert f"Resuming from {first} instead" in text and "`titan checkpoint rm" in text
        assert f"{DATA} has" in text or f"it lacks {MANIFEST}" in text
    for step, left in ((4, [2, 3, 4]), (3, [2, 3]), (5, [2, 5])):
        resumed.save(step, parts, optimizer, {})
        resumed.close()
        assert steps_in(folder) == left


def test_no_damaged_one_is_gone_on_from(folder: Path) -> None:
    first, second, third = (step_folder(folder, step) for step in (1, 2, 3))
    flip(third / DATA)
    for named in (folder, third):
        with pytest.raises(CheckpointError, match=f"{third} is damaged: {DATA}"):
            checkpointer(folder).find(str(named))
    flip(second / INDEX)
    flip(first / INDEX)
    damaged = {first: INDEX, second: INDEX, third: DATA}
    for resume in ("auto", "required"):
        with pytest.raises(CheckpointError, match="no sound checkpoint is left") as refused:
            checkpointer(folder).find(resume)
        assert all(f"{path} is damaged: {name} has SHA-256" in str(refused.value) for path, name in damaged.items())
    assert checkpointer(folder).find("never") is None


def test_what_was_found_is_verified_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, hashed, saved = manifest.entry_of, [], step_folder(folder, 3)
    monkeypatch.setattr(manifest, "entry_of", lambda file, *more: hashed.append(file.name) or read(file, *more))
    again = checkpointer(folder)
    for _ in range(2):
        assert again.find("auto") == saved
        again.load(saved, *build())
    again.load(saved, *build())
    assert sorted(hashed) == [*[DATA] * 3, *[STATE] * 9, *[INDEX] * 3], "those of all three say which is the newest"
