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
budget     within each compiled block the compiler saves what takes longest to compute, up to the share `budget` of what
           it would save otherwise (PyTorch's activation_memory_budget, a knapsack); at 0 the block's input alone. The
           planner counts all of the share, and time in proportion to the rest: upper bounds.
auto       the first of none, attention, selective, every_n with 4 and with 2, and full with which the job fits by the
           plan. A run says at its start which one it is. Where the device's memory is not known, none.

With tensor parallelism, selective mode saves the partial sums of row-wise products as well as their reduced results,
[B, S, D] twice per layer, although backward reads neither. PyTorch would otherwise recompute the product; saving its
result costs only memory.

Recomputation changes no number, as the same operations run on the same inputs, but for what a compiler rounds in fewer
places. In compiled blocks it is part of the graph, which takes half the host's time of calling them again. Routers'
choices are saved there: of near equals, another kernel might choose another. Where ranks exchange something within a
block, its results would be saved, so there whole blocks are called again.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch._functorch import config as functorch
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan.contracts import BuildContext, Costs, Fact, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Attention, Operation, Recompute
from titan.contracts.base.parts import Wrap, WrapPlace
from titan.errors import PluginError
from titan.layers.attention import AttentionCore
from titan.layers.experts import STACKED_PRODUCT

# PyTorch warns there of operations in place: in graphs they change no number, and else saving what they change raises.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())

_SAVED = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, STACKED_PRODUCT})
"""What selective mode keeps of a model's operations, besides PyTorch's kernels of attention and `ModelPart.costly`.

`bmm` is not among them: its results include the S x S scores of attention that writes them.
"""

_SAVES_PAST_HOOKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether PyTorch (2.15) asks if hooks of saved tensors see what selective mode saves; in others they do not."""

_NOTHING = ("none", "auto")
"""Modes that recompute nothing; the host replaces "auto" where memory is short."""

Policy = Callable[..., CheckpointPolicy]

_CHOICES = frozenset({torch.ops.aten.topk.default})
"""What graphs save of blocks that they recompute: a few numbers per token."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.activation_checkpoint]`: what is recomputed in backward."""

    mode: Literal["full", "every_n", "selective", "attention", "budget", "auto", "none"] = option(
        "full",
        "recompute all blocks, every n-th block, all operations but matrix products and attention, attention alone, "
        "what the compiler chooses, the least of these that fits, or nothing",
    )
    every: int = option(2, 'mode "every_n": n; 2 recomputes every second block', unit="blocks", at_least=1)
    budget: float = option(
        0.5, 'mode "budget": share of what compiled blocks would save that they may save', at_least=0, at_most=1
    )


