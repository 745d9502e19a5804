"""Tensors that a technique keeps in the host's memory to spare the device's.

`host_like` makes all of them: page-locked where copies can then run beside computation, and known to a dry run, whose
tensors have no device.
"""

import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor

_on_host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_allocating: ContextVar[bool] = ContextVar("_allocating", default=False)


def with_inner(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change(tensor)`; of a wrapper such as DTensor, another whose plain inner tensors are `change` of its own."""
    if not _wraps_others(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    inner = {name: with_inner(one, change) if isinstance(one, Tensor) else one for name, one in held.items()}
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def locals_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain local tensors of a tensor: itself, or the inner tensors of a wrapper such as DTensor."""
    if not _wraps_others(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        held = getattr(tensor, name)
        if isinstance(held, Tensor):
            yield from locals_of(held)


def _wraps_others(tensor: Tensor) -> TypeGuard[Any]:
    return hasattr(tensor, "__tensor_flatten__")  # PyTorch's protocol for subclasses that hold other tensors


def host_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor like this one in the host's memory (a DTensor's shard), page-locked for accelerators."""
    return with_inner(tensor, _plain_host_like)


def _plain_host_like(tensor: Tensor) -> Tensor:
    token = _allocating.set(True)
    try:
        made = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type not in ("cpu", "meta"))
    finally:
        _allocating.reset(token)
    _on_host.add(made.untyped_storage())
    return made


def on_host(tensor: Tensor) -> bool:
    """Whether `host_like` made the storage of this tensor, or of its shard."""
    return any(plain.untyped_storage() in _on_host for plain in locals_of(tensor))


def allocating_on_host() -> bool:
    """Whether what is being allocated at this moment belongs to `host_like`."""
    return _allocating.get()
