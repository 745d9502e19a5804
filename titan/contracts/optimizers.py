"""What optimizers are made of: PyTorch's AdamW on shards, and several optimizers as one, for groups of parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan.contracts.base.sharding import shard_of


class Stream(NamedTuple):
    """Random bits of a parameter in an update: a key of Philox, of 64 bits, and the step, which is in its counter."""

    key: int
    step: int


Streams = Callable[[nn.Parameter], Stream]


def factor_of(number: int) -> int:
    """By what the bits of a weight (0) are multiplied for its n-th slot of state.

    An odd factor permutes 16 bits, so that a number's weight and state are not rounded by the same ones.
    """
    return 2 * 40503 * number + 1


class AdamW(torch.optim.AdamW):
    """AdamW whose kernel is given the local tensors of DTensors, of any meshes and plain ones beside, in one call.

    The update of a number needs that number alone. DTensor would take one mesh at a time and derive the placements of
    all operands before the first update, in time that grows with the square of their number (PyTorch 2.13). State is
    that of the base class: DTensors placed as their parameters.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        complex_too = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for parameter, gradient in zip(lists[0], lists[1], strict=True):
            assert not isinstance(parameter, DTensor) or gradient.placements == parameter.placements, "not summed"
        for tensors in lists:
            tensors[:] = [shard_of(tensor) for tensor in tensors]
        return complex_too


class JoinedOptimizer(torch.optim.Optimizer):
    """Optimizers over parameters of their own, stepped one after the other.

    `param_groups` are theirs, in order, and `state` is one table for all of them, so state is found by parameter,
    however parameters are divided. The class has the name of the first one's, by which a checkpoint knows whose state
    it holds.
    optimizers: one that is itself joined stands for those that it is made of, as each writes to the table by itself.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups
        members = [one.optimizers if isinstance(one, JoinedOptimizer) else (one,) for one in optimizers]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = tuple(member for some in members for member in some)
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state
        # Only where all can: one that asks the host whether to step would step on its own.
        self._step_supports_amp_scaling = all(getattr(o, "_step_supports_amp_scaling", False) for o in self.optimizers)
        makers = [getattr(optimizer, "state_like", None) for optimizer in self.optimizers]
        if all(makers):  # the others' state would not be where they look for it
            self.state_like = makers[0]
        if all(hasattr(optimizer, "step_rounded") for optimizer in self.optimizers):
            self.step_rounded = self._step_rounded

    def step(self, closure: Any = None) -> Any:
        """Step each; what the guard or a scaler of gradients has set here is set there."""
        for optimizer in self.optimizers:
            tell_scale(self, optimizer)
            optimizer.step()

    def _step_rounded(self, streams: Streams, compensation: str) -> None:
        for optimizer in self.optimizers:
            tell_scale(self, optimizer)
            optimizer.step_rounded(streams, compensation)  # type: ignore[attr-defined]


class SwitchingOptimizer(JoinedOptimizer):
    """The same where one of them has other weights for evaluation than those it trains."""

    def eval(self) -> None:
        """Weights for evaluation."""
        for optimizer in self.optimizers:
            getattr(optimizer, "eval", lambda: None)()

    def train(self) -> None:
        """The weights that are trained."""
        for optimizer in self.optimizers:
            getattr(optimizer, "train", lambda: None)()


def tell_scale(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Give `inner` what the guard or a scaler of gradients has set of `outer` (`Optimizer.takes_grad_scale`)."""
    for name in ("found_inf", "grad_scale"):
        if hasattr(outer, name):
            setattr(inner, name, getattr(outer, name))


def with_switches(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`outer`, which wraps `inner`, with the `eval`, `train` and `state_like` of it, if it has them."""
    for name in ("eval", "train", "state_like"):
        if hasattr(inner, name):
            setattr(outer, name, getattr(inner, name))
    return outer


def joined(optimizers: Sequence[torch.optim.Optimizer], name: str = "") -> torch.optim.Optimizer:
    """These optimizers as one, whose class has this name for checkpoints, or the first one's; the only one as it is."""
    name = name or type(optimizers[0]).__name__
    if len(optimizers) == 1 and type(optimizers[0]).__name__ == name:
        return optimizers[0]
    kind = SwitchingOptimizer if any(hasattr(optimizer, "eval") for optimizer in optimizers) else JoinedOptimizer
    made: torch.optim.Optimizer = type(name, (kind,), {"__doc__": kind.__doc__})(optimizers)
    return made
