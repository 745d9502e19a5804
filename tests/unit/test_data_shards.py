"""Token shards: what is written is read, and what is broken is refused with its place."""

from pathlib import Path

import numpy as np
import pytest

from titan.data.samples.stream import Stream
from titan.data.tokens.shards import HEADER_BYTES, Shard, ShardWriter, open_shard, open_shards
from titan.errors import DataError

DOCUMENTS = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0]]


def write(path: Path, documents: list[list[int]], vocab_size: int = 100) -> Path:
    with ShardWriter(path, vocab_size) as writer:
        for ids in documents:
            writer.add(ids)
    return path


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_round_trip(tmp_path: Path, vocab_size: int, width: int) -> None:
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    shard = open_shard(write(tmp_path / "a.bin", documents, vocab_size))
    tokens, ends = shard.map()
    assert shard.width == width
    assert (shard.tokens, shard.documents) == (14, 4)
    assert tokens.tolist() == [number for ids in documents for number in ids]
    assert ends.tolist() == [4, 6, 12, 14]
    shard.verify()


def test_writer_says_what_the_header_says(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.bin", 100)
    writer.add([1, 0])
    assert writer.close() == open_shard(tmp_path / "a.bin")


def test_nothing_has_the_name_before_it_is_complete(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a.bin", 100) as writer:
        writer.add([1, 0])
        assert not (tmp_path / "a.bin").exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"document 1 of .*a\.bin has 2 ids, from 0 to 100; the vocabulary has 100"):
        write(tmp_path / "a.bin", [[1, 0], [100, 0]])
    assert list(tmp_path.iterdir()) == []


def test_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", DOCUMENTS)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.bin"):
            open_shard(path)
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=r"a\.bin is cut short: 109 bytes, but 12 tokens in 3 documents need 112"):
        open_shard(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match=r"is too long: 113 bytes"):
        open_shard(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"a\.bin is empty"),
        (b"PK\x03\x04 something else altogether", r"a\.bin is no token shard: it starts with b'PK"),
        (b"TITANTOK" + bytes(20), r"a\.bin is cut short: 28 bytes, its header alone has 64"),
        (b"TITANTOK" + b"\x09" + bytes(55), r"a\.bin has version 9 .* reads version 1"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_shard(tmp_path / "a.bin")


def test_verify_finds_one_changed_bit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", DOCUMENTS)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.bin is damaged"):
        open_shard(path).verify()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, r"a\.bin cannot be read: No such file"),
        (b"", r"a\.bin is empty"),
        ([[1, 2, 3, 0]], r"a\.bin is not the file whose header was read at the start: 4 tokens .*at the start 12 with"),
        (
            [*DOCUMENTS[:2], [5, 6, 7, 8, 7, 0]],
            r"a\.bin is not the file whose header .*: 12 tokens .*; restore the file",
        ),
        (-3, r"a\.bin is cut short: 109 bytes, but 12 tokens in 3 documents need 112"),
    ],
    ids=["absent", "empty", "another", "same size", "cut short"],
)
def test_a_shard_that_is_no_longer_what_its_header_said_is_not_mapped(
    tmp_path: Path, fault: bytes | int | list[list[int]] | None, words: str
) -> None:
    """As on a node that sees other files than the one that read the headers."""
    path = write(tmp_path / "a.bin", DOCUMENTS)
    shard, whole = open_shard(path), path.read_bytes()
    path.unlink()
    if isinstance(fault, list):
        write(path, fault)
    elif fault is not None:
        path.write_bytes(fault if isinstance(fault, bytes) else whole[:fault])
    with pytest.raises(DataError, match=words):
        shard.map()


def test_the_first_fault_of_many_shards_is_told(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n:02}.bin", DOCUMENTS) for n in range(40)]
    assert [shard.path for shard in open_shards(paths)] == paths
    for number in (17, 30):
        paths[number].unlink()
    with pytest.raises(DataError, match=r"17\.bin cannot be read: No such file"):
        open_shards(paths)


def stream(folder: Path, *groups: list[list[int]], vocab_size: int = 100) -> Stream:
    return Stream([open_shard(write(folder / f"{n}.bin", group)) for n, group in enumerate(groups)], vocab_size)


def test_stream_reads_across_shards(tmp_path: Path) -> None:
    flat = [number for ids in DOCUMENTS for number in ids]
    joined = stream(tmp_path, DOCUMENTS[:1], [], DOCUMENTS[1:2], DOCUMENTS[2:])
    assert (joined.tokens, joined.documents) == (12, 3)
    for start in range(13):
        for stop in range(start, 13):
            assert joined.read(start, stop).tolist() == flat[start:stop]
            if stop > start:
                assert joined.ends(start, stop).tolist() == [end for end in (4, 6, 12) if start < end <= stop]
    assert [joined.document(number) for number in range(3)] == [(0, 4), (4, 6), (6, 12)]
    assert [joined.lengths(shard).tolist() for shard in range(4)] == [[4], [], [2], [6]]
    assert [joined.first_documents[shard] for shard in range(4)] == [0, 1, 1, 2]


def test_stream_names_an_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    joined = stream(tmp_path, [[1, 2, 0]], [[3, 4, 50, 0]], vocab_size=50)
    assert joined.read(0, 5).tolist() == [1, 2, 0, 3, 4]
    with pytest.raises(DataError, match=r"1\.bin: token 2 is 50, outside the vocabulary of 50"):
        joined.read(1, 7)


def test_stream_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.data.samples.stream.MOST_OPEN", 2)
    mapped: list[str] = []
    original = Shard.map
    monkeypatch.setattr(Shard, "map", lambda shard: (mapped.append(shard.path.stem), original(shard))[1])
    joined = stream(tmp_path, *([[n, 0]] for n in range(4)))
    assert np.array_equal(joined.read(0, 8), [0, 0, 1, 0, 2, 0, 3, 0])
    joined.read(4, 8)
    assert mapped == ["0", "1", "2", "3"]
    joined.read(0, 1)
    assert mapped[4:] == ["0"]
