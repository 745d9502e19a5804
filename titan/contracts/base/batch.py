"""Documents of a dataset, and micro batches of tokens."""

from dataclasses import dataclass

from torch import Tensor

IGNORE = -100
"""Label of a position that is not learnt from."""


@dataclass(frozen=True)
class Document:
    """One text of a dataset.

    text: its contents.  place: where it was read, as file or file:line, for messages.
    """

    text: str
    place: str


@dataclass(frozen=True)
class Batch:
    """One micro batch on one rank, on the rank's device.

    tokens: [B, S] int64.  labels: [B, S] int64, the next token or IGNORE, which counts in no loss.
    documents: [B, S] int64, the number of each token's document within its sequence; None where attention may cross
        documents.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
