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

Cost: 2.03 bytes per parameter; about 130 bytes read and written per parameter and update, in pieces of 2^22 numbers,
which hold 100 MB meanwhile; no communication.

Limits: the curve is near that of `adamw`, not the same, and depends a little on the layout, as blocks do. torchao's
AdamW8bit has the same codes. It is not used here: it compiles its update, keeps float32 where a shard is no multiple of
256, and takes the blocks of its checkpoints from the layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan.contracts import Costs, Job, NamedParameter, Optimizer, host_like, option, register, with_inner
from titan.contracts.base.cost import PersistentState, UpdateScratch

_BLOCK = 256
_FEWEST = 4096
"""Numbers of a parameter from which on its means are in codes."""
_PIECE = 1 << 22
"""Numbers that are updated at a time: a multiple of the block."""


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
    config: Config

    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        groups: dict[float, list[nn.Parameter]] = {}
        for named in parameters:
            decays = named.decays or self.config.decay_all
            groups.setdefault(self.config.weight_decay if decays else 0.0, []).append(named.parameter)
        made = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
        return _AdamW8Bit(made, {"lr": self.config.lr, "betas": self.config.betas, "eps": self.config.eps})

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Two codes per parameter, two float32 numbers per block; the passes of an update that is not fused."""
        each = 2 * (1 + 4 / _BLOCK)
        state = PersistentState(component="optimizer", bytes_per_param=each, axes=costs.updated_over)
        # Both means, and three tensors of their size while one becomes codes; where weights are narrow, copies of both
        # weight and gradient. The root of the piece before, another 4 bytes, is freed late.
        held = 20 + 8 * (costs.store_itemsize < 4)
        at_once = UpdateScratch(bytes_per_param=held, at_most=_PIECE * (1 + 4 / held))
        return replace(
            costs, state=(*costs.state, state), update_bytes=costs.update_bytes + 130, update_scratch=at_once
        )


class _AdamW8Bit(torch.optim.Optimizer):
    """state: of each parameter `exp_avg` and `exp_avg_sq`, and `step`, a number of the host."""

    def state_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """In the host's memory, where the means of a checkpoint wait for the first update."""
        return host_like(torch.empty_like(parameter, dtype=dtype))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot] = _ready(state.get(slot), parameter.detach(), signed=slot == "exp_avg")
                tensors = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                _update(*(_shard(tensor) for tensor in tensors), state["step"], group)


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
        for begin, end in _pieces(_shard(mean).numel()):
            _shard(made).write(begin, end, _flat(_shard(mean))[begin:end].to(parameter.device, torch.float32))
    return made


