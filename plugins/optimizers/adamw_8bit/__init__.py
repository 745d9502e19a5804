"""AdamW with both means in 8 bits (Dettmers et al., arXiv 2110.02861): 2.03 bytes of state per parameter instead of 8.

A mean is cut into blocks of 256 numbers. A block keeps its largest magnitude s in float32, and for each number x the
8-bit code of the value nearest to x / s in a fixed map of 256 values in [-1, 1] (the mean of squares: [0, 1]). The map
is dense near 0 (dynamic tree quantization): 2^i values between 10^(i-7) and 10^(i-6), so small numbers keep their
order of magnitude. Each update makes float32 of the codes, does what AdamW does, and makes codes again:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    w = w - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)

The weights are updated with m and v as they are before they become codes. Two details are this file's own. The map of m
has -1 in place of its lowest value, -0.993, so the largest number of a block is always kept exactly: numbers that come
from codes become the same codes again. A positive v never becomes 0, which would leave m / eps as the update.

Parameters of fewer than 4,096 numbers, such as norms, keep float32 means. All else is in codes, at every layout.

Checkpoints have float32 means, sharded as any state. At the same layout a resumed run has the same codes, bit for bit.
At another layout the blocks are others, so numbers are rounded once more, as in each update. The means of a checkpoint
are read into the host's memory, as the device may have no space for them.

Cost: 2.03 bytes per parameter; no communication. On a GPU with Triton, an update is one kernel for each parameter: 16
bytes read and written per parameter, 10 where weights are stored in 16 bits. Clipping is part of it, and the host does
not wait to know whether it is skipped. Elsewhere an update moves about 130 bytes per parameter, in pieces of 2^22
numbers, which hold 100 MB meanwhile.

Limits: the curve is near that of `adamw`, not the same, and depends a little on the layout, as blocks do. torchao's
AdamW8bit has the same codes. It is not used here: it compiles its update, keeps float32 where a shard is no multiple of
256, and takes the blocks of its checkpoints from the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import (
    Costs,
    Job,
    NamedParameter,
    Optimizer,
    host_like,
    locals_of,
    option,
    register,
    runs_triton,
    shard_of,
    with_inner,
)
from titan.contracts.base.cost import PersistentState

from .codes import BLOCK, Codes, flat, pieces

_FEWEST = 4096
"""Numbers of a parameter from which on its means are in codes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[optimizer]` with `name = "adamw_8bit"`."""

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
class AdamW8Bit(Optimizer):
    """Adam with decoupled weight decay and 8-bit state; norms, biases and embeddings are not decayed."""

    name = "adamw_8bit"
    preserves_numerics = False
    Config = Config
    separable = True
    takes_grad_scale = True
    config: Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        groups: dict[float, list[nn.Parameter]] = {}
        for named in parameters:
            decays = named.decays or self.config.decay_all
            groups.setdefault(self.config.weight_decay if decays else 0.0, []).append(named.parameter)
        made = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
        return _AdamW8Bit(made, {"lr": self.config.lr, "betas": self.config.betas, "eps": self.config.eps})

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Two codes per parameter, two float32 numbers per block; one pass, as on a GPU with Triton."""
        each = 2 * (1 + 4 / BLOCK)
        state = PersistentState(component="optimizer", bytes_per_param=each, axes=costs.updated_over)
        # In the kernel weight, gradient and means are read, and all but the gradient written; hosts have no kernel.
        moved = 130 if job.stating("weights_on_host") else 3 * costs.store_itemsize + 2 * each
        return replace(costs, state=(*costs.state, state), update_bytes=costs.update_bytes + moved)


class _AdamW8Bit(torch.optim.Optimizer):
    """state: of each parameter both means, and `step`: a number of the host, or of the device beside a kernel."""

    def state_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """In the host's memory, where the means of a checkpoint wait for the first update."""
        return host_like(torch.empty_like(parameter, dtype=dtype))

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        skipped, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            if not runs_triton(next(locals_of(parameters[0])).device):
                if skipped is None or not bool(skipped):
                    self._update_each(parameters, divisor, group)
                continue
            moments, times = self._moments(parameters), self._counted(parameters, skipped)
            if times.device.type != "meta":  # a dry run's
                from .kernel import update  # here: triton is there only where there are GPUs

                rates = _rates(times, group)
                for number, (parameter, means) in enumerate(zip(parameters, moments, strict=True)):
                    update(*_shards(parameter), *means, rates[number], skipped, divisor, group)

    def _moments(self, parameters: Sequence[nn.Parameter]) -> list[tuple[Any, Any]]:
        """Both means of each, of this rank, as they are kept."""
        moments = []
        for parameter in parameters:
            state = self.state[parameter]
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = _ready(state.get(slot), parameter.detach(), signed=slot == "exp_avg")
            moments.append((_shard(state["exp_avg"]), _shard(state["exp_avg_sq"])))
        return moments

    def _counted(self, parameters: Sequence[nn.Parameter], skipped: Tensor | None) -> Tensor:
        """The numbers of the updates, float32 [parameters]. They are counted on the device, unless it skips them."""
        steps = []
        for parameter in parameters:
            state, device = self.state[parameter], next(locals_of(parameter)).device
            # A checkpoint has a number of the host, or a tensor that is read into the host's memory.
            state["step"] = torch.as_tensor(state.get("step", 0), dtype=torch.float32, device=device)
            steps.append(state["step"])
        torch._foreach_add_(steps, 1)
        if skipped is not None:
            torch._foreach_sub_(steps, [skipped] * len(steps))
        return torch.stack(steps)

    def _update_each(self, parameters: Sequence[nn.Parameter], divisor: Tensor | None, group: dict[str, Any]) -> None:
        """Without a kernel; counts are the host's."""
        for parameter, means in zip(parameters, self._moments(parameters), strict=True):
            state = self.state[parameter]
            state["step"] = int(state.get("step", 0)) + 1
            _update(*_shards(parameter), *means, state["step"], divisor, group)


def _ready(mean: Tensor | None, parameter: Tensor, *, signed: bool) -> Tensor:
    """A mean as it is kept, beside its parameter: new, or made of the mean of a checkpoint.

    That is float32, or bf16 where the weights were float32 in the checkpoint and are bf16 now.
    """
    if parameter.numel() < _FEWEST:  # in order, whatever the parameter's strides are: pieces of it are written to
        new = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        return new if mean is None else mean.to(parameter.device, torch.float32).contiguous()
    if mean is not None and isinstance(_shard(mean), Codes):
        return mean
    made = with_inner(parameter, lambda local: Codes.zeros(local, signed))
    if mean is not None:
        for begin, end in pieces(_shard(mean).numel()):
            _shard(made).write(begin, end, flat(_shard(mean))[begin:end].to(parameter.device, torch.float32))
    return made


def _shards(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """What this rank has of a weight and of its gradient."""
    assert parameter.grad is not None
    return shard_of(parameter.detach()), shard_of(parameter.grad)


def _shard(tensor: Tensor) -> Any:
    """What this rank holds of it: plain, or `Codes`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _rates(times: Tensor, group: dict[str, Any]) -> Tensor:
    """float32 [parameters, 2] of updates with these numbers: lr / (1 - b1^t), and 1 - b2^t, made in float64."""
    (b1, b2), times = group["betas"], times.double()
    return torch.stack([float(group["lr"]) / (1 - b1**times), 1 - b2**times], -1).float()


def _update(
    weight: Tensor, gradient: Tensor, m: Any, v: Any, step: int, divisor: Tensor | None, group: dict[str, Any]
) -> None:
    """One update of plain tensors of one shape; gradients are divided first."""
    (b1, b2), lr = group["betas"], float(group["lr"])
    weights, gradients = flat(weight), flat(gradient)
    for begin, end in pieces(weights.numel()):
        w, g = weights[begin:end].float(), gradients[begin:end].float()
        g = g if divisor is None else g / divisor
        mean, square = (_read(each, begin, end) for each in (m, v))
        mean.lerp_(g, 1 - b1)
        square.mul_(b2).addcmul_(g, g, value=1 - b2)
        _write(m, begin, end, mean)
        _write(v, begin, end, square)
        w.mul_(1 - lr * group["weight_decay"])
        root = square.div_(1 - b2**step).sqrt_().add_(group["eps"])
        w.addcdiv_(mean, root, value=-lr / (1 - b1**step))
        weights[begin:end].copy_(w)
    if not weight.is_contiguous():  # then `weights` is a copy
        weight.copy_(weights.view(weight.shape))


def _read(mean: Any, begin: int, end: int) -> Tensor:
    """Float32 numbers of a mean, a copy."""
    return mean.read(begin, end) if isinstance(mean, Codes) else flat(mean)[begin:end].clone()


def _write(mean: Any, begin: int, end: int, numbers: Tensor) -> None:
    if isinstance(mean, Codes):
        mean.write(begin, end, numbers)
    else:
        flat(mean)[begin:end].copy_(numbers)
