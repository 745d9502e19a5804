"""Schedule-free AdamW (Defazio et al., arXiv 2405.15682): no decay of the learning rate, and no end to plan for.

Three points: the model trains at y, steps are made from z, and x, a mean of all z, is what to use:

    v = b2 v + (1 - b2) g(y)^2;   d = g(y) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * y
    z = z - lr * d;   x = (1 - c) x + c z;   y = (1 - b1) z + b1 x,   c = weight_t / (sum of weights up to t)

weight_t is the square of the largest rate so far, so that a warm-up counts little. Parameters hold y, and x follows
from y and z. Validation, checkpoints and samples use x: the parameters are x meanwhile, and y is kept beside them to
the bit. So `titan eval`, `titan generate` and `titan convert` find x as the weights of a checkpoint.

Weight decay leaves out norms, biases and embeddings unless `decay_all` is set. Use `[lr_schedule] name = "constant"`
with a warm-up, and 1 to 10 times the rate of a decayed AdamW (the paper's section 4).

Cost: 8 bytes per parameter of fp32 state on the rank that holds the parameter (z and v), and 4 more during validation
and saves; 28 bytes read and written per parameter, and 16 of what is computed between; no communication.
Limits: a schedule that decays is refused, and so are axes whose ranks average weights of their own. The host waits for
the device once per step, to know whether the update is to be skipped. A technique that keeps a copy of the weights
after a step keeps y.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register, shard_of
from titan.contracts.base.cost import PersistentState, UpdateScratch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "schedule_free_adamw"`."""

    lr: float = option(2e-3, "peak learning rate", above=0)
    betas: tuple[float, float] = option(
        (0.9, 0.95),
        "share of the mean x in y, where gradients are taken; decay rate of the mean squared gradient",
        above=0,
        below=1,
    )
    eps: float = option(1e-8, "added to the denominator, the root of the mean squared gradient", above=0)
    weight_decay: float = option(0.1, "weight decay coefficient, times the learning rate", at_least=0)
    decay_all: bool = option(False, "apply weight decay to norms, biases and embeddings too")


@register
class ScheduleFreeAdamW(Optimizer):
    """AdamW at a mean of its iterates, which needs no decay of the learning rate."""

    name = "schedule_free_adamw"
    Config = Config
    config: Config
    separable = True

    def check(self, job: Job) -> Iterable[str]:
        """The rate must not fall, and weights must be everyone's."""
        # A hundred steps of the run, with the first and the last.
        factors = [job.lr_factor(step) for step in sorted({1 + (job.train.steps - 1) * at // 99 for at in range(100)})]
        if factors[-1] < max(factors):
            schedule = f"[lr_schedule] name = {job.table['lr_schedule']['name']!r}"
            yield (
                f"name = {self.name!r}: needs a rate that does not fall, but {schedule} ends at {factors[-1]:.3g} of "
                f'its peak; set [lr_schedule] name = "constant"'
            )
        if axis := job.layout.worker_axis:
            yield (
                f"name = {self.name!r}: keeps points that ranks with weights of their own do not exchange, "
                f"but mesh.{axis} = {job.layout.degree(axis)}; set mesh.{axis} = 1, or another optimizer"
            )

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        decayed = [named.parameter for named in parameters if named.decays or self.config.decay_all]
        rest = [named.parameter for named in parameters if not (named.decays or self.config.decay_all)]
        groups = [{"params": decayed, "weight_decay": self.config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        settings = {"lr": self.config.lr, "betas": self.config.betas, "eps": self.config.eps}
        return _ScheduleFree([group for group in groups if group["params"]], settings)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """z and a mean a parameter; the weight, z and the mean are read and written, the gradient is read."""
        size = costs.store_itemsize
        state = PersistentState(component="optimizer", bytes_per_param=2 * size, axes=costs.updated_over)
        at_once = UpdateScratch(bytes_per_param=2 * size)  # the direction, and the root that it is divided by
        return replace(
            costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 11 * size, update_scratch=at_once
        )


class _ScheduleFree(torch.optim.Optimizer):
    """Parameters are y; state: z, mean_square, and the numbers steps, rate (the largest) and weights (their sum)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient, one after the other."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        (mix, keep), rate, state = group["betas"], float(group["lr"]), self.state[parameter]
        if not state:
            state |= {"z": parameter.detach().clone(), "mean_square": torch.zeros_like(parameter)}
            state |= {"steps": 0, "rate": 0.0, "weights": 0.0}
        state["steps"] += 1
        state["rate"] = max(state["rate"], rate)
        state["weights"] += state["rate"] ** 2
        share = state["rate"] ** 2 / state["weights"] if state["weights"] else 0.0
        y, z, square = (shard_of(tensor) for tensor in (parameter.data, state["z"], state["mean_square"]))
        assert parameter.grad is not None
        gradient = shard_of(parameter.grad)
        square.mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
        root = (square / (1 - keep ** state["steps"])).sqrt_().add_(group["eps"])
        direction = (gradient / root).add_(y, alpha=group["weight_decay"])
        # x moves to z by `share`, and z by -rate * direction: what that makes of y = (1 - mix) z + mix x.
        y.lerp_(z, share).add_(direction, alpha=rate * (mix * (1 - share) - 1))
        z.sub_(direction, alpha=rate)

    @torch.no_grad()
    def eval(self) -> None:
        """Parameters become x; y is kept."""
        for parameter, mix in self._each():
            state = self.state[parameter]
            if state and "y" not in state:
                state["y"] = parameter.detach().clone()
                shard_of(parameter.data).lerp_(shard_of(state["z"]), 1 - 1 / mix)

    @torch.no_grad()
    def train(self) -> None:
        """Parameters become y again, also those of a checkpoint."""
        for parameter, _ in self._each():
            if (y := self.state.get(parameter, {}).pop("y", None)) is not None:
                shard_of(parameter.data).copy_(shard_of(y))

    def _each(self) -> Iterator[tuple[Tensor, float]]:
        """(parameter, share of x in its y)."""
        return ((p, group["betas"][0]) for group in self.param_groups for p in group["params"])