def _shard(tensor: Tensor) -> Any:
    """What this rank holds of it: plain, or `Codes`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _pieces(numel: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _PIECE, numel)) for begin in range(0, numel, _PIECE)]


def _update(weight: Tensor, gradient: Tensor, m: Any, v: Any, step: int, group: dict[str, Any]) -> None:
    """One update of plain tensors of one shape."""
    (b1, b2), lr = group["betas"], float(group["lr"])
    weights, gradients = _flat(weight), _flat(gradient)
    for begin, end in _pieces(weights.numel()):
        w, g = weights[begin:end].float(), gradients[begin:end].float()
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
    return mean.read(begin, end) if isinstance(mean, Codes) else _flat(mean)[begin:end].clone()


def _write(mean: Any, begin: int, end: int, numbers: Tensor) -> None:
    if isinstance(mean, Codes):
        mean.write(begin, end, numbers)
    else:
        _flat(mean)[begin:end].copy_(numbers)


# --- codes --------------------------------------------------------------------------------------------------------


class Codes(Tensor):
    """A float32 tensor that is kept as 8-bit codes; can be copied into a plain tensor, and little else.

    codes: uint8, of the tensor's shape.  scales: float32 [blocks], the largest magnitude of each block of `_BLOCK`
    numbers in order; the last block may be shorter.  signed: which map.
    """

    codes: Tensor
    scales: Tensor
    signed: bool
    __slots__: ClassVar = ["codes", "scales", "signed"]

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, signed: bool) -> "Codes":
        """From its parts, which it keeps as they are."""
        made: Codes = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scales, made.signed = codes, scales, signed
        return made

    @staticmethod
    def zeros(like: Tensor, signed: bool) -> "Codes":
        """Of the shape of a plain tensor, and beside it."""
        codes = torch.full(like.shape, _map(signed).index(0.0), dtype=torch.uint8, device=like.device)
        blocks = math.ceil(like.numel() / _BLOCK)
        return Codes(codes, torch.zeros(blocks, dtype=torch.float32, device=like.device), signed)

    def read(self, begin: int, end: int) -> Tensor:
        """Numbers [begin, end) of the flat tensor, begin a multiple of `_BLOCK`."""
        values = _values(self.signed, self.device)[_flat(self.codes)[begin:end].int()]
        return _blocks(values).mul_(self.scales[begin // _BLOCK : -(-end // _BLOCK), None]).view(-1)[: end - begin]

    def write(self, begin: int, end: int, numbers: Tensor) -> None:
        """Make codes of numbers [begin, end)."""
        blocks = _blocks(numbers)
        scales = blocks.abs().amax(1)
        unit = blocks / scales.masked_fill(scales == 0, 1.0)[:, None]
        codes = torch.bucketize(unit, _boundaries(self.signed, self.device), out_int32=True)
        self.scales[begin // _BLOCK : -(-end // _BLOCK)] = scales
        self.codes.view(-1)[begin:end] = codes.view(-1)[: end - begin]

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["codes", "scales"], self.signed

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], signed: bool, size: Any, stride: Any) -> "Codes":
        return Codes(inner["codes"], inner["scales"], signed)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detach and view, as a DTensor does with its shard, and copy into a plain tensor."""
        if function is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scales, args[0].signed)
        if function is torch.ops.aten.view.default:
            return Codes(args[0].codes.view(args[1]), args[0].scales, args[0].signed)
        if function is torch.ops.aten.copy_.default and not isinstance(args[0], Codes):
            to, source = args[0], args[1]
            for begin, end in _pieces(source.numel()):
                to.view(-1)[begin:end] = source.read(begin, end)
            return to
        raise NotImplementedError(f"{function} of 8-bit state: copy it into a plain tensor first")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Codes({list(self.shape)}, signed={self.signed}, device={self.device})"


def _blocks(numbers: Tensor) -> Tensor:
    """[blocks, _BLOCK] of a flat tensor, filled up with zeros."""
    return nn.functional.pad(numbers, (0, -numbers.numel() % _BLOCK)).view(-1, _BLOCK)


@cache
def _map(signed: bool) -> tuple[float, ...]:
    """The 256 values that codes stand for, in order.

    Magnitudes are means of neighbors among evenly spaced numbers of a decade, 2^i of them in the decade below
    10^(i - 6); twice as many where there is no sign.
    """
    magnitudes = []
    for decade in range(7):
        count = 2 ** (decade + (not signed))
        ends = [0.1 + 0.9 * at / count for at in range(count + 1)]
        magnitudes += [10.0 ** (decade - 6) * (low + high) / 2 for low, high in pairwise(ends)]
    if not signed:
        return (0.0, *sorted(magnitudes), 1.0)
    return (-1.0, *sorted(-each for each in magnitudes)[1:], 0.0, *sorted(magnitudes), 1.0)


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(_map(signed), device=device)


@cache
def _boundaries(signed: bool, device: torch.device) -> Tensor:
    """Between neighboring values: a number above the i-th of these, and up to the next, has code i + 1."""
    values = _map(signed)
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    return torch.tensor(middles if signed else [0.0, *middles[1:]], device=device)
