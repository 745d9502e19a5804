"""NaN and inf in the loss or gradients: the update is skipped and counted; too many in a row end the run.

All of this is arithmetic on the device. The host reads the result only where it reads values anyway: when a row is
logged, and before a checkpoint is written, so that no checkpoint of a diverged run is saved.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan.contracts.base.mesh import Mesh
from titan.errors import DivergedError


class Counts(NamedTuple):
    """Since the very start. dropped: updates.  valid_tokens: learnt from by the updates that were made."""

    dropped: int = 0
    valid_tokens: int = 0


class NonfiniteGuard:
    """Watches loss and gradient norm of every step; counts dropped updates, and the tokens that others learn from.

    Each worker judges its own steps; too many in a row on one of them end the run.

    limit: dropped updates in a row that end the run.  before: what earlier processes have counted.
    fresh: the optimizer has no state yet. All workers make its first update or none does, as a checkpoint holds each
        worker's state.
    known: sentences about the job, for the message that ends it.
    made: sentences about why updates are made before they are judged; empty: they are not.
    """

    def __init__(
        self, limit: int, before: Counts, mesh: Mesh, *, fresh: bool = True, known: Sequence[str] = (),
        made: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._known, self._made = known, made
        self._limit, self._mesh, device = limit, mesh, mesh.device
        self._first = fresh and bool(mesh.layout.worker_axis)
        dropped = 0 if mesh.at(mesh.layout.worker_axis) else before.dropped  # the workers' are added up
        self._bad = self._in_a_row = self._longest = torch.zeros((), device=device)  # never written to in place
        self._dropped = torch.tensor(float(dropped), dtype=torch.float64, device=device)
        self._tokens = torch.tensor(float(before.valid_tokens), dtype=torch.float64, device=device)
        self._last = torch.full((3,), math.nan, dtype=torch.float64, device=device)

    def look(
        self, step: int, loss: Tensor, grad_norm: Tensor, expected: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Judge a step before its update, by this rank's share of the loss and its view of the gradient norm.

        expected: `Technique.overflow_expected` of the techniques. If any is true, a bad step is not one in a row.

        Returns both for the whole model, NaN where any rank had no finite number: so all judge alike, also when no
        reduction has spread it.
        """
        mesh = self._mesh
        flags = [(~value.isfinite()).float() for value in (loss, grad_norm)]
        sums = mesh.sum(torch.stack([loss, *flags]), "dealt", "sliced", "layers")
        bad = mesh.sum(sums[1:], "slices") > 0
        if self._first:
            bad = mesh.sum(bad.float(), "own") > 0
            self._first = bool(bad.any())
        loss, grad_norm = torch.stack([sums[0], grad_norm]).masked_fill(bad, math.nan)
        self._bad = bad.any().float()
        self._dropped += self._bad
        counts = self._bad * (~torch.stack(list(expected)).any()).float() if expected else self._bad
        self._in_a_row = (self._in_a_row + counts) * self._bad
        self._longest = torch.maximum(self._longest, self._in_a_row)
        here = torch.stack([torch.full_like(self._dropped, step), loss.double(), grad_norm.double()])
        self._last = torch.where(counts > 0, here, self._last)
        return loss, grad_norm

    def count(self, tokens: Tensor) -> None:
        """Count this worker's valid tokens in the step just judged, an int64 scalar, unless its update is dropped."""
        # The other workers count for as many, so the mean over all is the sum of theirs.
        self._tokens += torch.where(self.updates, tokens * self._mesh.workers, 0)

    @property
    def updates(self) -> Tensor:
        """Whether the step just judged is to be updated by: a bool scalar on the device."""
        return self._bad == 0

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless the step just judged was bad: then nothing of its state changes.

        Fused optimizers of torch skip on the device. For others the host waits for the device once per step.
        """
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        elif bool(self._bad):
            return
        optimizer.step()

    def read(self) -> tuple[Counts, DivergedError | None]:
        """What this process and earlier ones have counted, and what to raise where too many in a row were dropped.

        All ranks together, or while workers are apart all of this one; waits for the device.
        """
        here = torch.stack([self._dropped, self._tokens, self._longest.double(), *self._last])
        workers: list[list[float]] = self._mesh.of_workers(here).tolist()
        dropped, tokens, *_ = map(sum, zip(*workers, strict=True))
        counts = Counts(int(dropped), round(tokens / len(workers)))
        longest, step, loss, norm = max((worker[2:] for worker in workers), key=lambda worker: worker[0])
        if longest < self._limit:
            return counts, None
        many, known = self._limit > 1, "".join(f"; {sentence}" for sentence in (*self._made, *self._known))
        row = f"{self._limit} steps in a row, the last of them " if many else ""
        advice = "" if many or self._made else '; set train.non_finite = "skip" to continue with the next batch'
        update = "its update was made all the same" if self._made else "its update was skipped"
        return counts, DivergedError(
            f"{row}step {step:.0f} gave loss {loss:g} and gradient norm {norm:g}; {update}{known}{advice}"
        )

    def check(self) -> Counts:
        """What this process and earlier ones have counted; raises DivergedError after too many bad steps in a row."""
        counts, failure = self.read()
        if failure is not None:
            raise failure
        return counts
