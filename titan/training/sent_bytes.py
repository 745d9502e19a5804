"""The metric `bytes_sent`: what a rank's steps send to other ranks, counted where all collectives pass.

Each collective of the process passes `around_each`, which adds `sent_bytes` of it.

Cost: 0.1 ms of the host per collective on a slow CPU core (`python -m bench.sent_bytes`), and nothing else.
Limits: symmetric memory, and what a library sends without `c10d`, are not seen.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from titan.contracts import Measure, Mesh
from titan.contracts.base.collectives import around_each, bytes_to_others

TOTAL = "bytes_sent"


class SentBytes:
    """Counts the bytes of a rank's steps; measures them as a plugin would.

    The values of rows are means over ranks, and over the steps since the row before. `bytes_sent` has all groups,
    `bytes_sent.AXES` the group of these axes of the mesh.
    """

    kind, name = "metric", TOTAL  # in messages

    def __init__(self, mesh: Mesh) -> None:
        self._device = mesh.device
        self._axes = {group.group_name: axes for axes, group in mesh.groups() if group.size() > 1}
        self.measures = {TOTAL: Measure("bytes that a rank sends per step, mean over ranks", "mean")}
        for axes in dict.fromkeys(self._axes.values()):
            self.measures[f"{TOTAL}.{axes}"] = Measure(f"the same within the groups of {axes}", "mean", detail=True)
        self._sent: dict[str, float] = defaultdict(float)
        self._steps, self._counts = 0, False
        self._lock = Lock()  # the thread of a GPU's backward counts too
        self._stop: Callable[[], None] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The body is a step, whose collectives count."""
        if self._stop is None:
            self._stop = around_each(self._count)
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
        self._steps += 1

    def measure(self) -> Mapping[str, Tensor]:
        """Bytes and steps since the last call; as `Measure` has it for a mean."""
        with self._lock:
            sent, steps, self._sent, self._steps = self._sent, self._steps, defaultdict(float), 0
        table = torch.tensor([[sent[name], steps] for name in self.measures], dtype=torch.float64, device=self._device)
        return dict(zip(self.measures, table, strict=True))

    def close(self) -> None:
        """Let collectives pass unseen again."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _count(
        self, operation: OpOverload, args: Sequence[Any], group: dist.ProcessGroup
    ) -> AbstractContextManager[None]:
        if self._counts:
            sent = bytes_to_others(operation, args, group.size(), group.rank())
            axes = self._axes.get(group.group_name)
            with self._lock:
                self._sent[TOTAL] += sent
                if axes is not None:
                    self._sent[f"{TOTAL}.{axes}"] += sent
        return nullcontext()
