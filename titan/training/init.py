"""Layout-invariant initial values: each parameter is drawn whole from a generator of its own, then sliced.

The generator is seeded by (seed, canonical name), so no count of ranks, stages or shards enters. Of a stack of weights,
each element has a generator of its own, and a rank draws those of which it holds a part.
"""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.contracts import ModelPart, shard_of
from titan.contracts.base.sharding import slice_of
from titan.contracts.base.spec import Init, ModelSpec
from titan.errors import PluginError


def init_weights(part: ModelPart, spec: ModelSpec, seed: int, device: torch.device | None = None) -> None:
    """Give every parameter and buffer of the part its initial value, in place; PluginError: the spec has none for one,
    or computes it in another shape. device: whose generators draw; None: each tensor's own."""
    with torch.no_grad():
        for name, parameter in part.parameters():
            _fill(parameter, spec.init_of(name), seed, name, device)
        # One that several modules share has become a tensor of each.
        for name, buffer in part.module.named_buffers(remove_duplicate=False):
            _fill(buffer, spec.init_of_buffer(name), seed, name, device)


def _fill(tensor: Tensor, how: Init, seed: int, name: str, device: torch.device | None) -> None:
    """Values are drawn in float32 at least: a tensor of fewer bits holds the same ones, rounded to nearest."""
    device = device or tensor.device
    local = shard_of(tensor)
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    if not how.per_element:
        local.copy_(_own(draw(how, tensor.shape, seed, name, device, dtype), tensor))
        return
    # Which elements along dimension 0 this rank holds something of.
    numbers = _own(torch.arange(tensor.shape[0]).view(-1, *[1] * (tensor.ndim - 1)).expand(tensor.shape), tensor)
    how = replace(how, per_element=False)
    for row, number in enumerate(numbers.flatten(1)[:, 0].tolist() if numbers.numel() else ()):
        element = draw(how, tensor.shape[1:], seed, f"{name}[{number}]", device, dtype)
        local[row].copy_(_own(element.expand(tensor.shape), tensor)[row])


def _own(whole: Tensor, like: Tensor) -> Tensor:
    return slice_of(whole, like) if isinstance(like, DTensor) else whole


def draw(how: Init, shape: torch.Size, seed: int, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The whole initial tensor of the parameter or buffer `name`; PluginError if it is computed in another shape."""
    if how.compute is not None:
        value = how.compute(device)
        if value.shape != shape:
            shapes = f"with shape {list(value.shape)}, the model has shape {list(shape)}"
            raise PluginError(f"the model's spec computes {name} {shapes}")
        return value.to(dtype)
    if how.per_element:
        one, names = replace(how, per_element=False), (f"{name}[{number}]" for number in range(shape[0]))
        return torch.stack([draw(one, shape[1:], seed, element, device, dtype) for element in names])
    if how.kind == "constant":
        return torch.full(shape, how.value, device=device, dtype=dtype)
    if how.kind == "stream":
        return torch.full(shape, name_seed(seed, name), device=device, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(name_seed(seed, name))
    tensor = torch.empty(shape, device=device, dtype=dtype)
    bound = how.cut * how.std
    return torch.nn.init.trunc_normal_(tensor, std=how.std, a=-bound, b=bound, generator=generator)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed from the run's seed and a name; equal on every machine and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
