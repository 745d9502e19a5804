"""Tensor parallelism with sequence parallelism: every layer's matrices are split over the ranks of the axis `tp`.

A pair of linears is split so that it needs one sum over ranks (Megatron-LM, arXiv 1909.08053): the first by output
features (column), which leaves each rank its own heads or hidden units, the second by input features (row),

    y = sum over ranks r of  f(x A_r) B_r.

The embedding and the head are split by vocabulary; a token that a rank does not hold contributes zero to the sum. With
`sequence_parallel` (arXiv 2205.05198) each rank holds only S / tp positions of what lies between those pairs (norms,
residuals, the embeddings' output): the sum becomes a reduce-scatter over S, and an all-gather precedes each pair. With
`loss_parallel` logits stay split over the vocabulary, as DTensors, and the loss sums over ranks without a gather.

The model states how each module is split (`ModelSpec.tensor`); this file translates that into DTensor layouts.
Parameters without a split are replicated DTensors, so that optimizers and clipping see one kind of tensor.

Cost for tp ranks, a micro batch of B x S tokens of width D in e bytes per number:
    memory: parameters, gradients and optimizer state / tp. Activations inside a pair / tp. A pair's input and
        what lies between pairs are whole; with sequence_parallel all but the gathered input of each pair is / tp.
    FLOPs: matmuls / tp; norms and residuals / tp with sequence_parallel, repeated on every rank without.
    bytes sent per rank and layer: 2 all-reduces forward and 2 backward, 8 B S D e (tp - 1) / tp; with sequence_parallel
        an all-gather and a reduce-scatter in place of each, the same bytes. The embedding (forward) and the head
        (backward) add one all-reduce or such a pair together. Logits: B S V e (tp - 1) / tp if they are gathered,
        3 numbers per token otherwise.
    once per step: one all-reduce of the gradients of q/k norms, and with sequence_parallel of norms, learned positions.
All of this communication is on the critical path: keep tp within a node.

Limits: tp divides n_heads and n_kv_heads, and seq_len with sequence_parallel. Vocabulary and feed-forward width may be
uneven: the last ranks get less, but every rank must get a part.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from titan.contracts import Axis, BuildContext, Costs, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Collective, CollectiveCost, When, Where
from titan.contracts.base.spec import TensorStyle, glob_matches, nearest
from titan.errors import PluginError


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Options of `[plugins.tensor]`; the degree is `mesh.tp`."""

    sequence_parallel: bool = option(
        True, "sequence parallelism: between split matrices a rank holds S / tp positions of each sequence"
    )
    loss_parallel: bool = option(True, "keep logits split over the vocabulary; the loss must accept DTensors")


