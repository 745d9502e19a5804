"""Text and token ids: tokenizers, and sources of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.contracts.base.batch import Document
from titan.contracts.base.registry import Plugin


class Tokenizer(Plugin, ABC):
    """Text to token ids and back, offline."""

    kind = "tokenizer"
    section = "tokenizer"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    @abstractmethod
    def end(self) -> int:
        """Id that ends a document."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever any text would be encoded otherwise; part of the key of tokenized data."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end id. Text that looks like a special token is ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; broken UTF-8 becomes the replacement character, the end id nothing."""

    def hf_files(self) -> Mapping[str, Any] | None:
        """File name -> JSON value of the files with which transformers builds this very tokenizer; None: it cannot."""
        return None

    @classmethod
    def from_hf(cls, folder: Path) -> Mapping[str, Any] | None:
        """Values of Config that read a Hugging Face folder's tokenizer; None when its files are not of this kind."""
        return None


class Dataset(Plugin, ABC):
    """A source of text, or of tokens that somebody has already made."""

    kind = "dataset"
    section = "data"

    @abstractmethod
    def files(self) -> list[Path]:
        """The files read, in a fixed order. Their contents are the dataset's identity.

        Name every file that `documents` reads: these alone are watched for changes while they are tokenized.

        Raises:
            DataError: there is none.
        """

    def documents(self, file: Path) -> Iterator[Document]:
        """The documents of one of the files, in order. Runs in worker processes.

        Raises:
            DataError: something cannot be read; names the place.
        """
        raise NotImplementedError

    def shards(self) -> list[Path] | None:
        """The token shards, for a dataset that is tokenized already; None (the default) for text."""
        return None
