"""Copies between the device and the host's memory, beside what the device computes; in turn where there is no stream.

On an accelerator, one stream takes what comes to the device and another what goes back, as the link to the host does
both at full speed at once. Memory of the device is allocated by the computing stream, and let go of only when that
stream has waited for the copy: so the allocator never gives away what a copy still reads or writes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Pairs = Iterable[tuple[Tensor, Tensor]]
"""(to, from) of plain tensors, one of each on the device and the other on the host."""


class Way:
    """Copies one way, in the order in which they are asked for.

    device: the accelerator, or a CPU, where all copies are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def copy(self, pairs: Pairs) -> Any:
        """Begin to copy, after all that has been asked of the device by now; returns what to wait for."""
        if self._module is None:
            for to, source in pairs:
                to.copy_(source)
            return None
        asking = self._module.current_stream()
        self._stream.wait_stream(asking)
        with self._module.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self._stream.record_event(), asking

    def wait(self, copied: Any) -> None:
        """Let the device's computation wait for the end of a `copy`, and so the stream that had the memory for it.

        They may differ: hooks of gradients run in a stream of whoever reduces these.
        """
        if copied is not None:
            event, asking = copied
            for stream in (asking, self._module.current_stream()):
                stream.wait_event(event)

    def finish(self) -> None:
        """Wait on the host for all copies: what has gone there may be read."""
        if self._stream is not None:
            self._stream.synchronize()
            self._module.current_stream().wait_stream(self._stream)
