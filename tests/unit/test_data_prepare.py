"""Tokenizing once: what comes out, when it is made again, and that a kill leaves nothing half done."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.lines import BYTES, Lines, lines, made, nothing_kept, text_of, while_read
from titan.contracts import Document
from titan.data.tokens import hashes, tokenize, unfinished
from titan.data.tokens import prepare as preparing
from titan.data.tokens.prepare import prepare
from titan.data.tokens.shards import open_shard
from titan.data.tokens.tokenize import Lost
from titan.errors import DataError
from titan.log import log
from titan.plugins.data.shards import Shards
from titan.plugins.tokenizers.bpe import Bpe
from titan.plugins.tokenizers.byte import Byte


def test_documents_come_out_in_order_without_empty_ones(text: Path, cache: Path) -> None:
    expected = [line for file in sorted(text.iterdir()) for line in file.read_text().splitlines() if line]
    assert len(expected) == 6 * 19
    assert text_of(made(lines(text), cache)) == expected


@pytest.mark.parametrize("workers", [2, 5])
def test_threads_change_nothing(text: Path, cache: Path, tmp_path: Path, workers: int) -> None:
    one, many = made(lines(text), cache), made(lines(text), tmp_path / "other", workers)
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in many]


def test_shards_are_bounded(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = text_of(made(lines(text), cache))
    monkeypatch.setattr(tokenize, "SHARD_TOKENS", 200)
    monkeypatch.setattr(tokenize, "UNIT_BYTES", (500, 500))
    shutil.rmtree(cache)
    paths = made(lines(text), cache)
    assert len(paths) > 12 and all(open_shard(path).tokens <= 200 for path in paths)
    assert text_of(paths) == whole


def test_units_depend_on_sizes_alone() -> None:
    files = [Path(str(n)) for n in range(5)]
    least, most = tokenize.UNIT_BYTES
    assert tokenize.units(files, [least // 2] * 5) == [(0, tuple(files[:2])), (1, tuple(files[2:4])), (2, (files[4],))]
    assert [len(unit) for _, unit in tokenize.units(files, [most * 100] * 5)] == [1] * 5


def test_text_is_tokenized_once(text: Path, cache: Path) -> None:
    first = made(lines(text), cache)
    before = Lines.reads
    assert made(lines(text), cache) == first
    moved = text.with_name("moved")
    text.rename(moved)
    assert made(lines(moved), cache) == first
    assert Lines.reads == before


def test_all_that_changes_tokens_is_a_new_place(text: Path, cache: Path) -> None:
    places = [made(lines(text), cache), made(lines(text, upper=True), cache)]
    by_bpe = prepare(lines(text), Bpe(Bpe.Config()), cache=cache, workers=1, progress=False)
    places.append([shard.path for shard in by_bpe])
    changed = text / "3.txt"
    stamp = changed.stat()
    changed.write_text(changed.read_text().replace("3", "8", 1))
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    places.append(made(lines(text), cache))
    assert len({path for paths in places for path in paths}) == 4
    assert "81" in text_of(places[3])


def test_a_fault_half_way_leaves_nothing(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lines.documents

    def broken(self: Lines, file: Path) -> Iterator[Document]:
        if file.name == "4.txt":
            raise DataError(f"{file}: no")
        return whole(self, file)

    monkeypatch.setattr(Lines, "documents", broken)
    with pytest.raises(DataError, match=r"4\.txt: no"):
        made(lines(text), cache)
    assert nothing_kept(cache)


def test_a_cache_that_is_read_only_and_complete_is_enough(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = made(lines(text), cache)
    (cache / "hashes.json").unlink(missing_ok=True)
    monkeypatch.setattr(hashes, "clock_ns", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    assert made(lines(text), cache) == shards
    assert not (cache / "hashes.json").exists()


def test_containers_with_one_host_name_and_one_pid_do_not_meet(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    beside: list[Path] = []
    while_read(monkeypatch, lambda: beside.extend(made(lines(text, upper=True), cache)))
    assert made(lines(text), cache) != beside != []
    assert not list(cache.glob(".partial*"))


def left(path: Path, hours: float) -> Path:
    """A folder in the cache with a shard that was begun so long ago."""
    path.mkdir(parents=True)
    (path / "unit-0.bin.partial").touch()
    then = time.time() - 3600 * hours
    for one in (path / "unit-0.bin.partial", path):
        os.utime(one, (then, then))
    return path


def test_leftovers_are_swept_by_age_whoever_made_them(text: Path, cache: Path) -> None:
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    host = socket.gethostname()
    at_work = [left(cache / f".partial-{host}-{dead}-5", 23), left(cache / f".partial-{host}x-1-5", 30)]
    (at_work[1] / "unit-1.bin.partial").touch()
    for name in (f".partial-{host}-{os.getpid()}-5", ".partial-other-0123456789abcdef"):
        left(cache / name, 25)
    file = cache / ".partial-other-17"
    file.touch()
    os.utime(file, (0, 0))
    made(lines(text), cache)
    assert {path for path in cache.iterdir() if "partial" in path.name} == set(at_work)


def test_a_leftover_that_cannot_be_removed_is_named(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left(cache / ".partial-other-1", 25)
    busy = OSError(errno.EBUSY, "Device or resource busy")
    monkeypatch.setattr(unfinished.shutil, "rmtree", Mock(side_effect=busy))
    unfinished.sweep(cache)
    assert "/.partial-other-1 cannot be removed: Device or resource busy" in caplog.text


def test_who_slept_for_days_finds_its_folder_gone_and_publishes_nothing(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_read(monkeypatch, lambda: shutil.rmtree(*cache.glob(".partial*")))
    with pytest.raises(DataError, match=r"cannot tokenize into the cache .*No such file"):
        made(lines(text), cache)
    assert nothing_kept(cache)


def test_others_may_read_the_cache(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "clock_ns", lambda folder: unfinished.clock_ns(folder) + 3 * 10**9)
    before = os.umask(0o022)
    try:
        (shard,) = made(lines(text), cache)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (cache / "hashes.json", shard.parent, shard)}
    assert list(modes.values()) == ["0o644", "0o755", "0o644"]


def test_who_comes_second_takes_the_firsts_work(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = preparing.sync

    def overtaken(path: Path) -> None:
        monkeypatch.setattr(preparing, "sync", sync)
        winner.extend(made(lines(text), cache))
        sync(path)

    winner: list[Path] = []
    monkeypatch.setattr(preparing, "sync", overtaken)  # the first is that of the index, before the renaming
    assert made(lines(text), cache) == winner != []
    assert not list(cache.glob(".partial*"))


def test_a_folder_that_lost_a_shard_is_refused(text: Path, cache: Path) -> None:
    (path,) = made(lines(text), cache)
    path.unlink()
    with pytest.raises(DataError, match=r"0 of 1 shards; delete the folder"):
        made(lines(text), cache)


class Letters(Byte):
    """Bytes of ASCII alone: anything else vanishes. Tildes have no ids."""

    def encode(self, text: str) -> list[int]:
        if "~" in text:
            raise DataError("~ has no ids")
        return super().encode(text.encode("ascii", errors="ignore").decode())


def test_what_a_tokenizer_loses_is_counted_and_limited(
    text: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(folder: Path, workers: int, max_lost: float) -> Lost:
        letters = Letters(Byte.Config())
        shards = prepare(lines(text), letters, cache=folder, workers=workers, progress=False, max_lost=max_lost)
        return preparing.loss_in(shards[0].path.parent)

    assert looked_at(cache, 1, 0.0).lost == 0
    composed = Lost()
    composed.look("e\u0301", "é")
    assert (composed.sampled, composed.lost) == (3, 0), "the same text, in another Unicode form"
    (text / "5.txt").write_text("a\n" * 9 + "é東é\n")
    monkeypatch.setattr(tokenize, "UNIT_BYTES", (1, 1))  # a unit a file
    found = looked_at(cache, 1, 0.1)
    assert found.lost == 7 and found.characters == {"é": 2, "東": 1} and 0.001 < found.share < 0.02
    assert found == looked_at(cache / "threads", 3, 0.1), "the sample is the same"
    with pytest.raises(DataError, match=r"are lost: 'é' 2 times, '東' 1 times; use a tok.*set data.max_lost above 0.0"):
        looked_at(cache, 1, 0.001)
    monkeypatch.setattr(tokenize, "PIECE", 2)
    monkeypatch.setattr(tokenize, "PIECE_EVERY", 4)
    (text / "5.txt").write_text("a" * 8 + "é" * 4)
    assert looked_at(cache / "long", 1, 0.1).lost == 4, "the first two of each four characters"
    (text / "5.txt").write_text("a\n" * 9 + "é\n")
    monkeypatch.setattr(tokenize, "SAMPLE_FIRST", 2)
    assert looked_at(cache / "other", 1, 0.0).lost == 0, "that document is not in the sample"


def test_a_text_without_ids_is_named_by_its_place(text: Path, cache: Path) -> None:
    (text / "3.txt").write_text("a\n~\n")
    with pytest.raises(DataError, match=r"3\.txt: ~ has no ids"):
        prepare(lines(text), Letters(Byte.Config()), cache=cache, workers=2, progress=False)


def test_empty_files_are_counted_and_passed_over(
    text: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = text_of(made(lines(text), cache))
    for name in ("empty", "also"):
        (text / f"{name}.txt").touch()
    monkeypatch.setattr(log, "propagate", True)
    assert text_of(made(lines(text), cache)) == whole
    assert "dataset 'lines': 2 of 8 files are empty, as " in caplog.text


def test_no_text_at_all_is_an_error(text: Path, cache: Path) -> None:
    for file in text.iterdir():
        file.write_text("\n\n")
    with pytest.raises(DataError, match=r"dataset 'lines' holds no text: its 6 files give no token"):
        made(lines(text), cache)
    assert not list(cache.glob("*/"))


def test_unwritable_cache_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot tokenize into the cache .*/file/below"):
        made(lines(text), tmp_path / "file" / "below")


def test_shards_are_taken_as_they_are_and_checked(text: Path, cache: Path) -> None:
    (path,) = made(lines(text), cache)
    taken = Shards(Shards.Config(path=str(path.parent)))
    assert made(taken, cache / "unused") == [path] and not (cache / "unused").exists()
    with pytest.raises(DataError, match=r"are of the tokenizer with fingerprint utf-8 bytes, 256, but .* 'bpe' with "):
        prepare(taken, Bpe(Bpe.Config()), cache=cache, workers=1, progress=False)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is cut short"):
        made(taken, cache)


def test_a_node_whose_cache_is_elsewhere_is_told_so(text: Path, tmp_path: Path) -> None:
    """Its shards are those of rank 0, but rank 0 sends the paths that it found."""
    dataset = lines(text)
    shards = prepare(dataset, BYTES, cache=tmp_path / "0", workers=1, progress=False)
    found = [replace(shard, path=Path("/absent", shard.path.name)) for shard in shards]
    with pytest.raises(DataError, match=r"token shards in .*/1/\w+, the node of rank 0 in /absent; set data\.cache to"):
        preparing.prepare_node(dataset, BYTES, found, cache=tmp_path / "1", workers=1)
