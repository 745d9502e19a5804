"""Counts the bytes that ranks send each other: the metric `bytes_sent`, in all and by mesh axis.

Every collective of the process passes `around_each`, and the one rule for bytes on the wire
(`titan.contracts.base.collectives.bytes_to_others`) says what this rank sends. Values of rows are means over ranks, and
over the steps since the row before. `bytes_sent` has all groups, `bytes_sent.AXES` the group of these axes of the mesh.
Bytes of rows, validation and checkpoints belong to no step and do not count.

Cost: 0.1 ms of the host per collective on a slow CPU core (`python -m bench.sent_bytes`), and nothing else.
Limits: symmetric memory, and what a library sends without `c10d`, are not seen.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan.contracts import BuildContext, Measure, ModelPart, Technique, register
from titan.contracts.base.collectives import around_each, bytes_to_others


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class BytesSent(Technique):
    """Counts the bytes that ranks send each other per step."""

    name = "bytes_sent"
    Config = Config
    phase = "materialise"
    measures: ClassVar = {"bytes_sent": Measure("bytes that a rank sends per step, mean over ranks", "mean")}

    _context: BuildContext | None = None
    _stop: Callable[[], None] | None = None

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Nothing of the model changes; once per process, find the groups of the mesh."""
        if self._context is not None:
            return
        self._context = context
        self._axes = {group.group_name: axes for axes, group in context.mesh.groups() if group.size() > 1}
        within = {
            f"{self.name}.{axes}": Measure(f"the same within the groups of {axes}", "mean", detail=True)
            for axes in dict.fromkeys(self._axes.values())
        }
        self.measures = {**self.measures, **within}
        self._sent: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._lock = Lock()  # the thread of a GPU's backward counts too

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A real run begins, on all ranks; there is no state."""
        self._stop = around_each(self._count)

    def after_step(self, step: int, updated: Tensor) -> None:
        self._steps += 1

    def measure(self) -> Mapping[str, Tensor]:
        """Bytes and steps since the last call; as `Measure` has it for a mean."""
        with self._lock:
            sent, steps, self._sent, self._steps = self._sent, self._steps, defaultdict(float), 0
        table = torch.tensor(
            [[sent[name], steps] for name in self.measures], dtype=torch.float64, device=self._context.device
        )
        return dict(zip(self.measures, table, strict=True))

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _count(self, operation: Any, args: Sequence[Any], group: dist.ProcessGroup) -> AbstractContextManager[None]:
        if self._context.in_step:
            sent = bytes_to_others(operation, args, group.size(), group.rank())
            axes = self._axes.get(group.group_name)
            with self._lock:
                self._sent[self.name] += sent
                if axes is not None:
                    self._sent[f"{self.name}.{axes}"] += sent
        return nullcontext()
