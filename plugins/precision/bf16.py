"""bfloat16: mixed precision with fp32 master weights, or pure bf16 without them.

Mixed, the default. Parameters are cast once when a unit is gathered, activations follow; a micro batch's gradient is
bf16 and is added up over micro batches and ranks in fp32. The optimizer, the loss, softmax and norms' statistics stay
fp32. Mixed precision training: arXiv 1710.03740; bfloat16: arXiv 1905.12322.

Pure (`pure = true`). All parameters are stored in bf16, and so are their gradients once they are summed, and state of
the optimizer that has a parameter's shape. Buffers, such as the bias of a router, keep their dtype; sums over ranks,
gradient norm, loss and statistics stay fp32. With 8 significant bits, an update below 1/512 of a weight is lost where
the result is rounded to nearest, so that training stalls as the rate falls (arXiv 2010.06192). With v = w + update:

    rounding = "nearest"      w = nearest(v)
    rounding = "stochastic"   w = down(v) or up(v), up with probability (v - down) / (up - down): the mean of w is v
    rounding = "kahan"        w = nearest(w + c + update);  c = stochastic(what that lost), kept in bf16

"nearest" leaves all to the optimizer, which rounds its state alike: a running mean with a decay of 0.999 then hardly
ever falls. The other two give the optimizer fp32 copies of weight, gradient and state of some parameters at a time,
and round its state stochastically. Random bits are a function of seed, step, parameter and place in it (Philox), so
that layouts, replicas and a resumed run draw the same ones.

Cost: mixed, 2 bytes instead of 4 per gathered parameter and activation; the master copy stays. Pure, 2 bytes instead of
4 per parameter for weights, for gradients and for each number of optimizer state; "kahan" 2 more. "stochastic" and
"kahan" read and write about 460 bytes more per parameter and step with AdamW, half of them for random bits: on one
CPU core 19 ns per parameter, where "nearest" takes 0.8. Their copies take up to 31 bytes for each of 2^24 numbers, or
of the largest tensor of a rank. They wait for the device once per step, to know whether the update is skipped. The
technique that gathers parameters casts them, so one is enabled if none is.

On a CPU without AVX-512, products of layers and of the fused loss, and the backward of attention, are computed in
float32 and rounded: bf16 then takes about as long as float32 (`titan.layers.products`, with limits).

Limits of pure: sharded gradients that are reduced in each micro batch (ZeRO 2 and 3 without replicas) are added up in
bf16; others are added up in fp32 and rounded once. "stochastic" and "kahan" need an optimizer that updates each
parameter by itself. Techniques that add to weights, or keep errors of gradients, in the dtype of the weights are
refused. A resumed run may turn `pure` on or off with "nearest" alone, as the others add to the optimizer's state;
`checkpoint.init_from` starts with the weights of any.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan.contracts import (
    BuildContext,
    Costs,
    Fact,
    Job,
    ModelPart,
    ModelSpec,
    NamedParameter,
    Precision,
    Technique,
    locals_of,
    option,
    register,
    shard_of,
    with_switches,
)
from titan.contracts.base.cost import Matmul, PersistentState
from titan.contracts.base.sharding import start_of
from titan.layers import products
from titan.layers.philox import philox

PIECE = 2**24
"""Numbers of a rank that are updated together."""

COMPENSATION = "compensation"
"""The optimizer's slot for what rounding has lost."""

_WORD = 0xFFFFFFFF
_PER_CALL = 8
"""Numbers of 16 random bits in a call of Philox."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.bf16]`."""

    pure: bool = option(False, "store weights, gradients and optimizer state in bf16 too, without fp32 master weights")
    rounding: Literal["nearest", "stochastic", "kahan"] | None = option(
        None, 'how a pure update is rounded to bf16; "kahan" keeps what is lost; unset: "stochastic"'
    )


