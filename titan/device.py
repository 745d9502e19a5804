"""Of what kind a device is, for what is done another way on each.

A rehearsal on a CPU stands in for a GPU: what looks here, and not at the tensor, is then done as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)


def kind_of(device: torch.device) -> str:
    """ "cpu", "cuda", ...: the device's own type, or that of the device it stands in for."""
    return _stands_for.get() or device.type


@contextmanager
def standing_in_for(kind: str) -> Iterator[None]:
    """Let every device be of this kind meanwhile, as far as `kind_of` is asked."""
    token = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(token)
