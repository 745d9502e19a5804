"""The update of weights in bf16: what the optimizer makes of fp32 copies, rounded; or the optimizer's own kernel."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import locals_of, only, shard_of
from titan.contracts.optimizers import Streams, factor_of, tell_scale

from .bits import Rounding, in_kernels

PIECE = 2**24
"""Numbers of a rank that are updated together."""

COMPENSATION = "compensation"
"""The optimizer's slot for what rounding has lost."""


class RoundedStochastically(torch.optim.Optimizer):
    """Steps an optimizer with fp32 copies of some parameters, their gradients and their state at a time.

    What comes out is rounded stochastically, each number by 16 random bits. At rest, state of a parameter's shape is
    bf16; counts, 8-bit codes and other shapes stay as the optimizer keeps them. An optimizer that rounds by itself
    (`Optimizer.rounds`) does so where Triton runs.

    optimizer: the one that is stepped; separable.  streams: the random bits of a parameter in the update of now.
    """

    _slot = ""  # of what rounding has lost

    def __init__(self, optimizer: torch.optim.Optimizer, streams: Streams) -> None:
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self._inner, self._streams = optimizer, streams
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # An update with copies is skipped by the host; the kernel skips its own.
        self._step_supports_amp_scaling = all(map(self._in_place, parameters))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have gradients."""
        in_place, left = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            (in_place if self._in_place(parameter) else left).append(parameter)
        if in_place:
            tell_scale(self, self._inner)
            with only(self._inner, in_place):
                self._inner.step_rounded(self._streams, self._slot)  # type: ignore[attr-defined]
        if left and bool(getattr(self, "found_inf", 0)):
            return
        for piece in _pieces(left):
            held = {parameter: self.state.pop(parameter, {}) for parameter in piece}
            copies = {parameter: self._widened(parameter, state) for parameter, state in held.items()}
            _step_with(self._inner, copies)
            for copy in copies.values():
                copy.grad = None
            for parameter, before in held.items():
                state = self._rounded(parameter, copies.pop(parameter), before)
                if state:
                    self.state[parameter] = state

    def _in_place(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer rounds what it makes of a parameter by itself."""
        tensors = [parameter, *([] if parameter.grad is None else [parameter.grad])]
        tensors += [value for value in self.state.get(parameter, {}).values() if _is_of(value, parameter)]
        return hasattr(self._inner, "step_rounded") and all(map(in_kernels, tensors))

    def _widened(self, parameter: nn.Parameter, held: Mapping[str, Any]) -> nn.Parameter:
        """An fp32 copy of a parameter, with its gradient and, of the state held, what is the optimizer's."""
        assert parameter.grad is not None
        copy = nn.Parameter(self._value(parameter, held))
        copy.grad = parameter.grad.float()
        own = {slot: value for slot, value in held.items() if slot != COMPENSATION}
        if own:
            self.state[copy] = {slot: value.float() if _is_of(value, copy) else value for slot, value in own.items()}
        return copy

    def _value(self, parameter: nn.Parameter, held: Mapping[str, Any]) -> Tensor:
        """What a parameter stands for, in fp32."""
        return parameter.detach().float()

    def _rounded(self, parameter: nn.Parameter, copy: nn.Parameter, held: Mapping[str, Any]) -> dict[str, Any]:
        """Store what the optimizer has made of a copy in bf16; returns the state, in the tensors that held it."""
        rounding = Rounding(parameter, self._streams(parameter))
        state = self.state.pop(copy, {})
        slots = sorted(slot for slot, value in state.items() if _is_of(value, copy))
        for number, slot in enumerate(slots, 1):
            wide, state[slot] = shard_of(state[slot]), _narrow(held.get(slot), parameter)
            rounding.store(shard_of(state[slot]), wide, factor_of(number))
        return {**state, **self._store(parameter, copy, held, rounding)}

    def _store(
        self, parameter: nn.Parameter, copy: Tensor, held: Mapping[str, Any], rounding: Rounding
    ) -> dict[str, Tensor]:
        """Give a parameter its new value; returns what else is to be kept in its state."""
        rounding.store(shard_of(parameter), shard_of(copy))
        return {}


class RoundedKahan(RoundedStochastically):
    """The same with weights rounded to nearest, and in bf16 what that lost, which is added before the next update."""

    _slot = COMPENSATION

    def _value(self, parameter: nn.Parameter, held: Mapping[str, Any]) -> Tensor:
        value = parameter.detach().float()
        return value + held[COMPENSATION] if COMPENSATION in held else value

    def _store(
        self, parameter: nn.Parameter, copy: Tensor, held: Mapping[str, Any], rounding: Rounding
    ) -> dict[str, Tensor]:
        own, lost = shard_of(parameter), _narrow(held.get(COMPENSATION), parameter)
        own.copy_(shard_of(copy))
        rounding.store(shard_of(lost), shard_of(copy).detach() - own)
        return {COMPENSATION: lost}


def _narrow(before: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """The tensor that held some of a parameter's state before; a new one the first time."""
    # A checkpoint's may be of another dtype, or wait on the host.
    if before is None or (before.dtype, before.device) != (parameter.dtype, parameter.device):
        before = torch.empty_like(parameter.detach())
    return before


def _pieces(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """These in lists of at most `PIECE` numbers of this rank, or of one parameter."""
    piece: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        if piece and numbers + shard_of(parameter).numel() > PIECE:
            yield piece
            piece, numbers = [], 0
        piece.append(parameter)
        numbers += shard_of(parameter).numel()
    if piece:
        yield piece


def _step_with(optimizer: torch.optim.Optimizer, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Step a separable optimizer for these of its parameters alone, with copies in their place."""
    everything = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [copies[parameter] for parameter in group["params"] if parameter in copies]
        optimizer.step()
    finally:
        for group, all_of_it in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = all_of_it


def _is_of(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state is one floating-point number for each of the parameter.

    A tensor may call itself float32 and be kept as codes of fewer bits, by an optimizer that rounds its state itself.
    """
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != parameter.shape:
        return False
    return value.dtype in (torch.bfloat16, torch.float32) and next(locals_of(value)).dtype == value.dtype
