"""What state an optimizer keeps, and whether it updates each number of a weight by itself: tried on small tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.contracts import NamedParameter
from titan.errors import ConfigError, PluginError

Build = Callable[[Sequence[NamedParameter]], torch.optim.Optimizer]


def probed(build: Build, parameters: Sequence[NamedParameter]) -> dict[str, dict[str, bool]]:
    """Parameter -> slot of the optimizer's state -> whether that has the parameter's shape, else it is a scalar.

    Seen from two steps with small tensors that stand for parameters of a kind.

    Raises:
        ConfigError: the optimizer updates numbers of a weight together, of which ranks hold slices.
        PluginError: it keeps what is no tensor.
    """
    seen: dict[tuple[str, bool, int], dict[str, bool]] = {}
    found = {}
    for named in parameters:
        key = (named.kind, named.decays, named.parameter.ndim)
        if key not in seen:
            seen[key] = _slots_of(build, named)
        if isinstance(named.parameter, DTensor) and any(p.is_shard() for p in named.parameter.placements):
            _check_pieces(build, named)
        found[named.name] = seen[key]
    return found


def _stepped(build: Build, named: NamedParameter, values: Sequence[Tensor]) -> tuple[list[nn.Parameter], Any]:
    """Stand-ins for a parameter after two steps, and the optimizer."""
    ones = [nn.Parameter(value.clone()) for value in values]
    optimizer = build([replace(named, name=f"{named.name}.{i}", parameter=one) for i, one in enumerate(ones)])
    for factor in (1.0, -0.5):
        for one, value in zip(ones, values, strict=True):
            one.grad = factor * value.cos()
        optimizer.step()
    return ones, optimizer


def _slots_of(build: Build, named: NamedParameter) -> dict[str, bool]:
    [one], optimizer = _stepped(build, named, [_stand_in(named)])
    for slot, value in optimizer.state[one].items():
        if not isinstance(value, Tensor):
            what = f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of {named.name}"
            raise PluginError(f"{what}: a parameter server saves tensors alone")
    return {slot: value.shape == one.shape for slot, value in optimizer.state[one].items()}


def _stand_in(named: NamedParameter) -> Tensor:
    shape = (4,) * named.parameter.ndim
    return torch.arange(4.0 ** len(shape)).sin().view(shape)


def _check_pieces(build: Build, named: NamedParameter) -> None:
    """Halves of a tensor, along each dimension, come out as the tensor does."""
    value = _stand_in(named)
    if value.is_meta:  # a dry run, which has no values
        return
    cuts = list(product((slice(0, 2), slice(2, 4)), repeat=value.ndim))
    [whole], optimizer = _stepped(build, named, [value])
    pieces, _ = _stepped(build, named, [value[cut] for cut in cuts])
    if not all(torch.allclose(piece, whole[cut], rtol=1e-4) for piece, cut in zip(pieces, cuts, strict=True)):
        raise ConfigError(
            f"[optimizer] {type(optimizer).__name__} updates the numbers of {named.name} together, but ranks of a "
            "worker hold slices, which a parameter server updates each by itself; use adamw or sgd, or one rank per "
            "worker"
        )
