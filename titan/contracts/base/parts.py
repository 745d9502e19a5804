"""What a rank holds of the model while it is put together, and in which precision it computes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from titan.contracts.base.spec import ModelSpec


@dataclass(frozen=True)
class Precision:
    """Of what each thing is. Means the same under every wrapper and under none.

    param: parameters and activations in forward and backward.  reduce: gradients while they are summed over micro
    batches and ranks.  Master weights, optimizer state, loss and norms of gradients stay float32.
    """

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32

    def policy(self) -> MixedPrecisionPolicy:
        """The same for FSDP2. Inputs are not cast: activations follow the parameters, and what a model passes in fp32
        it means to be fp32."""
        if self.param_dtype is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )


def sum_gradients(root: nn.Module) -> None:
    """Make FSDP2 sum gradients and never average them: the loss is divided by the global number of tokens already."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
WrapPlace = Literal["recompute_ops", "compile", "recompute_block"]
WRAP_ORDER: tuple[WrapPlace, ...] = get_args(WrapPlace)
"""Who sits inside whom around a block's forward, innermost first. Recomputing single operations is a choice the
compiler makes, so it sits inside; recomputing a whole block calls the compiled block again, so it sits outside."""


@dataclass
class ModelPart:
    """What one pipeline stage holds of the model; the whole model where nothing splits it.

    shared: canonical names of parameters that another stage holds too and counts (tied weights): left out of the norm.
    hidden_split: ranks over which hidden states between layers are split along the sequence; set by what splits them.
    runner: what an engine calls; the module, unless a technique puts something around it.
    """

    module: nn.Module
    stage: int = 0
    stages: int = 1
    shared: frozenset[str] = frozenset()
    hidden_split: int = 1
    runner: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.runner = self.module
        self._wraps: dict[str, dict[str, Wrap]] = {}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter), each tensor once."""
        return self.module.named_parameters()

    def holds(self, name: str) -> bool:
        """Whether the named module is on this part."""
        return dict(self.module.named_modules()).get(name) is not None

    def units(self, spec: ModelSpec) -> list[list[nn.Module]]:
        """The spec's shard units as far as this part holds them, in forward order."""
        here = dict(self.module.named_modules())
        units = [[here[name] for name in unit if name in here] for unit in spec.shard_units()]
        return [unit for unit in units if unit]

    def layers(self, spec: ModelSpec) -> list[tuple[str, nn.Module]]:
        """(name, module) of the layers on this part, in order."""
        here = dict(self.module.named_modules())
        return [(name, here[name]) for name in spec.layer_names() if name in here]

    def wrap_forward(
        self, name: str, place: Literal["recompute_ops", "compile", "recompute_block"], wrap: Wrap
    ) -> None:
        """Put `wrap` around the forward of a module, at its place in WRAP_ORDER; names of parameters do not change."""
        module = self.module.get_submodule(name)
        wraps = self._wraps.setdefault(name, {})
        assert place not in wraps, f"two techniques wrap {name} at {place}"
        wraps[place] = wrap
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        for at in WRAP_ORDER:
            forward = wraps[at](forward) if at in wraps else forward
        module.forward = forward

    def release(self) -> None:
        """Let go of what a forward without a backward has gathered and kept: a step, a state dict want shards."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def retie(self, spec: ModelSpec) -> None:
        """Make tied parameters one tensor again after something has replaced them."""
        for alias, owner in spec.tied:
            (to, to_name), (source, source_name) = alias.rpartition(".")[::2], owner.rpartition(".")[::2]
            if self.holds(to) and self.holds(source):
                tensor = getattr(self.module.get_submodule(source), source_name)
                setattr(self.module.get_submodule(to), to_name, tensor)
