"""Global sample number -> tokens and labels; the same on every rank and at every layout."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from titan.contracts import IGNORE, copy_to
from titan.data.samples.order import Mixture, in_epochs, mix
from titan.data.samples.stream import Ints, Stream
from titan.data.tokens.shards import Shard
from titan.errors import DataError

Source = tuple[Sequence[Shard], float]  # token shards, and their weight in the mixture

Packing = Literal["concat", "document_mask", "pad"]


class Sample(NamedTuple):
    """tokens [S], labels [S] (the next token, or IGNORE), documents [S] or None; int64. length: tokens that are no
    padding, which follows them; None where the packing never pads."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
    length: int | None = None


Columns = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""tokens, labels, documents and lengths of a micro batch, as `Batch` has them."""


def stacked(samples: Sequence[Sample]) -> Columns:
    """A micro batch of samples of one packing."""
    documents = [sample.documents for sample in samples if sample.documents is not None]
    lengths = [sample.length for sample in samples if sample.length is not None]
    return (
        torch.stack([sample.tokens for sample in samples]),
        torch.stack([sample.labels for sample in samples]),
        torch.stack(documents) if documents else None,
        torch.tensor(lengths) if lengths else None,
    )


def to_device(columns: Columns, device: torch.device) -> Columns:
    """Copies on the device; from pinned memory the host does not wait for them."""
    return each(columns, lambda column: copy_to(column, device))


def each(columns: Columns, change: Callable[[Tensor], Tensor]) -> Columns:
    """The columns, those that are there changed."""
    tokens, labels, *others = columns
    documents, lengths = (None if column is None else change(column) for column in others)
    return change(tokens), change(labels), documents, lengths


class Windows:
    """A stream cut every S tokens: sample i is tokens [i*S, (i+1)*S), its labels one further on. With `isolate`,
    documents are numbered within the sample, and the last token of one has no label: what follows it is the start of a
    text that its attention may not see."""

    def __init__(self, stream: Stream, seq_len: int, *, isolate: bool) -> None:
        self._stream, self._length, self._isolate = stream, seq_len, isolate
        self.samples = max(0, stream.tokens - 1) // seq_len

    def read(self, i: int) -> Sample:
        """Sample i, 0 <= i < `samples`, in the order of the stream."""
        start = i * self._length
        ids = self._stream.read(start, start + self._length + 1)
        tokens, labels = ids[:-1], ids[1:].copy()
        if not self._isolate:
            return Sample(torch.from_numpy(tokens), torch.from_numpy(labels))
        ends = self._stream.ends(start, start + self._length) - start
        labels[ends - 1] = IGNORE
        documents = np.searchsorted(ends, np.arange(self._length), side="right")
        return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents))


class Pieces:
    """One document per sample, a longer one in pieces of S labels; what is left over holds the end id, without labels.
    The end id of a document is the label of its last token, and no token itself: `length` counts labels.

    Maps every shard once to count its pieces. A pickled copy has the counts, and maps a shard when it is read. Takes 8
    bytes of memory per document of the shards that were read.
    """

    def __init__(self, stream: Stream, seq_len: int) -> None:
        self._stream, self._length = stream, seq_len
        counts = [int(until[-1]) if (until := self._count(shard)).size else 0 for shard in range(len(stream.shards))]
        self._before: Ints = np.cumsum([0, *counts])
        self._until: dict[int, Ints] = {}
        self.samples = int(self._before[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_until": {}}

    def _count(self, shard: int) -> Ints:
        """Pieces of a shard up to the end of each of its documents [documents]."""
        return np.cumsum((self._stream.lengths(shard) + self._length - 2) // self._length)

    def read(self, i: int) -> Sample:
        """Sample i, 0 <= i < `samples`, in the order of the stream."""
        shard = int(np.searchsorted(self._before, i, side="right")) - 1
        if shard not in self._until:
            self._until[shard] = self._count(shard)
        until = self._until[shard]
        within = i - int(self._before[shard])
        number = int(np.searchsorted(until, within, side="right"))
        piece = within - (int(until[number - 1]) if number else 0)
        start, end = self._stream.document(int(self._stream.first_documents[shard]) + number)
        start += piece * self._length
        ids = self._stream.read(start, min(start + self._length + 1, end))
        known = ids.size - 1
        tokens = np.full(self._length, ids[-1])  # short pieces are a document's last, so their last id is the end
        labels = np.full(self._length, IGNORE)
        tokens[:known], labels[:known] = ids[:-1], ids[1:]
        return Sample(torch.from_numpy(tokens), torch.from_numpy(labels), length=known)


class Samples(Dataset[Sample]):
    """All samples of a mixture of sources, in the run's one global order; sample numbers go on for ever.

    A source's samples are used once per epoch of its own, in an order seeded by (seed, source, epoch), or with
    `shuffle=False` in the order of the files. Pickled, it is what one rank sends to the others and to its loader
    processes: some 150 bytes per shard. A copy opens a shard when a sample needs it.

    DataError: a source is too small for one sample; when read: as `Stream.read` and `Shard.map`.
    """

    def __init__(
        self, sources: Sequence[Source], *, seq_len: int, packing: Packing, seed: int, shuffle: bool, vocab_size: int
    ) -> None:
        self._seed, self._shuffle = seed, shuffle
        streams = [Stream(shards, vocab_size) for shards, _ in sources]
        isolate = packing == "document_mask"
        self._cuts: list[Pieces | Windows] = [
            Pieces(stream, seq_len) if packing == "pad" else Windows(stream, seq_len, isolate=isolate)
            for stream in streams
        ]
        self._mixture = Mixture([weight for _, weight in sources], mix(seed, len(sources)))
        parts: list[object] = [seq_len, packing, seed, shuffle]
        for stream, cut, count in zip(streams, self._cuts, self._mixture.counts, strict=True):
            if cut.samples == 0:
                raise DataError(_too_little(stream, seq_len, packing))
            parts += [count, *(shard.digest for shard in stream.shards)]
        self.fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
        """Of the tokens, the packing and the order: equal exactly when every sample is."""
        self.shards, self.tokens = [shards for shards, _ in sources], sum(stream.tokens for stream in streams)
        """The token shards of each source; the number of tokens of all sources, each counted once."""

    def __len__(self) -> int:
        """Samples of all sources, each once."""
        return sum(cut.samples for cut in self._cuts)

    def __getitem__(self, g: int) -> Sample:
        source, index = self._mixture.locate(g)
        cut = self._cuts[source]
        return cut.read(in_epochs(index, cut.samples, key=mix(self._seed, source), shuffle=self._shuffle))


def _too_little(stream: Stream, seq_len: int, packing: Packing) -> str:
    needed = "a document of at least 2 tokens" if packing == "pad" else f"at least {seq_len + 1:,} tokens"
    more = f" and {len(stream.shards) - 1} more" if len(stream.shards) > 1 else ""
    size = f"{stream.tokens:,} tokens in {stream.documents:,} documents ({stream.shards[0].path}{more})"
    return f"too little text for one sample of seq_len {seq_len:,}: {size}, {needed} needed"
