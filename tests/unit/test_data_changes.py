"""Files that change: seen when they are hashed or read, and never tokenized into the cache."""

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lines import lines, made, nothing_kept, text_of, while_read
from titan.data.tokens import hashes, tokenize, unfinished
from titan.data.tokens.hashes import Mark
from titan.errors import DataError
from titan.plugins.tokenizers.bpe import Bpe


def test_damaged_memory_of_hashes_is_written_anew(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "clock_ns", lambda folder: unfinished.clock_ns(folder) + 3 * 10**9)
    first = made(lines(text), cache)
    for damage in (b"", b"{", b"[1]", b'{"a": 1}', b"\xff"):
        (cache / "hashes.json").write_bytes(damage)
        assert made(lines(text), cache) == first
    assert len(json.loads((cache / "hashes.json").read_text())) == 6


def other_content(file: Path, mtime_ns: int = 0) -> None:
    """As many bytes, but others; optionally with another time of change, or the same."""
    before = file.stat()
    file.write_text(file.read_text().replace(file.stem, "X"))
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, mtime_ns or before.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "grows": (lambda file: file.write_text(file.read_text() + "more\n"), "545 bytes before, 550 now"),
    "another time": (lambda file: other_content(file, 10**18), r"modified 20.* before, 2001-09-09T01:46:40"),
    "time set back": (other_content, "same size and mtime, but another SHA-256"),
    "replaced": (
        lambda file: other_content(Path(shutil.copy2(file, file.with_name("x"))).rename(file)),
        "same size and mtime, but another SHA-256",
    ),
}


@pytest.mark.parametrize("name", ["2.txt", "5.txt"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(
    text: Path, cache: Path, change: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was read already, and one that was not: the cache is shared, and its folder named by what was hashed."""
    whole = text_of(made(lines(text), cache.with_name("other")))
    act, said = CHANGES[change]
    file = text / name
    content = file.read_bytes()
    while_read(monkeypatch, lambda: act(file))
    with pytest.raises(
        DataError, match=rf"{name} changed while the dataset was tokenized: {said}.*; no tokens were kept"
    ):
        made(lines(text), cache)
    assert nothing_kept(cache)
    file.write_bytes(content)
    assert text_of(made(lines(text), cache)) == whole


def test_another_mode_is_no_other_content(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup that links or chmods the files changes their ctime alone."""
    while_read(monkeypatch, lambda: (text / "2.txt").chmod(0o600))
    assert made(lines(text), cache)


def test_an_old_file_whose_time_is_set_back_is_read_again(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ctime alone tells; none of the files is young enough to be hashed again anyway."""
    monkeypatch.setattr(hashes, "RACY_S", -3600)
    while_read(monkeypatch, lambda: other_content(text / "2.txt"))
    with pytest.raises(DataError, match=r"2\.txt changed .*: same size and mtime, but another SHA-256"):
        made(lines(text), cache)


def test_a_time_in_the_future_is_a_time(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync and tar set the mtime of another machine's clock; who wrote when is told by ctime."""
    for file in text.iterdir():
        os.utime(file, ns=(0, 2**62))
    monkeypatch.setattr(hashes, "RACY_S", -3600)
    made(lines(text), cache)
    assert len(json.loads((cache / "hashes.json").read_bytes())) == 6


def test_what_two_remember_at_once_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node replaces the memory by what it had read before ours was there."""
    memory, replace, others = tmp_path / "hashes.json", os.replace, ['{"theirs": "1"}']

    def late(partial: Path, target: Path) -> None:
        replace(partial, target)
        if others:
            target.write_text(others.pop())

    monkeypatch.setattr(os, "replace", late)
    hashes.remember(memory, {"ours": "2"})
    assert json.loads(memory.read_bytes()) == {"ours": "2", "theirs": "1"}


def test_a_file_that_goes_while_it_is_read_is_named(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    while_read(monkeypatch, (text / "2.txt").unlink)
    with pytest.raises(DataError, match=r"2\.txt cannot be read: No such file"):
        made(lines(text), cache)
    assert nothing_kept(cache)


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashes.hashlib.file_digest

    def slow(file: Any, name: str) -> Any:
        with Path(file.name).open("a") as same:
            same.write("more")
        return digest(file, name)

    monkeypatch.setattr(hashes.hashlib, "file_digest", slow)
    with pytest.raises(DataError, match=r"\d\.txt changed .* bytes before, .* now"):
        made(lines(text), cache)
    assert nothing_kept(cache)


def test_a_file_that_comes_while_others_are_read_is_of_the_next_run(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_read(monkeypatch, lambda: (text / "6.txt").write_text("late\n"))
    first = made(lines(text), cache)
    assert "late" not in text_of(first)
    second = made(lines(text), cache)
    assert second != first and text_of(second) == [*text_of(first), "late"]


def test_a_change_whose_time_was_set_back_is_seen(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "clock_ns", lambda folder: unfinished.clock_ns(folder) + 3 * 10**9)
    first = made(lines(text), cache)
    other_content(text / "3.txt")
    assert made(lines(text), cache) != first


@pytest.mark.parametrize("young", [True, False])
def test_files_are_remembered_only_once_their_times_can_tell(
    text: Path, cache: Path, young: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system all of whose files were changed at one time, as far as it can tell."""
    cache.mkdir()
    seen_ns = unfinished.clock_ns(cache) + (3600 if young else -3) * 10**9
    monkeypatch.setattr(Mark, "of", lambda status: Mark(status.st_size, seen_ns, seen_ns))
    first = made(lines(text), cache)
    assert (cache / "hashes.json").exists() != young
    other_content(text / "3.txt")
    assert (made(lines(text), cache) != first) == young
    if young:
        shutil.rmtree(cache)
        while_read(monkeypatch, lambda: other_content(text / "2.txt"))
        with pytest.raises(DataError, match=r"2\.txt changed .*: same size and mtime, but another SHA-256;"):
            made(lines(text), cache)


def test_a_tokenizer_that_changes_before_a_process_reads_it_is_refused(text: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    plugins = lines(text), Bpe(Bpe.Config(path=str(ranks)))
    recipe = tokenize.Recipe(tuple((type(plugin), plugin.config) for plugin in plugins), plugins[1].fingerprint)
    assert recipe.make()[1].vocab_size == 257
    with ranks.open("ab") as file:
        file.write(base64.b64encode(b"ab") + b" 256\n")
    with pytest.raises(DataError, match=r"tokenizer 'bpe': its file changed while text was tokenized; no tokens were"):
        recipe.make()
