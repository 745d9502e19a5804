"""What flows from data to the model: documents, and micro batches of tokens."""

from dataclasses import dataclass

from torch import Tensor

IGNORE = -100
"""Label of a position that is not learnt from."""


@dataclass(frozen=True)
class Document:
    """One text of a dataset and where it was read (file, or file:line), for messages."""

    text: str
    place: str


@dataclass(frozen=True)
class Batch:
    """One micro batch on one rank, on its device.

    tokens [B, S] int64.  labels [B, S] int64, the next token or IGNORE.  documents [B, S] int64 or None: the number of
    each token's document within its sample, when attention must not cross documents.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
