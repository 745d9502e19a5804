"""Tensor parallelism with sequence parallelism: every layer's matrices are split over the ranks of the axis `tp`.

A pair of linears is split so that it needs one sum over ranks (Megatron-LM, arXiv 1909.08053): the first by output
features (column), which leaves each rank its own heads or hidden units, the second by input features (row),

    y = sum over ranks r of  f(x A_r) B_r.

The embedding and the head are split by vocabulary; a token that a rank does not hold contributes zero to the sum. With
`sequence_parallel` (arXiv 2205.05198) each rank holds only S / tp positions of what lies between those pairs (norms,
residuals, the embeddings' output): the sum becomes a reduce-scatter over S, and an all-gather precedes each pair. With
`loss_parallel` logits stay split over the vocabulary, as DTensors, and the loss sums over ranks without a gather.

The model states how each module is split (`ModelSpec.tensor`). Parameters become DTensors on the axis `tp`, for
initial values, sharding, optimizers, norms and checkpoints. Arithmetic runs on plain tensors: a module's own forward
reads this rank's slice of each parameter, and four collectives join the slices. DTensor would dispatch every operation
in Python; on local tensors a layer costs the host little more than on one rank, and compiles with any recomputation.

Gradients of replicated parameters: a norm under sequence parallelism sees a rank's own positions, a norm of heads a
rank's own heads, so each rank has a partial sum. These are added up over `tp` once per step, in one all-reduce.

Cost for tp ranks, a micro batch of B x S tokens of width D in e bytes per number:
    memory: parameters, gradients and optimizer state / tp. Activations inside a pair / tp. A pair's input and
        what lies between pairs are whole; with sequence_parallel all but the gathered input of each pair is / tp.
    FLOPs: matmuls / tp; norms and residuals / tp with sequence_parallel, repeated on every rank without.
    bytes sent per rank and layer: 2 all-reduces forward and 2 backward, 8 B S D e (tp - 1) / tp; with sequence_parallel
        an all-gather and a reduce-scatter in place of each, the same bytes. The embedding (forward) and the head
        (backward) add one all-reduce or such a pair together. Logits: B S V e (tp - 1) / tp if they are gathered,
        3 numbers per token otherwise. A norm over all heads: 1 number per token forward and 1 backward.
    once per step: the all-reduce of replicated parameters' gradients.
All of this communication is on the critical path: keep tp within a node. `async_tp` hides a part (pipelined.py).

Limits: tp divides n_heads and n_kv_heads, and seq_len with sequence_parallel. Vocabulary and feed-forward width may be
uneven: the last ranks get less, but every rank must get a part.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan.contracts import Axis, BuildContext, Costs, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Collective, CollectiveCost, Elementwise, Matmul, Operation, When, Where
from titan.contracts.base.sharding import SlicedRMSNorm, Slices, slice_parameters
from titan.contracts.base.spec import TensorStyle, glob_matches, nearest
from titan.errors import PluginError
from titan.layers.attention import AttentionCore
from titan.layers.experts import SideLoss

from . import joins, pipelined

UNEQUAL = 1e-2
"""Relative difference of gradients beyond the rounding of any kernel: summands differ by about their own size."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Options of `[plugins.tensor]`; the degree is `mesh.tp`."""

    sequence_parallel: bool = option(
        True, "sequence parallelism: between split matrices a rank holds S / tp positions of each sequence"
    )
    loss_parallel: bool = option(True, "keep logits split over the vocabulary; the loss must accept DTensors")
    async_tp: bool = option(
        False, "asynchronous tensor parallelism: compiled layers overlap collectives with matmuls (CUDA, within a node)"
    )


