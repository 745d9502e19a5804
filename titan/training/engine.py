"""Direct: forward and backward of each micro batch, one after the other, on the one part this rank holds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from titan.contracts import IGNORE, Batch, Loss, LossFn, Part, Technique


class Direct:
    """The engine of a model that is not split into stages (see `contracts.Engine`)."""

    def __init__(self, part: Part, techniques: Sequence[Technique]) -> None:
        self.part, self.techniques = part, techniques

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn) -> None:
        """Add the gradients of all micro batches."""
        for index, batch in enumerate(batches):
            for technique in self.techniques:
                technique.before_microbatch(index, len(batches))
            loss(self.part.runner(batch.tokens, batch.documents), batch.labels).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor | None:
        """Logits of a micro batch."""
        logits: Tensor = self.part.runner(batch.tokens, batch.documents)
        return logits


@contextmanager
def evaluating(parts: Sequence[Part]) -> Iterator[None]:
    """Forwards without gradients, after which nothing is as if they had been: gathered parameters are let go of.

    No compiled graph is used: each would be compiled anew for forwards without gradients.
    """
    before = [part.module.training for part in parts]
    for part in parts:
        part.module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.module.train(training)
            part.release()


class StepLoss:
    """The loss of a step: sums over tokens divided once by the global number of valid tokens, never a mean of means.

    Called by the engine for each micro batch; `reported` adds up the cross-entropy that this rank has seen.
    """

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self.reported = torch.zeros((), device=device)
        self._tokens = torch.ones((), device=device)

    def begin(self, tokens: Tensor) -> None:
        """Start a step of `tokens` valid tokens over all ranks and micro batches (a scalar on the device)."""
        self.reported = torch.zeros_like(self.reported)
        self._tokens = tokens.clamp(min=1)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The objective of a micro batch, as its share of the step's mean."""
        objective, reported = self._loss.compute(logits, labels)
        self.reported += reported.detach() / self._tokens
        return objective / self._tokens


def valid_tokens(batches: Sequence[Batch]) -> Tensor:
    """Number of positions of these micro batches that are learnt from, an int64 scalar on their device."""
    return torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum()
