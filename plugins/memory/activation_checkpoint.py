"""Activation checkpointing: save fewer activations in forward, and recompute the others in backward.

full       each block saves only its input: one more forward of the layers, about a third more FLOPs.
every_n    the same for every n-th block: memory and FLOPs in proportion.
selective  the results of matrix products and attention are saved, the cheap operations are recomputed: a few percent
           more time for most of the memory saving (Chen et al., arXiv 1604.06174). Batched products are not
           saved: they make the S x S scores of attention that writes them, and its core is recomputed whole.
attention  all is saved but the S x S scores of attention, which are recomputed from q, k and v (Korthikanti et al.,
           arXiv 2205.05198, who call it selective; Megatron-LM's "core_attn"). Saves H S numbers per token and layer,
           for 2 S H N FLOPs. Only for attention that writes its scores (`model.attention = "unfused"`): with a flash
           kernel, which recomputes them itself, the mode has no effect, and the run says so at its start.

With tensor parallelism, selective mode saves the partial sums of row-wise products as well as their reduced results,
[B, S, D] twice per layer, although backward reads neither. PyTorch would otherwise recompute the product; saving its
result costs only memory.

Recomputation changes no number: the same kernels run on the same inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan.contracts import (
    AttentionCore,
    BuildContext,
    Costs,
    Fact,
    Job,
    ModelPart,
    ModelSpec,
    Technique,
    option,
    register,
)
from titan.contracts.base.cost import Attention, Operation, Recompute
from titan.contracts.layers.experts import stacked_product

_SAVED = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        stacked_product._opoverload,
    }
)
"""What selective mode keeps of a model's operations, besides the `costly_operations` of techniques.

`bmm` is not among them: its results include the S x S scores of attention that writes them.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.activation_checkpoint]`: what is recomputed in backward."""

    mode: Literal["full", "every_n", "selective", "attention"] = option(
        "full",
        "recompute all blocks, every n-th block, all operations but matrix products and attention, or attention alone",
        former_values={"every": "every_n"},
    )
    every: int = option(2, 'mode "every_n": n; 2 recomputes every second block', unit="blocks", at_least=1)


@register
class ActivationCheckpoint(Technique):
    """Recomputes activations in backward: whole blocks, every n-th, all but the costly operations, or attention."""

    name = "activation_checkpoint"
    Config = Config
    phase = "recompute"
    search_toggle = True
    search_space: ClassVar = (
        {"mode": "full"}, {"mode": "selective"}, {"mode": "every_n", "every": 2}, {"mode": "every_n", "every": 4},
        {"mode": "attention"},
    )  # fmt: skip

    def facts(self) -> dict[Fact, str]:
        """What selective mode saves serves one backward."""
        if self.config.mode != "selective":
            return {}
        why = '[plugins.activation_checkpoint] mode = "selective"'
        return {"one_backward": f'the activations that {why} saves serve a single backward pass; set mode = "full"'}

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        """Mode "attention" where no attention writes its scores."""
        if self.config.mode == "attention" and not _writes_scores(spec.layer_ops):
            yield (
                'mode = "attention" has no effect: attention of this model writes no S x S scores; remove the mode, or '
                'set model.attention = "unfused" if the model has it'
            )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Layers keep their input, the products of selective mode, or all but scores; the others are recomputed."""
        if self.config.mode == "attention":
            again = Recompute(saved="all_but_scores") if _writes_scores(costs.layer) else None
            return replace(costs, recompute=again)
        every = self.config.every if self.config.mode == "every_n" else 1
        keeps: Any = "products" if self.config.mode == "selective" else "input"
        return replace(costs, recompute=Recompute(every=every, saved=keeps))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Wrap the forward of the blocks of this model part, every n-th with `every_n`; or of their attention cores."""
        if self.config.mode == "attention":
            for name, module in part.module.named_modules():
                if isinstance(module, AttentionCore) and module.writes_scores:
                    part.wrap_forward(name, "recompute_ops", self._wrap)
            return
        place: Any = "recompute_ops" if self.config.mode == "selective" else "recompute_block"
        stride = self.config.every if self.config.mode == "every_n" else 1
        costly = {operation for technique in context.techniques for operation in technique.costly_operations()}
        wrap = partial(self._wrap, saved=_SAVED | costly)
        for name, _ in part.layers(context.spec):
            if int(name.rpartition(".")[2]) % stride == 0:
                part.wrap_forward(name, place, wrap)

    def _wrap(self, forward: Callable[..., Any], saved: frozenset[OpOverload] = frozenset()) -> Callable[..., Any]:
        # A forward draws by position alone (Model.build; the run refuses others): there is no state to keep.
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.config.mode == "selective":
            settings["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, saved))
        return partial(checkpoint, forward, **settings)


def _writes_scores(operations: Iterable[Operation]) -> bool:
    return any(isinstance(op, Attention) and op.scores_written for op in operations)


def _policy(saved: frozenset[OpOverload], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE
