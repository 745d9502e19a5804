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
4 per parameter for weights, for gradients and for each number of optimizer state; "kahan" 2 more. On a GPU with Triton,
random bits are made where they are used. With AdamW one kernel per parameter then updates and rounds: 14 bytes read and
written per parameter and step, 18 with "kahan". With other optimizers, casts and rounding add 18 bytes per parameter
and 12 for each slot of state; copies take 4 bytes for each of 2^24 weights, gradients and numbers of state, or of the
largest tensor of a rank, and the host waits for the device once per step, to know whether the update is skipped. All
that runs elsewhere without Triton, where random bits are tensors: on one CPU core 19 ns per parameter with AdamW, where
"nearest" takes 0.8. The technique that gathers parameters casts them, so one is enabled if none is.

On a CPU without AVX-512, products of layers and of the fused loss, and the backward of attention, are computed in
float32 and rounded: bf16 then takes about as long as float32 (`titan.layers.products`, with limits).

Limits of pure: sharded gradients that are reduced in each micro batch (ZeRO 2 and 3 without replicas) are added up in
bf16; others are added up in fp32 and rounded once. "stochastic" and "kahan" need an optimizer that updates each
parameter by itself. Techniques that add to weights, or keep errors of gradients, in the dtype of the weights are
refused. A resumed run may turn `pure` on or off with "nearest" alone, as the others add to the optimizer's state;
`checkpoint.init_from` starts with the weights of any.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

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
    option,
    register,
    with_switches,
)
from titan.contracts.base.cost import Matmul, PersistentState
from titan.contracts.optimizers import Stream
from titan.layers import products

from . import rounded
from .bits import key_of


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
        kahan = self._rounding == "kahan"
        costs = replace(costs, state=(*costs.state, kept) if kahan else costs.state)
        on_host = bool(job.stating("weights_on_host"))  # without Triton
        if job.optimizer.rounds and not on_host:
            return replace(costs, update_bytes=costs.update_bytes + 4 * kahan)
        narrow = job.optimizer.cost(costs, job).update_bytes - costs.update_bytes  # the update itself reads fp32
        rounding = 200 + 80 * (1 + slots) if on_host else 6 * (1 + slots)  # of all but gradients; random bits
        moved = narrow + 6 * (2 + slots) + rounding + 26 * kahan  # besides, copies of all
        return replace(
            costs,
            update_bytes=costs.update_bytes + moved,
            after_update_bytes=max(costs.after_update_bytes, 2 + 4 * (2 + slots) * _share_at_once(costs, job)),
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
        of = rounded.RoundedKahan if self._rounding == "kahan" else rounded.RoundedStochastically
        # A checkpoint's state is of the two together: its name tells the state of one pair from that of another.
        both = type(f"{type(optimizer).__name__}{of.__name__}", (of,), {})
        names = {named.parameter: named.name for named in parameters}
        return with_switches(both(optimizer, lambda p: Stream(key_of(names[p], self._seed), self._step)), optimizer)


@cache
def _with_linear(of: type[nn.Linear]) -> type[nn.Linear]:
    """A subclass that multiplies by `products.linear`: one for all layers, as they share a compiled graph."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return products.linear(x, self.weight, self.bias)

    return type(of.__name__, (of,), {"forward": forward})


def _share_at_once(costs: Costs, job: Job) -> float:
    """The share of a rank's parameters that has copies at a time: `rounded.PIECE` numbers, or the largest tensor."""
    spec, layout = job.spec, job.layout
    ranks = float(layout.degree_of("slices"))
    for axis in costs.updated_over:
        ranks *= layout.degree(axis)
    held = spec.params / ranks / layout.degree_of("layers")
    matrices = (op.inputs * op.outputs * op.stack for op in costs.layer if isinstance(op, Matmul))
    largest = min(1.0, max([spec.vocab_size * spec.dim, *matrices]) / ranks / held)
    return min(1.0, max(rounded.PIECE / held, largest))
