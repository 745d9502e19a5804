"""Tokenizers, and datasets of text or token shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan.contracts.base.batch import Document
from titan.contracts.plugin.options import options_of
from titan.contracts.plugin.registry import Plugin
from titan.errors import DataError, by_errno
from titan.paths import expanded


class Delimiters(NamedTuple):
    """Ids around the texts of a model.

    start: id from which the first id of a scored document is predicted.  before, after: ids put around a prompt and a
    scored document, which are scored too.  stops: ids of which each ends a generated text.
    """

    start: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    stops: tuple[int, ...]


class Tokenizer(Plugin, ABC):
    """Text to token ids and back, on the host and offline.

    Called on every rank, in data-preparation workers and in commands, one instance per process; no collectives.
    """

    kind = "tokenizer"
    section = "tokenizer"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def min_vocab_size(self) -> int:
        """Least `ModelSpec.vocab_size` that fits: all ids that a text or a document's end can have are below it."""
        return self.vocab_size

    @property
    @abstractmethod
    def end(self) -> int:
        """Id that ends a document; below `min_vocab_size`."""

    @property
    def delimiters(self) -> Delimiters:
        """Of the model that the tokenizer was published with; by default those of titan's own training: `end` alone.

        `titan convert` writes them. Evaluation and generation read them for weights that titan has not trained, and
        `stops` alone for those that it has.
        """
        return Delimiters(self.end, (), (), (self.end,))

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A string that changes whenever any text would be encoded differently; part of the token cache's key."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end id. Text that looks like a special token is ordinary text.

        Raises a DataError where the tokenizer has no ids for the text; the caller adds the place.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Broken UTF-8 becomes the replacement character, and the end id becomes nothing."""

    def files(self) -> Mapping[str, bytes]:
        """Name -> content of the files that the tokenizer is built from, for a checkpoint to keep; called on rank 0.

        By default the files that options with `path` name. From the copies the same tokenizer is built: an option that
        names a file is given that copy, one that names a folder their folder. A DataError where one cannot be read.
        """
        named = [option for option in options_of(type(self.config)) if option.spec.path]
        values = {option.key: getattr(self.config, option.field) for option in named}
        paths = [expanded(value, f"tokenizer.{key}") for key, value in values.items() if isinstance(value, str)]
        try:
            return {path.name: path.read_bytes() for path in paths if path.is_file()}
        except OSError as error:
            raise by_errno(error, DataError(f"{error.filename} cannot be read: {error.strerror}")) from None

    def hf_files(self) -> Mapping[str, bytes | Mapping[str, Any]] | None:
        """Name -> content or JSON of files from which transformers builds the same tokenizer; None: impossible."""
        return None

    @classmethod
    def from_hf(cls, folder: Path) -> Mapping[str, Any] | None:
        """Values of Config that read the tokenizer of a Hugging Face folder; None when its files are of another kind.

        Called on every tokenizer plugin until one returns values. The folder is not trusted.
        """
        return None


class Dataset(Plugin, ABC):
    """A source of text, or of token shards that are made already. Runs on the host; no collectives."""

    kind = "dataset"
    section = "data"

    @abstractmethod
    def files(self) -> list[Path]:
        """All files that `documents` reads, in one order in every process; their contents are the dataset's identity.

        Called when the run's data is opened: on rank 0, and on the first rank of a node whose cache lacks the tokens.
        Raises a DataError where there is none.
        """

    def documents(self, file: Path) -> Iterator[Document]:
        """The documents of one of the files, in order; read lazily, as a file may be larger than memory.

        Called once per file, in worker processes: the plugin is made again there from its config. Raises a DataError
        that names the place where something cannot be read.
        """
        raise NotImplementedError

    def shards(self) -> list[Path] | None:
        """The token shards, for a dataset that is tokenized already; None (the default) for text."""
        return None