@register
class ActivationCheckpoint(Technique):
    """Recomputes activations in backward: whole blocks, every n-th, all but the costly operations, or attention."""

    name = "activation_checkpoint"
    Config = Config
    phase = "recompute"
    search_toggle = True
    search_space: ClassVar = (
        {"mode": "full"},
        {"mode": "selective"},
        {"mode": "every_n", "every": 2},
        {"mode": "every_n", "every": 4},
        {"mode": "attention"},
    )

    def facts(self) -> dict[Fact, str]:
        """What selective mode saves serves one backward."""
        if self.config.mode != "selective":
            return {}
        why = '[plugins.activation_checkpoint] mode = "selective"'
        return {"one_backward": f'the activations that {why} saves serve a single backward pass; set mode = "full"'}

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """A budget is the compiler's."""
        if self.config.mode != "budget":
            return
        if not any(technique.phase == "compile" for technique in job.techniques):
            yield 'mode = "budget" is chosen by a compiler, but no technique compiles blocks; enable one that does'
        for why in job.stating("unpartitioned"):
            yield f'mode = "budget" needs a compiler that chooses what is saved, but {why}'

    def unset_options(self, job: Job) -> list[dict[str, Any]]:
        """Mode "auto": from no recomputation to that of all blocks, by the FLOPs that are repeated."""
        if self.config.mode != "auto":
            return []
        scores: list[dict[str, Any]] = [{"mode": "attention"}] if _writes_scores(job.spec.layer_ops) else []
        blocks = [{"mode": "every_n", "every": 4}, {"mode": "every_n", "every": 2}, {"mode": "full"}]
        return [{"mode": "none"}, *scores, {"mode": "selective"}, *blocks]

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        """Mode "attention" where no attention writes its scores."""
        if self.config.mode == "attention" and not _writes_scores(spec.layer_ops):
            yield (
                'mode = "attention" has no effect: attention of this model writes no S x S scores; remove the mode, or '
                'set model.attention = "unfused" if the model has it'
            )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Layers keep their input, products, a share, or all but scores; the others are recomputed."""
        if self.config.mode in _NOTHING:
            return costs
        if self.config.mode == "budget":
            return replace(costs, recompute=Recompute(saved="share", share=self.config.budget))
        if self.config.mode == "attention":
            again = Recompute(saved="all_but_scores") if _writes_scores(costs.layer) else None
            return replace(costs, recompute=again)
        every = self.config.every if self.config.mode == "every_n" else 1
        keeps: Any = "products" if self.config.mode == "selective" else "input"
        return replace(costs, recompute=Recompute(every=every, saved=keeps))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Wrap the forward of the blocks of this model part, every n-th with `every_n`; or of their attention cores."""
        if self.config.mode in _NOTHING:
            return
        if self.config.mode == "attention":
            for name, module in part.module.named_modules():
                if isinstance(module, AttentionCore) and module.writes_scores:
                    part.wrap_forward(name, "recompute", _recomputed)
            return
        if self.config.mode == "budget":
            for name, _ in part.layers(context.spec):
                part.wrap_forward(name, "call", partial(_within_budget, self.config.budget))
            return
        self._wrap_blocks(part, context)

    def _wrap_blocks(self, part: ModelPart, context: BuildContext) -> None:
        stride = self.config.every if self.config.mode == "every_n" else 1
        blocks = [name for name, _ in part.layers(context.spec) if int(name.rpartition(".")[2]) % stride == 0]
        compiled = any(technique.phase == "compile" for technique in context.techniques)
        wraps: dict[WrapPlace, Wrap]
        if self.config.mode == "selective":
            wraps = {"recompute": partial(_recomputed, policy=partial(_selective, _SAVED | part.costly))}
        elif not compiled or context.job.layout.degree_of("slices", "sliced") > 1:
            wraps = {"call": _recomputed}
        else:
            wraps = {"recompute": partial(_recomputed, policy=_whole_block)}
            if context.device.type == "cuda":
                wraps["call"] = _seeding_nothing
        for name in blocks:
            for place, wrap in wraps.items():
                part.wrap_forward(name, place, wrap)


def _recomputed(forward: Callable[..., Any], policy: Policy | None = None) -> Callable[..., Any]:
    # A forward draws by position alone (Model.build; the run refuses others): there is no state to keep.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if _SAVES_PAST_HOOKS:
        settings["respect_saved_tensors_hooks"] = False
    if policy is not None:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, **settings)


def _within_budget(budget: float, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled forward; what it saves is chosen when it is compiled, in its first call."""

    # Process groups hold no tensors.
    chosen = {"activation_memory_budget": budget, "unsafe_treat_script_objects_as_zero_size": True}

    def limited(*args: Any, **kwargs: Any) -> Any:
        with functorch.patch(chosen):
            return forward(*args, **kwargs)

    return limited


def _seeding_nothing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled forward that leaves the host's generator as it was.

    On CUDA, PyTorch seeds a generator from it for each operation that is recomputed and might draw, as attention.
    """

    def unmoved(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return unmoved


def _writes_scores(operations: Iterable[Operation]) -> bool:
    return any(isinstance(op, Attention) and op.scores_written for op in operations)


def _policy(saved: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(saved: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _may_draw(operation) else _policy(saved, context, operation)


@cache
def _may_draw(operation: Any) -> bool:
    """Whether it can draw random numbers: in blocks, PyTorch's kernels of attention alone, which have a dropout."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _whole_block(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Recompute all; PluginError for what draws: in graphs not from the default generators, which the run watches."""
    if _may_draw(operation):
        (signature,) = get_signature_for_torch_op(operation)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments.get("dropout_p", 1.0) != 0:
            raise PluginError(
                f"a block that is recomputed calls {operation}, which draws random numbers; draw by position with a "
                "titan.contracts.RandomModule"
            )
    return _policy(_CHOICES, context, operation)
