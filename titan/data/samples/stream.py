"""The token shards of one source, concatenated into one stream."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from titan.data.tokens.shards import Shard
from titan.errors import DataError

Ints = npt.NDArray[np.int64]
MOST_OPEN = 128
"""Shards mapped at once; each holds an open file, and a source may have more shards than a process may open files."""


class Stream:
    """Tokens [0, tokens) and documents [0, documents) of a list of shards. Documents never cross shards; the first one
    of shard i has number first_documents[i]. A shard is opened when it is read: a DataError may come then (see
    `Shard.map`). A pickled copy has no shard open."""

    def __init__(self, shards: Sequence[Shard], vocab_size: int) -> None:
        if not shards:
            raise DataError("a source of samples has no token shards")
        self.shards = shards
        self._vocab_size = vocab_size
        self._tokens = np.cumsum([0] + [shard.tokens for shard in shards], dtype=np.int64)
        self.first_documents = np.cumsum([0] + [shard.documents for shard in shards], dtype=np.int64)
        self.tokens, self.documents = int(self._tokens[-1]), int(self.first_documents[-1])
        self._open: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # maps are the process's own

    def _map(self, shard: int) -> tuple[npt.NDArray[Any], Ints]:
        if shard not in self._open:
            if len(self._open) == MOST_OPEN:
                self._open.popitem(last=False)
            self._open[shard] = self.shards[shard].map()
        self._open.move_to_end(shard)
        mapped: tuple[npt.NDArray[Any], Ints] = self._open[shard]
        return mapped

    def read(self, start: int, stop: int) -> Ints:
        """Tokens [stop - start] from a position of the stream; DataError: an id is beyond the vocabulary."""
        ids = np.empty(stop - start, dtype=np.int64)
        for shard, first, last in self._cover(start, stop):
            base = int(self._tokens[shard])
            ids[base + first - start : base + last - start] = self._map(shard)[0][first:last]
        if ids.size and ids.max() >= self._vocab_size:
            wrong = int(np.argmax(ids >= self._vocab_size))
            shard = int(np.searchsorted(self._tokens, start + wrong, side="right")) - 1
            raise DataError(
                f"shard {self.shards[shard].path}: token {start + wrong - int(self._tokens[shard])} is {ids[wrong]},"
                f" outside the vocabulary of {self._vocab_size}; make the shard with the tokenizer of this job"
            )
        return ids

    def _cover(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last) of the pieces that make up [start, stop)."""
        assert 0 <= start <= stop <= self.tokens
        pieces, shard = [], int(np.searchsorted(self._tokens, start, side="right")) - 1
        while start < stop:
            base, end = int(self._tokens[shard]), int(self._tokens[shard + 1])
            if start < end:
                pieces.append((shard, start - base, min(stop, end) - base))
            start, shard = max(start, end), shard + 1
        return pieces

    def ends(self, start: int, stop: int) -> Ints:
        """Where documents end within (start, stop]: positions after their last tokens, ascending."""
        found = []
        for shard, first, last in self._cover(start, stop):
            ends = self._map(shard)[1]
            low, high = np.searchsorted(ends, [first, last], side="right")
            found.append(ends[low:high] + self._tokens[shard])
        return np.concatenate(found)

    def document(self, number: int) -> tuple[int, int]:
        """(start, end) of a document in the stream."""
        shard = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        ends, base, within = self._map(shard)[1], int(self._tokens[shard]), number - int(self.first_documents[shard])
        return base + (int(ends[within - 1]) if within else 0), base + int(ends[within])

    def lengths(self, shard: int) -> Ints:
        """Tokens of each document of a shard [its documents], the end id counted."""
        return np.diff(self._map(shard)[1], prepend=0)