@register
class BFloat16(Technique):
    """Computes in bfloat16 with fp32 master weights and fp32 gradient sums; or stores all in bfloat16 (pure)."""

    name = "bf16"
    Config = Config
    config: Config
    phase = "shard"
    requires = ("mixed_precision",)
    provides = ("compute_dtype",)
    preserves_numerics = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._seed = self._step = 0

    @property
    def _rounding(self) -> str:
        return self.config.rounding or "stochastic"

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Rounding is of pure training, and needs an optimizer that can update some parameters before others."""
        if not self.config.pure:
            if self.config.rounding:
                yield f'rounding = "{self.config.rounding}" needs pure = true: master weights are not rounded'
        elif self._rounding != "nearest" and not job.optimizer.separable:
            yield (
                f'rounding = "{self._rounding}" needs an optimizer that updates each parameter by itself, but '
                f'optimizer.name = "{job.optimizer.name}" does not; set rounding = "nearest"'
            )

    def facts(self) -> dict[Fact, str]:
        """Pure weights have too few digits to add up what several ranks or steps have changed of them."""
        pure = "[plugins.bf16] pure = true stores weights and their gradients in bfloat16; set pure = false"
        wraps = '[plugins.bf16] rounds what the optimizer computes; set rounding = "nearest"'
        rounds: dict[Fact, str] = {} if self._rounding == "nearest" else {"wraps_optimizer": wraps}
        return {"narrow_weights": pure, **rounds} if self.config.pure else {}

    def precision(self, precision: Precision) -> Precision:
        """Parameters and activations in bfloat16, sums of gradients in float32; pure: stored in bfloat16 too."""
        stored = torch.bfloat16 if self.config.pure else precision.store_dtype
        return Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, store_dtype=stored)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The copies that are rounded, and the compensation; what pure training saves, the host and others count."""
        if not self.config.pure or self._rounding == "nearest":
            return costs
        kept = PersistentState(component="optimizer", bytes_per_param=2, axes=costs.updated_over)
        added = job.optimizer.cost(costs, job).state[len(costs.state) :]
        slots = sum(each.bytes_per_param for each in added) / costs.store_itemsize
        return replace(
            costs,
            state=(*costs.state, kept) if self._rounding == "kahan" else costs.state,
            # Random bits; copies of weight, gradient and state; and what rounds each but the gradient.
            update_bytes=costs.update_bytes + 200 + 6 * (2 + slots) + 80 * (1 + slots),
            after_update_bytes=max(costs.after_update_bytes, 2 + _bytes_at_once(costs, job, slots)),
        )

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """The host stores and the wrapper casts parameters, by the precision; linears on some CPUs change."""
        self._seed = context.job.run.seed
        if not (products.LACKS_BF16 and context.device.type == "cpu"):
            return
        for _, layer in part.layers(context.spec):
            for module in layer.modules():
                own = getattr(module.forward, "__func__", None)  # not what has been put around it
                if isinstance(module, nn.Linear) and own is nn.Linear.forward:
                    module.__class__ = _with_linear(type(module))

    def before_step(self, step: int) -> None:
        """Random bits of an update are those of its step."""
        self._step = step

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
    ) -> torch.optim.Optimizer:
        """One that rounds what the run's optimizer makes of fp32 copies; itself, where that rounds to nearest."""
        if not self.config.pure or self._rounding == "nearest":
            return optimizer
        of = RoundedKahan if self._rounding == "kahan" else RoundedStochastically
        # A checkpoint's state is of the two together: its name tells the state of one pair from that of another.
        both = type(f"{type(optimizer).__name__}{of.__name__}", (of,), {})
        names = {named.parameter: named.name for named in parameters}
        return with_switches(both(optimizer, names, self._bits), optimizer)

    def _bits(self, name: str, like: Tensor) -> Tensor:
        return random_bits(like, name, self._seed, self._step)


