"""Global sample number -> tokens and labels; the same on every rank and at every layout."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from titan.contracts import IGNORE
from titan.data.samples.order import Mixture, in_epochs, mix
from titan.data.samples.stream import Ints, Stream
from titan.errors import DataError

Packing = Literal["concat", "document_mask", "pad"]
_IN_FINGERPRINT: Mapping[Packing, str] = {"concat": "stream", "document_mask": "isolate", "pad": "pad"}
"""A packing as fingerprints spell it: checkpoints hold them, so this never changes."""


class Sample(NamedTuple):
    """tokens [S], labels [S] (the next token, or IGNORE), documents [S] or None; int64."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


class Windows:
    """A stream cut every S tokens: sample i is tokens [i*S, (i+1)*S), its labels one further on.

    With `isolate`, documents are numbered within the sample, and the last token of one has no label: what follows it is
    the start of a text that its attention may not see.
    """

    def __init__(self, stream: Stream, seq_len: int, *, isolate: bool) -> None:
        self._stream, self._length, self._isolate = stream, seq_len, isolate
        self.samples = max(0, stream.tokens - 1) // seq_len

    def read(self, i: int) -> Sample:
        """Sample i, 0 <= i < `samples`, in the order of the stream."""
        start = i * self._length
        ids = self._stream.read(start, start + self._length + 1)
        tokens, labels = ids[:-1], ids[1:].copy()
        if not self._isolate:
            return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), None)
        ends = self._stream.ends(start, start + self._length) - start
        labels[ends - 1] = IGNORE
        documents = np.searchsorted(ends, np.arange(self._length), side="right")
        return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents))


class Pieces:
    """One document per sample, a longer one in pieces of S labels; what is left over holds the end id, without labels.

    Takes 8 bytes of memory a document.
    """

    def __init__(self, stream: Stream, seq_len: int) -> None:
        self._stream, self._length = stream, seq_len
        self._until: Ints = np.cumsum((stream.lengths() + seq_len - 2) // seq_len)
        self.samples = int(self._until[-1]) if self._until.size else 0

    def read(self, i: int) -> Sample:
        """Sample i, 0 <= i < `samples`, in the order of the stream."""
        number = int(np.searchsorted(self._until, i, side="right"))
        piece = i - (int(self._until[number - 1]) if number else 0)
        start, end = self._stream.document(number)
        start += piece * self._length
        ids = self._stream.read(start, min(start + self._length + 1, end))
        known = ids.size - 1
        tokens = np.full(self._length, ids[-1])  # short pieces are a document's last, so their last id is the end
        labels = np.full(self._length, IGNORE)
        tokens[:known], labels[:known] = ids[:-1], ids[1:]
        return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), None)


class Samples(Dataset[Sample]):
    """All samples of a mixture of sources, in the run's one global order; sample numbers go on for ever.

    sources: (token shards, weight) of each; a source's samples are used once per epoch of its own, in an order seeded
    by (seed, source, epoch), or with `shuffle=False` in the order of the files.

    Raises:
        DataError: a shard cannot be used, a source is too small for one sample, or (when read) an id is beyond the
            vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Sequence[Path], float]],
        *,
        seq_len: int,
        packing: Packing,
        seed: int,
        shuffle: bool,
        vocab_size: int,
    ) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._streams = [Stream(paths, vocab_size) for paths, _ in sources]
        self._cuts = [_cut(stream, seq_len, packing) for stream in self._streams]
        self._mixture = Mixture([weight for _, weight in sources], mix(seed, len(sources)))
        for stream, cut in zip(self._streams, self._cuts, strict=True):
            if cut.samples == 0:
                raise DataError(_too_little(stream, seq_len, packing))
        self.fingerprint = self._identity(seq_len, packing)
        """Of the tokens, the packing and the order: equal exactly when every sample is."""

    def _identity(self, seq_len: int, packing: Packing) -> str:
        parts: list[object] = [seq_len, _IN_FINGERPRINT[packing], self._seed, self._shuffle]
        for stream, count in zip(self._streams, self._mixture.counts, strict=True):
            parts += [count, *(shard.digest for shard in stream.shards)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        """Number of tokens of all sources together, each counted once."""
        return sum(stream.tokens for stream in self._streams)

    def __len__(self) -> int:
        """Samples of all sources, each once."""
        return sum(cut.samples for cut in self._cuts)

    def __getitem__(self, g: int) -> Sample:
        source, index = self._mixture.locate(g)
        cut = self._cuts[source]
        return cut.read(in_epochs(index, cut.samples, key=mix(self._seed, source), shuffle=self._shuffle))


def _cut(stream: Stream, seq_len: int, packing: Packing) -> Windows | Pieces:
    if packing == "pad":
        return Pieces(stream, seq_len)
    return Windows(stream, seq_len, isolate=packing == "document_mask")


def _too_little(stream: Stream, seq_len: int, packing: Packing) -> str:
    needed = "a document of at least 2 tokens" if packing == "pad" else f"at least {seq_len + 1:,} tokens"
    more = len(stream.shards) - 1
    place = f"{stream.shards[0].path}{f' and {more} more' if more else ''}"
    return (
        f"too little text for one sample of seq_len {seq_len:,}: {stream.tokens:,} tokens in {stream.documents:,}"
        f" documents ({place}), {needed} needed"
    )
