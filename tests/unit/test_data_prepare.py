"""Tokenizing once: what comes out, when it is made again, and that a kill leaves nothing half done."""

import base64
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from titan.contracts import Dataset, Document, option
from titan.data.samples.stream import Stream
from titan.data.tokens import hashes, tokenize, unfinished
from titan.data.tokens import prepare as preparing
from titan.data.tokens.hashes import Mark
from titan.data.tokens.prepare import prepare
from titan.data.tokens.shards import open_shard, open_shards
from titan.errors import DataError
from titan.plugins.data.shards import Config as ShardsConfig
from titan.plugins.data.shards import Shards
from titan.plugins.tokenizers.bpe import Bpe
from titan.plugins.tokenizers.bpe import Config as BpeConfig
from titan.plugins.tokenizers.byte import Byte
from titan.plugins.tokenizers.byte import Config as ByteConfig

BYTES = Byte(ByteConfig())


@dataclass(frozen=True, kw_only=True)
class LinesConfig:
    path: str = option("", "a folder")
    upper: bool = option(False, "shout")


class Lines(Dataset):
    """Every line of every file of a folder is a document."""

    name = "lines"
    Config = LinesConfig
    reads = 0

    def files(self) -> list[Path]:
        return sorted(Path(self.config.path).iterdir())

    def documents(self, file: Path) -> Iterator[Document]:
        type(self).reads += 1
        for line in file.read_text().splitlines():
            yield Document(line.upper() if self.config.upper else line, str(file))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text("".join(f"{number}{line}" * line + "\n" for line in range(20)))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def lines(folder: Path, **options: bool) -> Lines:
    return Lines(LinesConfig(path=str(folder), **options))


def made(dataset: Dataset, cache: Path, workers: int = 1) -> list[Path]:
    return [shard.path for shard in prepare(dataset, BYTES, cache=cache, workers=workers, progress=False)]


def text_of(paths: list[Path]) -> list[str]:
    stream = Stream(open_shards(paths), BYTES.vocab_size)
    bounds = [stream.document(number) for number in range(stream.documents)]
    assert all(stream.read(end - 1, end).tolist() == [BYTES.end] for _, end in bounds)
    return [BYTES.decode(stream.read(start, end).tolist()) for start, end in bounds]


def nothing_kept(cache: Path) -> bool:
    """Whether a cache holds neither tokens nor a part of them."""
    return {path.name for path in cache.iterdir()} <= {"hashes.json"}


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
    by_bpe = prepare(lines(text), Bpe(BpeConfig()), cache=cache, workers=1, progress=False)
    places.append([shard.path for shard in by_bpe])
    changed = text / "3.txt"
    stamp = changed.stat()
    changed.write_text(changed.read_text().replace("3", "8", 1))
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    places.append(made(lines(text), cache))
    assert len({path for paths in places for path in paths}) == 4
    assert "81" in text_of(places[3])


def test_damaged_memory_of_hashes_is_written_anew(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "clock_ns", lambda folder: unfinished.clock_ns(folder) + 3 * 10**9)
    first = made(lines(text), cache)
    for damage in (b"", b"{", b"[1]", b'{"a": 1}', b"\xff"):
        (cache / "hashes.json").write_bytes(damage)
        assert made(lines(text), cache) == first
    assert len(json.loads((cache / "hashes.json").read_text())) == 6


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


def while_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, when four of six files have been read."""
    whole = Lines.documents

    def acting(self: Lines, file: Path) -> Iterator[Document]:
        if file.name == "4.txt":
            monkeypatch.setattr(Lines, "documents", whole)
            act()
        return whole(self, file)

    monkeypatch.setattr(Lines, "documents", acting)


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


def test_a_cache_that_is_read_only_and_complete_is_enough(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = made(lines(text), cache)
    (cache / "hashes.json").unlink(missing_ok=True)

    def refuse(folder: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(hashes, "clock_ns", refuse)
    assert made(lines(text), cache) == shards
    assert not (cache / "hashes.json").exists()


def test_what_two_remember_at_once_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node replaces the memory by what it had read before ours was there."""
    memory, replace, others = tmp_path / "hashes.json", os.replace, ['{"theirs": "1"}']

    def late(partial: Path, target: Path) -> None:
        replace(partial, target)
        if others:
            target.write_text(others.pop())

    monkeypatch.setattr(os, "replace", late)
    hashes._remember(memory, {"ours": "2"})
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


