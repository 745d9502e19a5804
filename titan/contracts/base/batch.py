"""Documents of a dataset, and micro batches of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position that is not learnt from."""


@dataclass(frozen=True)
class Document:
    """One text of a dataset, and the place where it was read, as file or file:line, for messages."""

    text: str
    place: str


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, with its `host_values`. From pinned memory the host does not wait for it."""
    copy = tensor.to(device=device, non_blocking=True)
    if copy is not tensor:
        copy.host_values = tensor  # type: ignore[attr-defined]
    return copy


def host_values(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory: what `copy_to` has copied, else read back, for which the host waits.

    What is made from such a copy, such as a slice of it, is read back too. Nobody may change a copy in place.
    """
    values: Tensor | None = getattr(tensor, "host_values", None)
    return tensor.cpu() if values is None else values


@dataclass(frozen=True)
class Batch:
    """One micro batch on one rank, on the rank's device. The host makes it; `Technique.batch` returns changed copies.

    B is `job.micro_batch`. T is `job.data.seq_len`, and S is T where no technique has cut the sequence, otherwise the
    positions that this rank has.
    tokens: [B, S] int64.  labels: [B, S] int64, the next token or IGNORE, which counts in no loss.
    documents: [B, T] int64, the number of the document at each place of the whole sequence of T tokens; None where
        attention may cross documents. Stays whole where ranks have slices of the sequence. `host_values` has it.
    lengths: [B] int64, tokens of each whole sequence that are no padding, which follows them: those at positions below.
        None where the job's packing never pads. Labels do not tell: a token may have none, as in a prompt.
    positions: [B, S] int64, the place of each token in its sequence; by default 0 to S - 1.
    samples: [B] int64, the global number of each sample, in the order in which the run consumes them; in training only.
    seeds: [B] int64, of step and sample: what modules draw from (`titan.layers.philox`); in training of
        models that draw, else None.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
    lengths: Tensor | None = None
    positions: Tensor = None  # type: ignore[assignment]
    samples: Tensor | None = None
    seeds: Tensor | None = None

    def __post_init__(self) -> None:
        if self.positions is None:
            everywhere = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.tokens.shape)
            object.__setattr__(self, "positions", everywhere)
