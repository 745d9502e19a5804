"""Saved tensors of layers in the host's memory: taken there after a layer's forward, brought back before its backward.

What a layer saves is copied to the host while the next layer computes, and let go of on the device when that one ends.
In backward, the first tensor of a layer that is asked for begins to fetch those of the layer before, so that they come
while this one computes. Whole storages are copied, each once per layer: views come back as the same views.

Left where they are: small tensors; weights and buffers of the layer; and what is passed to it besides its hidden
states, such as a mask, which layers share.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan.contracts import ModelPart, ModelSpec, host_like, locals_of
from titan.contracts.base.collectives import tensors_of
from titan.plugins.memory.offload.link import Way

SMALLEST = 1 / 16
"""Bytes of what is worth its copies, as a share of the layer's input: a number or two per token are not."""


class Offloader:
    """Offloads what the layers of a rank save.

    leaving: the layer whose tensors are being copied to the host.  coming: the one that they are being fetched for.
    """

    def __init__(self, device: torch.device) -> None:
        self.to_host, self.to_device, self.device = Way(device), Way(device), device
        self.leaving: _Layer | None = None
        self.coming: _Layer | None = None
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._before: dict[int, _Layer] = {}
        self._open: list[tuple[saved_tensors_hooks, _Layer]] = []

    def watch(self, part: ModelPart, spec: ModelSpec) -> None:
        """Hook the layers of a part."""
        for number, (_, layer) in enumerate(part.layers(spec)):
            layer.register_forward_pre_hook(partial(self._begin, part.stage, number), with_kwargs=True)
            layer.register_forward_hook(self._end, always_call=True)

    def _begin(self, stage: int, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            layer = _Layer(self, module, (args, kwargs), self._before.get(stage) if number else None)
            self._before[stage] = layer
            hooks = saved_tensors_hooks(layer.pack, lambda get: get())
            self._open.append((hooks, layer))
            hooks.__enter__()

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._open or not torch.is_grad_enabled():
            return
        hooks, layer = self._open.pop()
        hooks.__exit__()
        if self.leaving is not None:
            self.leaving.left()
        layer.leave()
        self.leaving = layer

    def host(self, tensor: Tensor) -> Tensor:
        """A tensor of the host to copy a flat one into; page-locked memory is slow to get, so it is used again."""
        free = self._free[tensor.numel(), tensor.dtype]
        return free.pop() if free else host_like(tensor)

    def give_back(self, host: Tensor) -> None:
        """Take a tensor of the host that nothing needs any more."""
        self._free[host.numel(), host.dtype].append(host)


class _Kept:
    """A storage that a layer saves, as a flat tensor. here: on the device, while it is there.  host: its copy."""

    def __init__(self, flat: Tensor, layer: "_Layer") -> None:
        self.here: Tensor | None = flat
        self.host, self.layer = layer.offloader.host(flat), layer
        weakref.finalize(self, layer.offloader.give_back, self.host).atexit = False

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """On the device, ready to compute with."""
        self.layer.ready()
        assert self.here is not None
        return self.here.as_strided(size, stride, offset)


class _Layer:
    """What one forward of a layer saves.

    before: the layer that ran before it in the same pass through the part.
    """

    def __init__(self, offloader: Offloader, module: nn.Module, inputs: Any, before: "_Layer | None") -> None:
        self.offloader, self.before = offloader, before
        hidden, *shared = tensors_of(inputs)
        self._smallest = sum(plain.nbytes for plain in locals_of(hidden)) * SMALLEST
        self._module, self._shared = module, shared
        self._taken: dict[tuple[torch.UntypedStorage, torch.dtype], _Kept] = {}
        self._kept: list[weakref.ref[_Kept]] = []
        self._fetched: list[Tensor] = []
        self._here, self._copied = True, None

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What autograd keeps in place of a saved tensor: a function that returns it."""
        if hasattr(tensor, "trigger_wait"):  # what a collective returns, before it is there
            tensor = tensor.trigger_wait()
        if hasattr(tensor, "__tensor_flatten__"):
            return self._pack_wrapper(tensor)
        storage = tensor.untyped_storage()  # the same object for all tensors in it
        key = storage, tensor.dtype
        if key not in self._taken:
            if storage.nbytes() < max(1.0, self._smallest) or self._stays(storage):
                return lambda: tensor
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            self._taken[key] = _Kept(flat, self)
            self._kept.append(weakref.ref(self._taken[key]))
        return partial(self._taken[key].view, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is of a weight, gathered perhaps, of a buffer, or of what layers share."""
        stay = (*self._module.parameters(), *self._module.buffers(), *self._shared)
        return any(plain.untyped_storage() is storage for tensor in stay for plain in locals_of(tensor))

    def _pack_wrapper(self, tensor: Tensor) -> Callable[[], Tensor]:
        names, context = tensor.__tensor_flatten__()
        kind, size, stride = type(tensor), tensor.shape, tensor.stride()
        fixed = {name: getattr(tensor, name) for name in names}
        packed = {name: self.pack(one) for name, one in fixed.items() if isinstance(one, Tensor)}
        fixed = {name: one for name, one in fixed.items() if name not in packed}

        def get() -> Tensor:
            inner = {**fixed, **{name: unpack() for name, unpack in packed.items()}}
            made: Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
            return made

        return get

    def leave(self) -> None:
        """Begin to copy to the host."""
        self._copied = self.offloader.to_host.copy(self._pairs(self._taken.values()))

    def left(self) -> None:
        """Let go of what is on the device, once it has been copied."""
        self.offloader.to_host.wait(self._copied)
        for kept in self._taken.values():
            kept.here = None
        self._taken, self._here = {}, False

    def ready(self) -> None:
        """See that the tensors are on the device, and that those of the layer before are on their way."""
        leaving, self.offloader.leaving = self.offloader.leaving, None
        if leaving is self:  # its backward comes before it has left
            self._taken, self._copied = {}, None
        elif leaving is not None:  # of another micro batch
            leaving.left()
        self.fetch()
        self.came()
        if self.before is not None:
            self.before.fetch()
            self.before = None

    def fetch(self) -> None:
        """Begin to bring to the device what is not there and still needed."""
        if self._here:
            return
        kept = [one for reference in self._kept if (one := reference()) is not None]
        for one in kept:
            one.here = torch.empty_like(one.host, device=self.offloader.device, pin_memory=False)
        if self.offloader.coming is not None:  # nothing has asked for it
            self.offloader.coming.came()
        # A saved tensor may be let go of before it is asked for, and all of a layer's: its memory must not be given to
        # another while the copy writes to it.
        self._fetched, self.offloader.coming = [one.here for one in kept if one.here is not None], self
        self._copied = self.offloader.to_device.copy([(here, host) for host, here in self._pairs(kept)])
        self._here = True

    def came(self) -> None:
        """Let the device wait for what is being fetched."""
        if self.offloader.coming is self:
            self.offloader.to_device.wait(self._copied)
            self._fetched, self._copied, self.offloader.coming = [], None, None

    def _pairs(self, kept: Iterable[_Kept]) -> list[tuple[Tensor, Tensor]]:
        return [(one.host, one.here) for one in kept if one.here is not None]
