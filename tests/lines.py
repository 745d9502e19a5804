"""A dataset of lines of text, tokenized by bytes, for tests of the cache of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan.contracts import Dataset, Document, option
from titan.data.samples.stream import Stream
from titan.data.tokens.prepare import prepare
from titan.data.tokens.shards import open_shards
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


def while_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, when four of six files have been read."""
    whole = Lines.documents

    def acting(self: Lines, file: Path) -> Iterator[Document]:
        if file.name == "4.txt":
            monkeypatch.setattr(Lines, "documents", whole)
            act()
        return whole(self, file)

    monkeypatch.setattr(Lines, "documents", acting)
