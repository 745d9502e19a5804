"""The metric `bytes_sent`: what a rank's steps send to other ranks, counted where all collectives pass.

Whoever issues a collective (FSDP, DTensor, compiled code, a plugin, autograd's threads), it passes PyTorch's
dispatcher as an operation of the namespace `c10d`; functional collectives too. A kernel there adds `sent_bytes` of it,
and dispatches on. Its key is BackendSelect, which every call has, from any thread and on any device, and for which no
collective has a kernel of its own. The key of autograd would miss what DTensor sends; a dispatch mode would cost every
operation. A kernel in place of the device's own would hold Python's lock while it runs, which ends in a deadlock.

Cost: 0.1 ms of the host per collective on a slow CPU core (`python -m bench.sent_bytes`), and nothing else.
Limits: symmetric memory, and what a library sends without `c10d`, are not seen.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from titan.contracts import Measure, Mesh
from titan.contracts.base.collectives import bytes_to_others

TOTAL = "bytes_sent"

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


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
        self._kernels: Any = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The body is a step, whose collectives count."""
        if self._kernels is None:
            self._kernels = self._listen()
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
        if self._kernels is not None:
            self._kernels._destroy()
            self._kernels = None

    def _listen(self) -> Any:
        kernels: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in filter(re.compile("c10d::[a-z_]+").fullmatch, torch._C._dispatch_get_all_op_names()):
            operation = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            arguments = enumerate(operation._schema.arguments)
            place = next((place for place, of in arguments if "ProcessGroup" in str(of.type)), None)
            if place is not None:
                kernel = partial(self._pass, operation, place)
                kernels.impl(operation._schema.name, kernel, "BackendSelect", with_keyset=True)
        return kernels

    def _pass(self, operation: OpOverload, place: int, keys: Any, *args: Any) -> Any:
        """Count a collective that has its group at this place of its arguments, and go on to the device's kernel."""
        if self._counts:
            group = dist.ProcessGroup.unbox(args[place])
            sent = bytes_to_others(operation, args, group.size(), group.rank())
            axes = self._axes.get(group.group_name)
            with self._lock:
                self._sent[TOTAL] += sent
                if axes is not None:
                    self._sent[f"{TOTAL}.{axes}"] += sent
        return operation.redispatch(keys & _BELOW, *args)
