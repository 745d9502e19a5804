"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), PyTorch's fused kernel.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    w = w - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)

Weight decay leaves out norms, biases and embeddings unless `decay_all` is set; the first lines of a run say how many
parameters are decayed.

Cost: 8 bytes per parameter of fp32 state on the rank that holds the parameter; one pass over weights, gradients and
state (28 bytes read and written per parameter); half of both where weights are stored in 16 bits; no communication.
Where those are rounded by random bits, a Triton kernel per parameter takes the place of PyTorch's on GPUs.
Limits: building it imports torch's compiler, about one second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from titan.contracts import Costs, Job, NamedParameter, Optimizer, option, register
from titan.contracts.base.cost import PersistentState

from . import rounded


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "adamw"`."""

    lr: float = option(3e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = option(
        (0.9, 0.95), "decay rates of the running means of the gradient and of its square", at_least=0, below=1
    )
    eps: float = option(1e-8, "added to the denominator, the root of the mean squared gradient", above=0)
    weight_decay: float = option(
        0.1, "weight decay coefficient; each update shrinks weights by this times the learning rate", at_least=0
    )
    decay_all: bool = option(False, "apply weight decay to norms, biases and embeddings too")


@register
class AdamW(Optimizer):
    """Adam with decoupled weight decay, fused; norms, biases and embeddings are not decayed."""

    name = "adamw"
    Config = Config
    separable = True
    takes_grad_scale = True
    rounds = True
    default = True

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        for named in parameters:
            groups.setdefault(self._decays(named), []).append(named.parameter)
        return rounded.AdamW(
            [
                {"params": group, "weight_decay": self.config.weight_decay if decays else 0.0}
                for decays, group in groups.items()
            ],
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            fused=True,
        )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Two means a parameter, of its dtype; weight, gradient and both means read, all but the gradient written."""
        size = costs.store_itemsize
        state = PersistentState(component="optimizer", bytes_per_param=2 * size, axes=costs.updated_over)
        return replace(costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 7 * size)

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """For example `adamw: 4.2 M parameters decayed by 0.1 in 28 tensors; 0.5 M in 10 (...) not`."""
        decayed = [named for named in parameters if self._decays(named)]
        rest = [named for named in parameters if not self._decays(named)]
        line = f"{self.name}: {_millions(decayed)} M parameters with weight decay {self.config.weight_decay:g}"
        line += f" in {len(decayed)} tensors"
        return f"{line}; {_millions(rest)} M in {len(rest)} (norms, biases, embeddings) without" if rest else line

    def _decays(self, named: NamedParameter) -> bool:
        return named.decays or self.config.decay_all


def _millions(parameters: Sequence[NamedParameter]) -> str:
    return f"{sum(named.parameter.numel() for named in parameters) / 1e6:.3g}"
