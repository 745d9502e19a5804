"""Of what kind a device is, for what is done another way on each.

A rehearsal on a CPU stands in for a GPU: what looks here, and not at the tensor, is then done as there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)


def kind_of(device: torch.device) -> str:
    """ "cpu", "cuda", ...: the device's own type, or that of the device it stands in for."""
    return _stands_for.get() or device.type


def total_gib(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; None: another kind of device, whose memory processes share."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """What PyTorch calls the model of a GPU; of another kind of device, the kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def standing_in_for(kind: str) -> Iterator[None]:
    """Let every device be of this kind meanwhile, as far as `kind_of` is asked."""
    token = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(token)


def on_this_device(act: Callable[P, T]) -> Callable[P, T]:
    """`act`, for a thread to call, on the GPU of the thread that asks. A new thread's current device is GPU 0.

    What a thread does there without naming a device would open a context on GPU 0, some hundred MB for each rank of
    the node.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return act
    index = torch.cuda.current_device()

    def acting(*args: P.args, **named: P.kwargs) -> T:
        torch.cuda.set_device(index)
        return act(*args, **named)

    return acting