def test_what_an_earlier_version_remembers_is_not_trusted(text: Path, cache: Path) -> None:
    """It took the times of a file, hashed it later, and knew it again by a time that can be set back."""
    whole = text_of(made(lines(text), cache.with_name("other")))
    status = {file: file.stat() for file in text.iterdir()}
    known = {f"{file.absolute()}|{found.st_size}|{found.st_mtime_ns}": "0" * 64 for file, found in status.items()}
    cache.mkdir()
    (cache / "hashes.json").write_text(json.dumps(known))
    first = made(lines(text), cache)
    (cache / "hashes.json").unlink()
    assert made(lines(text), cache) == first and text_of(first) == whole


def test_a_tokenizer_that_changes_before_a_process_reads_it_is_refused(text: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    recipe = tokenize._Recipe.of(lines(text), Bpe(BpeConfig(path=str(ranks))))
    assert recipe.make()[1].vocab_size == 257
    with ranks.open("ab") as file:
        file.write(base64.b64encode(b"ab") + b" 256\n")
    with pytest.raises(DataError, match=r"tokenizer 'bpe': its file changed while text was tokenized; no tokens were"):
        recipe.make()


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
    file = cache / "hashes.json.17.partial"
    file.touch()
    os.utime(file, (0, 0))
    made(lines(text), cache)
    assert {path for path in cache.iterdir() if "partial" in path.name} == set(at_work)


def test_a_leftover_that_cannot_be_removed_is_named(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left(cache / ".partial-other-1", 25)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(unfinished.shutil, "rmtree", busy)
    unfinished.sweep(cache)
    assert "/.partial-other-1 cannot be removed: Device or resource busy" in caplog.text


def test_who_slept_for_days_finds_its_folder_gone_and_publishes_nothing(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swept() -> None:
        [folder] = cache.glob(".partial*")
        shutil.rmtree(folder)

    while_read(monkeypatch, swept)
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
    seal = preparing._seal

    def overtaken(partial: Path, dataset: Dataset, files: int) -> None:
        seal(partial, dataset, files)
        monkeypatch.setattr(preparing, "_seal", seal)
        winner.extend(made(lines(text), cache))

    winner: list[Path] = []
    monkeypatch.setattr(preparing, "_seal", overtaken)
    assert made(lines(text), cache) == winner != []
    assert not list(cache.glob(".partial*"))


def test_a_folder_that_lost_a_shard_is_refused(text: Path, cache: Path) -> None:
    (path,) = made(lines(text), cache)
    path.unlink()
    with pytest.raises(DataError, match=r"0 of 1 shards; delete the folder"):
        made(lines(text), cache)


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
    taken = Shards(ShardsConfig(path=str(path.parent)))
    assert made(taken, cache / "unused") == [path] and not (cache / "unused").exists()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is cut short"):
        made(taken, cache)


def test_a_node_whose_cache_is_elsewhere_is_told_so(text: Path, tmp_path: Path) -> None:
    """Its shards are those of rank 0, but rank 0 sends the paths that it found."""
    dataset = lines(text)
    found = [
        replace(shard, path=Path("/absent", shard.path.name))
        for shard in prepare(dataset, BYTES, cache=tmp_path / "0", workers=1, progress=False)
    ]
    with pytest.raises(DataError, match=r"token shards in .*/1/\w+, the node of rank 0 in /absent; set data\.cache to"):
        preparing.prepare_node(dataset, BYTES, found, cache=tmp_path / "1", workers=1)