@register
class TensorParallel(Technique):
    """Splits every layer's matrices over ranks, and the sequence in between (TP, SP)."""

    name = "tensor"
    Config = TensorConfig
    config: TensorConfig
    phase = "partition"
    axes = (
        Axis(
            name="tp", data="same", weights="slices", topology_order=40, doc="ranks that split every layer's matrices"
        ),
    )

    def __init__(self, config: TensorConfig) -> None:
        super().__init__(config)
        self._partial: _Replicated = []  # each rank's gradient is a summand
        self._equal: _Replicated = []  # each rank's gradient is the whole one
        self._checked = False
        self._group: dist.ProcessGroup | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Heads, and the positions of a sequence where they are split, must come out even."""
        tp, others = job.layout.degree("tp"), job.layout.degree_of("sliced")
        if self.config.async_tp:
            yield from pipelined.refusals(job, self.config.sequence_parallel)
        if tp == 1:
            return
        heads = {"n_kv_heads": spec.n_kv_heads, "n_heads": spec.n_heads}
        divides = math.gcd(*heads.values())
        degrees = nearest(tp, lambda degree: divides % degree == 0, most=divides)
        for count, key in {count: key for key, count in heads.items()}.items():
            if count % tp:
                yield f"[model] {key} = {count} cannot be split over mesh.tp = {tp}; nearest tp that fits: {degrees}"
        for key, count, thing in (("vocab_size", spec.vocab_size, "word"), ("ffn_dim", spec.ffn_dim, "hidden unit")):
            if count and (tp - 1) * -(-count // tp) >= count:
                yield f"[model] {key} = {count} leaves some of the mesh.tp = {tp} ranks without a {thing}"
        for module, width in _widths(spec).items():
            if (tp - 1) * -(-width // tp) >= width:
                yield f"[model] {module} has {width} features: some of the mesh.tp = {tp} ranks would be left without"
        seq_len, ranks = job.data.seq_len, tp * others
        if self.config.sequence_parallel and seq_len % ranks:
            lengths = nearest(seq_len, step=ranks)
            split = f"mesh.tp = {tp}" + (f" times {others} other ranks of a sequence" if others > 1 else "")
            yield (
                f"[data] seq_len = {seq_len} cannot be split over {split}; nearest seq_len that fits: {lengths}, "
                "or set sequence_parallel = false"
            )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Slices inside of every pair, of what lies between them with sequence_parallel, and what joins them."""
        tp = job.layout.degree("tp")
        if tp == 1:
            return costs
        split = {"tp_sharded", *(["hidden"] if self.config.sequence_parallel else [])}
        split |= {"logits"} if self.config.loss_parallel else set()
        splits = {region: ranks * (tp if region in split else 1) for region, ranks in costs.splits.items()}
        sent = self._collectives(costs, job.spec)
        sent = pipelined.partly_hidden(sent, costs) if self.config.async_tp else sent
        collectives = (*costs.collectives, *sent)
        return replace(costs, splits=splits, collectives=collectives, layer=tuple(_fused(costs)))

    def _collectives(self, costs: Costs, spec: ModelSpec) -> Iterator[CollectiveCost]:
        """Pairs are entered and left; each way back sends what the way in received."""
        # Layers with globs of their own are entered as often as the others.
        styles = [style for glob, style in spec.tensor.items() if glob.startswith(f"{spec.layers}.*.")]
        enter = styles.count("gather") + styles.count("mixture")
        linears = [(costs.style(op.module), op.of_layers) for op in costs.layer if isinstance(op, Matmul)]
        leave = sum(share for style, share in linears if style == "row")
        leave += max((share for style, share in linears if style == "summand"), default=0)
        yield from self._joins("layer", "forward", costs.dim, enter, leave)
        # What follows the last tensor that is saved is not computed again.
        yield from self._joins("layer", "recompute", costs.dim, enter, leave - (not costs.needs_last_product))
        yield from self._joins("layer", "backward", costs.dim, leave, enter)
        for when in ("forward", "recompute", "backward") if "wide_norm" in styles else ():
            squares = CollectiveCost(
                axes=("tp",), collective="all_reduce", where="layer", when=when, numel=1, itemsize=4
            )
            yield replace(squares, count=styles.count("wide_norm"))
        yield from self._joins("embeddings", "forward", costs.dim, 0, 1)
        yield from self._joins("embeddings", "backward", costs.dim, 1, 0)
        yield from self._joins("head", "forward", costs.dim, 1, 0)
        yield from self._joins("head", "backward", costs.dim, 0, 1)
        if not self.config.loss_parallel:
            yield CollectiveCost(
                axes=("tp",), collective="all_gather", where="head", when="forward", numel=spec.vocab_size
            )

    def _joins(self, where: Where, when: When, numbers: int, gathers: float, sums: float) -> Iterator[CollectiveCost]:
        """What is made whole is gathered from slices, or was whole already; what is summed is sliced then, or not."""
        sliced = self.config.sequence_parallel
        counts: dict[Collective, float] = (
            {"all_gather": gathers, "reduce_scatter": sums} if sliced else {"all_reduce": sums}
        )
        for kind, count in counts.items():
            if count:
                yield CollectiveCost(axes=("tp",), collective=kind, where=where, when=when, numel=numbers, count=count)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Slice the parameters of one part, and hook in what joins the ranks.

        Raises:
            PluginError: the model's spec leaves out a parameter, splits a linear whose input no module gathers, or
                calls a norm of heads one of hidden states: its gradient would then be a rank's own.
        """
        if context.mesh.layout.degree("tp") == 1:
            return
        mesh, collectives = context.mesh["tp"], torch.ops._c10d_functional
        part.costly |= {collectives.all_reduce.default, collectives.reduce_scatter_tensor.default}
        part.costly.add(collectives.all_gather_into_tensor.default)
        self._group = mesh.get_group()
        group, positions = self._group.group_name, self.config.sequence_parallel
        slices = Slices(group, mesh.size(), mesh.get_local_rank(), positions, self.config.async_tp)
        if self.config.async_tp:
            pipelined.enable(self._group, context)
        for name, module in list(part.module.named_modules()):
            if isinstance(module, AttentionCore):
                module.first_head += slices.rank * (context.spec.n_heads // slices.size)
            style = context.spec.style_of(name)
            if style is not None:
                _check_place(style, name, module, context.spec)
                self._split(style, name, module, context.spec, mesh, slices)
            elif any(glob_matches(glob, name) for glob in context.spec.draws) and not _inside(name, context.spec):
                module.register_forward_pre_hook(partial(joins.draw_own, slices))
        part.retie(context.spec)
        left_out = [name for name, parameter in part.parameters() if not isinstance(parameter, DTensor)]
        if left_out:
            raise PluginError(f"ModelSpec.tensor gives no tensor-parallel style for {', '.join(left_out)}")
        if slices.positions:
            part.hidden_split *= slices.size
            part.length_multiple *= slices.size

    def _split(
        self, style: TensorStyle, name: str, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, slices: Slices
    ) -> None:
        """Slice one module's parameters, and hook in what joins the ranks before or after its forward."""
        if style in ("gather", "mixture", "head"):
            module.register_forward_pre_hook(partial(joins.enter, slices))
        match style:
            case "gather":
                return
            case "row" | "mixture":
                module.register_forward_hook(partial(joins.leave, slices))
                for inner in module.modules():
                    if isinstance(inner, SideLoss):  # its gradients are added up too, as those of a router's weights
                        inner.share /= slices.size
            case "embedding":
                module.forward = partial(joins.look_up, slices, module)
            case "positions":
                module.register_forward_hook(partial(joins.own_positions, slices))
            case "wide_norm":
                module.__class__, module.slices = SlicedRMSNorm, slices
            case "head":
                module.forward = partial(joins.logits, mesh, self.config.loss_parallel, module)
        known = {own: spec.parameter(f"{name}.{own}", p.ndim) for own, p in module._parameters.items() if p is not None}
        dims = {own: facts.dim for own, facts in known.items()}
        # One rank adds a row's bias, to its summand.
        slice_parameters(module, mesh, dims, zero="bias" if style == "row" and slices.rank > 0 else "")
        for own, facts in known.items():
            if facts.dim is None:
                summands = slices.positions or facts.partial or style == "row"
                (self._partial if summands else self._equal).append((f"{name}.{own}", module, own))

    def after_backward(self) -> None:
        """Sum, in one all-reduce, the gradients of replicated parameters that saw a rank's own tokens or heads.

        The others are equal up to rounding: ranks may have tuned their kernels otherwise. They become their mean, so
        that replicas never drift apart.

        Raises:
            PluginError: in the first step, gradients differ that are equal on all ranks if the model's spec is right.
        """
        if not self._checked:
            self._check_equal()
        equal = _gradients(self._equal)
        if equal:
            torch._foreach_div_(list(equal.values()), dist.get_world_size(self._group))
        if gradients := _gradients(self._partial) | equal:
            (sums,) = reduced(gradients, self._group, dist.ReduceOp.SUM)
            torch._foreach_copy_(list(gradients.values()), sums)

    def _check_equal(self) -> None:
        gradients = _gradients(self._equal)
        self._checked = True  # once is enough: what differs is the model's place for a module, not chance
        if not gradients or next(iter(gradients.values())).device.type == "meta":
            return
        bounds = reduced(gradients, self._group, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        for name, least, most in zip(gradients, *bounds, strict=True):
            if (most - least).norm() > UNEQUAL * most.norm():
                raise PluginError(
                    f"the gradient of {name} differs between the ranks of tp, which must see the same hidden states: "
                    "ModelSpec.tensor has the wrong style for its module or one near it, or a forward calls no "
                    '"gather" or "row" but works on its parameters'
                )


def reduced(gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None, *operations: Any) -> list[list[Tensor]]:
    """The gradients after an all-reduce over a group by each operation, in float32, all of them at once."""
    flat = torch.cat([gradient.flatten().float() for gradient in gradients.values()])
    results = []
    for operation in operations:
        sums = flat.clone()
        dist.all_reduce(sums, operation, group)
        pieces = torch.split(sums, [gradient.numel() for gradient in gradients.values()])
        results.append([piece.view_as(own) for piece, own in zip(pieces, gradients.values(), strict=True)])
    return results


def _widths(spec: ModelSpec) -> dict[str, int]:
    """Linears whose features are split, and are neither of heads nor as many as `ffn_dim` -> their features."""
    heads = {spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim, spec.ffn_dim}
    columns = (op for op in spec.layer_ops if isinstance(op, Matmul) and spec.styles[op.module] == "column")
    return {op.module: op.outputs for op in columns if op.outputs not in heads}


def _fused(costs: Costs) -> Iterator[Operation]:
    """A layer's operations, in which a wide norm saves what one kernel does, on any device."""
    for op in costs.layer:
        wide = isinstance(op, Elementwise) and costs.style(op.module) == "wide_norm"
        saved = tuple(replace(kept, kernels="any") for kept in op.saved if kept.kernels != "several")
        yield replace(op, saved=saved) if wide else op


_Replicated = list[tuple[str, nn.Module, str]]
"""Canonical name, module, and name in the module of parameters that every rank of tp holds whole."""


def _gradients(replicated: _Replicated) -> dict[str, Tensor]:
    """This rank's gradients by name; shards where data parallelism shards them."""
    parameters = {name: module._parameters[own] for name, module, own in replicated}
    return {name: p.grad.to_local() for name, p in parameters.items() if p is not None and p.grad is not None}


def _check_place(style: TensorStyle, name: str, module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a linear or norm in a place where its input, or its gradient, would be another than the style says."""
    around = _around(name, spec)
    inside = _inside(name, spec)
    if style in ("gather", "mixture") and inside:
        raise PluginError(f'the model\'s spec has {name} as a "{style}", but a module around it gathers already')
    if (style in ("summand", "router") and "mixture" not in around) or (style == "row" and "mixture" in around):
        place = "inside" if style == "row" else "outside"
        raise PluginError(f'the model\'s spec has {name} as a "{style}" {place} of a "mixture" in ModelSpec.tensor')
    if style in ("column", "row", "qk_norm", "wide_norm") and not inside:
        raise PluginError(
            f'the model\'s spec has {name} as a "{style}", but no module around it is a "gather" in ModelSpec.tensor: '
            "its input would not be whole"
        )
    if style == "wide_norm" and not (type(module) is nn.RMSNorm and module.eps and module.weight is not None):
        told = f'the model\'s spec has {name} as a "wide_norm", but it is a {type(module).__name__}'
        raise PluginError(f"{told}; it must be an nn.RMSNorm with a weight and an eps")
    widths = {parameter.shape[-1] for parameter in module.parameters(recurse=False) if parameter.ndim}
    if style == "norm" and inside and widths - {spec.dim}:
        raise PluginError(
            f'the model\'s spec has {name} as a "norm" of hidden states, {spec.dim} wide, but its parameters are '
            f'{", ".join(map(str, sorted(widths)))} wide; a norm of heads is a "qk_norm" or a "wide_norm" there'
        )


def _around(name: str, spec: ModelSpec) -> set[TensorStyle | None]:
    """The styles of the modules that a module is part of."""
    return {spec.style_of(name[:end]) for end, letter in enumerate(name) if letter == "."}


def _inside(name: str, spec: ModelSpec) -> bool:
    """Whether a module is part of one that is given whole hidden states."""
    return not _around(name, spec).isdisjoint(("gather", "mixture"))
