"""Cross-entropy with smoothed labels: (1 - s) * -log p(label) + s * mean of -log p over all words (arXiv 1512.00567).

Limits: makes all logits in float32, and whole on every rank of tensor parallelism.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import IGNORE, Loss, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[loss]` with `name = "example"`."""

    smoothing: float = option(0.1, "share of a label that is spread over all words", at_least=0, below=1)


@register
class Example(Loss):
    """Cross-entropy with smoothed labels."""

    name = "example"
    Config = Config

    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over tokens: the smoothed loss, which is differentiated, and the cross-entropy, which logs show."""
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits  # split over V by loss parallelism
        scores, wanted = whole.float().flatten(0, 1), labels.flatten()
        plain = F.cross_entropy(scores, wanted, ignore_index=IGNORE, reduction="sum")
        spread = -scores.log_softmax(-1).mean(-1)[wanted != IGNORE].sum()
        return (1 - self.config.smoothing) * plain + self.config.smoothing * spread, plain.detach()
