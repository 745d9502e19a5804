"""One global gradient norm over every axis of the mesh, clipping by it, and steps whose numbers are not finite.

Norm: each rank sums the squares of what it holds; sums are then added over exactly the groups along which a gradient is
split. Nothing is gathered, nothing is counted twice, and the host never waits for the value.

NaN and inf in the loss or gradients: the update is skipped and counted; too many in a row end the run. All of this is
arithmetic on the device. The host reads the result only where it reads values anyway: when a row is logged, and before
a checkpoint is written, so that no checkpoint of a diverged run is saved.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan.contracts import ModelPart, shard_of
from titan.contracts.base.mesh import Mesh
from titan.errors import DivergedError

Sentences = Sequence[str]
Groups = tuple[dist.ProcessGroup, ...]  # over which a tensor is split; empty where this rank has all of it


def global_norm(parts: Iterable[ModelPart], mesh: Mesh) -> Tensor:
    """The 2-norm of the gradients of the whole model, a float32 scalar, equal on all ranks.

    One all-reduce for each group along which a parameter is split, whether or not this rank has a gradient of it.
    """
    alike: dict[tuple[torch.device, torch.dtype], dict[Groups, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    squares: dict[Groups, list[Tensor]] = defaultdict(list)
    for part in parts:
        for name, parameter in part.parameters():
            if name in part.shared:
                continue
            gradient = parameter.grad
            groups = _groups(parameter if gradient is None else gradient)
            squares[groups] += []
            if gradient is not None:
                alike[gradient.device, gradient.dtype][groups].append(shard_of(gradient))
            elif name in part.used_gradients:
                squares[groups].append(part.used_gradients[name].to(mesh.device).double().square())
    for held in alike.values():
        norms = torch._foreach_norm([each for some in held.values() for each in some], dtype=torch.float32)
        all_squares = torch.stack(norms).to(mesh.device).double().square()
        split = torch.split(all_squares, [len(some) for some in held.values()])
        for groups, own in zip(held, split, strict=True):
            squares[groups].append(own.sum())
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    sums = {groups: torch.stack(some).sum() if some else zero for groups, some in squares.items()}
    return mesh.sum(_reduced(sums, zero), "layers").sqrt().float()


def _reduced(sums: dict[Groups, Tensor], zero: Tensor) -> Tensor:
    for group in dict.fromkeys(group for groups in sums for group in groups):
        split = [groups for groups in sums if group in groups]
        table = torch.stack([sums.pop(groups) for groups in split])
        dist.all_reduce(table, group=group)
        for groups, whole in zip(split, table, strict=True):
            rest = tuple(other for other in groups if other != group)
            sums[rest] = sums[rest] + whole if rest in sums else whole
    return sums.get((), zero)


def clip(parts: Iterable[ModelPart], norm: Tensor, limit: float) -> None:
    """Divide all gradients in place by norm / limit where norm exceeds limit."""
    gradients = [shard_of(p.grad) for part in parts for _, p in part.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, clip_divisor(norm, limit).to(gradients[0].device))


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are divided by, a float32 scalar on the device of the norm: norm / limit, and 1 at least."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def _groups(gradient: Tensor) -> Groups:
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in gradient.placements), "gradient is a partial sum"
    mesh = gradient.device_mesh
    split = (dim for dim, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate))
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1)


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
        self, limit: int, before: Counts, mesh: Mesh, *, fresh: bool = True, known: Sentences = (), made: Sentences = ()
    ) -> None:
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

        expected: whether a loss scale is above 1, of each. If any is, a bad step is not one in a row.

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
        what = f"{row}step {step:.0f} gave loss {loss:g} and gradient norm {norm:g}"
        return counts, DivergedError(f"{what}; {update}{known}{advice}")

    def check(self) -> Counts:
        """What this process and earlier ones have counted; raises DivergedError after too many bad steps in a row."""
        counts, failure = self.read()
        if failure is not None:
            raise failure
        return counts