@register
class TensorParallel(Technique):
    """Splits every layer's matrices over ranks, and the sequence in between (TP, SP)."""

    name = "tensor"
    Config = TensorConfig
    config: TensorConfig
    phase = "partition"
    axes = (Axis(name="tp", role="model", topology_order=40, doc="ranks that split every layer's matrices"),)

    def __init__(self, config: TensorConfig) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Heads, and the positions of a sequence where they are split, must come out even."""
        tp, others = job.layout.degree("tp"), job.layout.role_degree("sequence")
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
        return replace(costs, splits=splits, collectives=(*costs.collectives, *self._collectives(costs, job.spec)))

    def _collectives(self, costs: Costs, spec: ModelSpec) -> Iterator[CollectiveCost]:
        """Pairs are entered and left; each way back sends what the way in received."""
        styles = [style for glob, style in spec.tensor.items() if glob.startswith(f"{spec.layers}.")]
        enter, leave = styles.count("gather"), styles.count("row")
        yield from self._joins("layer", "forward", costs.dim, enter, leave)
        # What follows the last product that is kept is not computed again.
        yield from self._joins("layer", "recompute", costs.dim, enter, leave - 1)
        yield from self._joins("layer", "backward", costs.dim, leave, enter)
        yield from self._joins("embeddings", "forward", costs.dim, 0, 1)
        yield from self._joins("embeddings", "backward", costs.dim, 1, 0)
        yield from self._joins("head", "forward", costs.dim, 1, 0)
        yield from self._joins("head", "backward", costs.dim, 0, 1)
        if not self.config.loss_parallel:
            yield CollectiveCost(
                axes=("tp",), collective="all_gather", where="head", when="forward", numel=spec.vocab_size
            )

    def _joins(self, where: Where, when: When, numbers: int, gathers: int, sums: int) -> Iterator[CollectiveCost]:
        """What is made whole is gathered from slices, or was whole already; what is summed is sliced then, or not."""
        sliced = self.config.sequence_parallel
        joins: dict[Collective, int] = (
            {"all_gather": gathers, "reduce_scatter": sums} if sliced else {"all_reduce": sums}
        )
        for kind, count in joins.items():
            if count:
                yield CollectiveCost(axes=("tp",), collective=kind, where=where, when=when, numel=numbers, count=count)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Replace the parameters of one part by their slices, and hook in what joins them.

        Raises:
            PluginError: the model's spec leaves out a parameter, or calls a norm of heads one of hidden states: its
                gradient would then be a rank's own.
        """
        if context.mesh.layout.degree("tp") == 1:
            return
        mesh = context.mesh["tp"]
        for name, module in list(part.module.named_modules()):
            kind = next((kind for glob, kind in context.spec.tensor.items() if glob_matches(glob, name)), None)
            if kind is not None:
                _check_norm(kind, name, module, context.spec)
                # No communication: ranks hold equal whole tensors, or none yet on the meta device.
                parallelize_module(module, mesh, self._style(kind), src_data_rank=None)
        part.retie(context.spec)
        left_out = [name for name, parameter in part.parameters() if not isinstance(parameter, DTensor)]
        if left_out:
            raise PluginError(f"ModelSpec.tensor gives no tensor-parallel style for {', '.join(left_out)}")
        if self.config.sequence_parallel:
            part.hidden_split *= mesh.size()
        self._parts.append(part)

    def _style(self, kind: TensorStyle) -> ParallelStyle:
        hidden = Shard(1) if self.config.sequence_parallel else Replicate()
        split = self.config.loss_parallel
        match kind:
            case "column":
                return ColwiseParallel()
            case "row":
                return _Row(output_layouts=hidden)
            case "embedding":
                return _Vocabulary(hidden)
            case "head":
                logits = Shard(-1) if split else Replicate()
                return ColwiseParallel(input_layouts=hidden, output_layouts=logits, use_local_output=not split)
            case "norm":
                return _Replicated(hidden, hidden)
            case "qk_norm":
                # Rows of this rank's heads among those of all heads. Which dimension they lie along is all the same to
                # what works on the last one.
                return _Replicated(Shard(0), Shard(0))
            case "positions":
                return _Replicated(Replicate(), hidden)
            case "gather":
                return _Gather(hidden)

    def after_backward(self) -> None:
        """Sum, in one all-reduce, the gradients of replicated parameters that saw a rank's own tokens or heads.

        Where data parallelism has wrapped the part, its reduction has done so.
        """
        partial = [
            parameter
            for part in self._parts
            for _, parameter in part.parameters()
            if isinstance(parameter.grad, DTensor) and any(p.is_partial() for p in parameter.grad.placements)
        ]
        if not partial:
            return
        gradients = [parameter.grad.to_local() for parameter in partial]  # type: ignore[union-attr]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mesh = partial[0].device_mesh  # type: ignore[attr-defined]
        dist.all_reduce(flat, group=mesh.get_group())
        for parameter, whole in zip(partial, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            parameter.grad = DTensor.from_local(whole.view(parameter.shape), mesh, [Replicate()], run_check=False)


def _check_norm(kind: TensorStyle, name: str, module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a "norm" that cannot be one of hidden states, which a pair of linears would feed with a slice of heads."""
    above = [name[:end] for end, letter in enumerate(name) if letter == "."]
    inside = any(style == "gather" and glob_matches(glob, n) for glob, style in spec.tensor.items() for n in above)
    widths = {parameter.shape[-1] for parameter in module.parameters(recurse=False) if parameter.ndim}
    if kind == "norm" and inside and widths - {spec.dim}:
        raise PluginError(
            f'the model\'s spec has {name} as a "norm" of hidden states, {spec.dim} wide, but its parameters are '
            f'{", ".join(map(str, sorted(widths)))} wide; a norm of heads is a "qk_norm" in ModelSpec.tensor'
        )


class _Row(RowwiseParallel):
    """Rowwise, for input features that need not come out even: their number is the module's, not tp times a rank's."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> DTensor:
        shape = torch.Size((*inputs[0].shape[:-1], mod.in_features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(inputs[0], device_mesh, input_layouts, run_check=False, shape=shape, stride=stride)


@dataclass
class _Vocabulary(ParallelStyle):
    """A table cut by words: a rank looks up the words it holds, the others count as zero, and ranks are summed.

    DTensor's own lookup makes the gradient of the whole table on every rank. This one's is a slice, as the table is.
    """

    wanted: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        words, requires_grad = module.num_embeddings, module.weight.requires_grad
        slices = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.weight = nn.Parameter(slices, requires_grad=requires_grad)
        width = -(-words // device_mesh.size())
        start = device_mesh.get_local_rank() * width

        def look_up(tokens: Tensor) -> Tensor:
            here = (tokens >= start) & (tokens < start + width)
            table = cast(DTensor, module.weight)  # read at each call: sharding replaces it
            rows = F.embedding(torch.where(here, tokens - start, 0), table.to_local())
            summands = torch.where(here[..., None], rows, 0.0)
            # Waited for: the backward of a compiled layer fails on PyTorch 2.13 if its input is still under way.
            return _laid_out(summands, device_mesh, Partial(), self.wanted).to_local()

        module.forward = look_up  # type: ignore[method-assign, assignment]
        return module


@dataclass
class _Replicated(ParallelStyle):
    """Whole parameters on every rank. The input comes in one layout, is worked on in another, which the output has too.

    Parameters are DTensors, so the gradient of one that saw a slice of the input knows that it is a partial sum.
    """

    given: Placement
    worked_on: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_laid_out(args[0], device_mesh, self.given, self.worked_on), *args[1:])

        def leave(module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[self.worked_on]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


@dataclass
class _Gather(ParallelStyle):
    """The module's first argument becomes whole once for all linears in it, and so does its gradient's sum."""

    given: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_laid_out(args[0], device_mesh, self.given, Replicate()), *args[1:])

        module.register_forward_pre_hook(enter)
        return module


def _laid_out(local: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, [given], run_check=False).redistribute(placements=[wanted])