@cache
def _with_linear(of: type[nn.Linear]) -> type[nn.Linear]:
    """A subclass that multiplies by `products.linear`: one for all layers, as they share a compiled graph."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return products.linear(x, self.weight, self.bias)

    return type(of.__name__, (of,), {"forward": forward})


def _bytes_at_once(costs: Costs, job: Job, slots: float) -> float:
    """Bytes per parameter of a rank that an update needs for a moment.

    They are the copies of `PIECE` numbers, or of the largest tensor; or without gradients, while that is rounded.
    """
    spec, layout = job.spec, job.layout
    ranks = float(layout.degree_of("slices"))
    for axis in costs.updated_over:
        ranks *= layout.degree(axis)
    held = spec.params / ranks / layout.degree_of("layers")
    matrices = (op.inputs * op.outputs * op.stack for op in costs.layer if isinstance(op, Matmul))
    largest = min(1.0, max([spec.vocab_size * spec.dim, *matrices]) / ranks / held)
    together = min(1.0, max(PIECE / held, largest))
    return max(4 * (2 + slots) * together, 4 * (1 + slots) * together + 19 * largest)


# --- the update ---------------------------------------------------------------------------------------------------


class RoundedStochastically(torch.optim.Optimizer):
    """Steps an optimizer with fp32 copies of some parameters, their gradients and their state at a time.

    What comes out is rounded stochastically, each number by 16 random bits. At rest, state of a parameter's shape is
    bf16; counts, 8-bit codes and other shapes stay as the optimizer keeps them.

    optimizer: the one that is stepped; separable.  names: canonical name of each parameter.
    bits: (name, tensor placed as the parameter) -> 16 random bits for each number that this rank has of it, int32.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], bits: Any) -> None:
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self._inner, self._names, self._bits = optimizer, names, bits

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have gradients."""
        for piece in _pieces(self.param_groups):
            held = {parameter: self.state.pop(parameter, {}) for parameter in piece}
            copies = {parameter: self._widened(parameter, state) for parameter, state in held.items()}
            _step_with(self._inner, copies)
            for copy in copies.values():
                copy.grad = None
            for parameter, before in held.items():
                state = self._rounded(parameter, copies.pop(parameter), before)
                if state:
                    self.state[parameter] = state

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
        bits = self._bits(self._names[parameter], copy)
        state = self.state.pop(copy, {})
        slots = sorted(slot for slot, value in state.items() if _is_of(value, copy))
        for number, slot in enumerate(slots, 1):
            # An odd factor permutes the 16 bits, so that a number's weight and state are not rounded by the same ones.
            own = bits * (2 * 40503 * number + 1) & 0xFFFF
            state[slot] = _stored(held.get(slot), parameter, rounded_stochastically(shard_of(state[slot]), own))
        return {**state, **self._store(parameter, copy, held, bits)}

    def _store(self, parameter: nn.Parameter, copy: Tensor, held: Mapping[str, Any], bits: Tensor) -> dict[str, Tensor]:
        """Give a parameter its new value; returns what else is to be kept in its state."""
        shard_of(parameter).copy_(rounded_stochastically(shard_of(copy), bits))
        return {}


class RoundedKahan(RoundedStochastically):
    """The same with weights rounded to nearest, and in bf16 what that lost, which is added before the next update."""

    def _value(self, parameter: nn.Parameter, held: Mapping[str, Any]) -> Tensor:
        value = parameter.detach().float()
        return value + held[COMPENSATION] if COMPENSATION in held else value

    def _store(self, parameter: nn.Parameter, copy: Tensor, held: Mapping[str, Any], bits: Tensor) -> dict[str, Tensor]:
        own = shard_of(parameter)
        own.copy_(shard_of(copy))
        lost = rounded_stochastically(shard_of(copy).detach() - own, bits)
        return {COMPENSATION: _stored(held.get(COMPENSATION), parameter, lost)}


def _stored(before: Tensor | None, parameter: nn.Parameter, local: Tensor) -> Tensor:
    """What this rank has of a parameter's state, in the tensor that held it before; in a new one the first time."""
    # A checkpoint's may be of another dtype, or wait on the host.
    if before is None or (before.dtype, before.device) != (parameter.dtype, parameter.device):
        before = torch.empty_like(parameter.detach())
    shard_of(before).copy_(local)
    return before


def _pieces(groups: Iterable[Mapping[str, Any]]) -> Iterator[list[nn.Parameter]]:
    """Parameters with gradients, in lists of at most `PIECE` numbers of this rank, or of one parameter."""
    piece: list[nn.Parameter] = []
    numbers = 0
    for parameter in [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]:
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


# --- rounding -----------------------------------------------------------------------------------------------------


def rounded_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """float32 numbers as bfloat16, rounded away from 0 with the probability that makes the mean exact.

    bits: int32, for each number 16 random bits. They are added to the 16 that are cut off; a carry rounds up. NaN and
        inf stay what they are.
    """
    cut = ((wide.view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)
    return torch.where(wide.isfinite(), cut, wide).bfloat16()


def random_bits(like: Tensor, name: str, seed: int, step: int) -> Tensor:
    """16 random bits for each number that this rank has of a tensor, int32, by their places in the whole.

    like: plain, or a DTensor.  name: canonical name of the parameter.  step: of the update.

    8 neighbors along the last dimension share a call of Philox, whose counter is (column / 8, row, step), with all
    other dimensions counted as rows.
    """
    shape, first = list(shard_of(like).shape) or [1], list(start_of(like)) or [0]
    whole, device = list(like.shape) or [1], like.device
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, start, of in zip(shape[:-1], first[:-1], whole[:-1], strict=True):
        rows = (rows[:, None] * of + torch.arange(start, start + size, device=device)).flatten()
    begin, end = first[-1], first[-1] + shape[-1]
    calls = torch.arange(begin // _PER_CALL, -(-end // _PER_CALL), device=device)
    digest = int.from_bytes(hashlib.sha256(f"{seed}:{name}:rounding".encode()).digest()[:8], "little")
    low, high, *key = (
        torch.full((), word & _WORD, dtype=torch.int64, device=device)
        for word in (step, step >> 32, digest, digest >> 32)
    )
    words = philox((calls, rows[:, None] & _WORD, low, rows[:, None] >> 32 ^ high), key)
    bits = torch.stack([word.to(torch.int32) for word in words], -1).view(torch.int16).flatten(1)
    start = begin - begin // _PER_CALL * _PER_CALL
    own = bits[:, start : start + shape[-1]].to(torch.int32) & 0xFFFF
    return own.reshape(shard_of(like).shape)
