"""Tokenising once: what comes out, when it is made again, and that a kill leaves nothing half done."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan.contracts import Dataset, Document, option
from titan.data.samples.stream import Stream
from titan.data.tokens import prepare as preparing
from titan.data.tokens import tokenize
from titan.data.tokens.prepare import prepare
from titan.data.tokens.shards import open_shard
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
    return prepare(dataset, BYTES, cache=cache, workers=workers, progress=False)


def text_of(paths: list[Path]) -> list[str]:
    stream = Stream(paths, BYTES.vocab_size)
    bounds = [stream.document(number) for number in range(stream.documents)]
    assert all(stream.read(end - 1, end).tolist() == [BYTES.end] for _, end in bounds)
    return [BYTES.decode(stream.read(start, end).tolist()) for start, end in bounds]


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


def test_text_is_tokenised_once(text: Path, cache: Path) -> None:
    first = made(lines(text), cache)
    before = Lines.reads
    assert made(lines(text), cache) == first
    moved = text.with_name("moved")
    text.rename(moved)
    assert made(lines(moved), cache) == first
    assert Lines.reads == before


def test_all_that_changes_tokens_is_a_new_place(text: Path, cache: Path) -> None:
    places = [made(lines(text), cache), made(lines(text, upper=True), cache)]
    places.append(prepare(lines(text), Bpe(BpeConfig()), cache=cache, workers=1, progress=False))
    changed = text / "3.txt"
    stamp = changed.stat()
    changed.write_text(changed.read_text().replace("3", "8", 1))
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    places.append(made(lines(text), cache))
    assert len({path for paths in places for path in paths}) == 4
    assert "81" in text_of(places[3])


def test_damaged_memory_of_hashes_is_written_anew(text: Path, cache: Path) -> None:
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
    assert [path.name for path in cache.iterdir()] == ["hashes.json"]


def test_leftovers_of_dead_processes_are_swept(text: Path, cache: Path) -> None:
    host = preparing._prefix()
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    for name in (f"{host}{dead}-5", f"{host}{os.getpid()}-5", f"{host}x-{dead}-5"):
        (cache / name).mkdir(parents=True)
    made(lines(text), cache)
    left = {path.name for path in cache.iterdir() if path.name.startswith(".partial")}
    assert left == {f"{host}{os.getpid()}-5", f"{host}x-{dead}-5"}


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
    with pytest.raises(DataError, match=r"dataset 'lines' holds no text: nothing in its 6 files"):
        made(lines(text), cache)
    assert not list(cache.glob("*/"))


def test_unwritable_cache_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot tokenise into the cache .*/file/below"):
        made(lines(text), tmp_path / "file" / "below")


def test_shards_are_taken_as_they_are_and_checked(text: Path, cache: Path) -> None:
    (path,) = made(lines(text), cache)
    taken = Shards(ShardsConfig(path=str(path.parent)))
    assert made(taken, cache / "unused") == [path] and not (cache / "unused").exists()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is cut short"):
        made(taken, cache)
