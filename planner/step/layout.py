"""From a job to its `Costs`, and from mesh axes to process groups."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from titan.config import Job
from titan.contracts import Loss, Optimizer, Phase, Technique
from titan.contracts.base.cost import Attention, Costs, PersistentState, Stage
from titan.contracts.base.layout import Layout
from titan.contracts.plugin.conformance import answer
from titan.errors import ConfigError
from titan.planner.machine.network import Group

PHASES: tuple[Phase, ...] = get_args(Phase)


def costs_of(job: Job) -> Costs:
    """The costs of a job: those of its model, changed by the `cost` hooks of techniques, loss and optimizer.

    Raises:
        ConfigError: the model's spec states no operations.
    """
    return cut(uncut(job), job)


def uncut(job: Job) -> Costs:
    """The costs of a job before the model is split into pipeline stages."""
    costs = _of_model(job)
    for technique in sorted(job.techniques, key=lambda technique: PHASES.index(technique.phase)):
        if not _cuts(technique):
            costs = _with(technique, costs, job)
    costs = _with(job.loss, costs, job)
    after = _with(job.optimizer, costs, job)
    if costs.optimizer_on_host:
        own = len(costs.state)
        after = replace(after, state=(*after.state[:own], *(replace(each, on_host=True) for each in after.state[own:])))
    return after


def cut(costs: Costs, job: Job) -> Costs:
    """These costs with the model split into the job's pipeline stages."""
    for technique in job.techniques:
        if _cuts(technique):
            costs = _with(technique, costs, job)
    return costs


def _with(plugin: Technique | Loss | Optimizer, costs: Costs, job: Job) -> Costs:
    return answer(plugin, "cost", Costs, costs, job)


def _cuts(technique: Technique) -> bool:
    return any(axis.weights == "layers" for axis in technique.axes)


def _of_model(job: Job) -> Costs:
    spec, precision = job.spec, job.precision
    if not spec.layer_ops:
        raise ConfigError(f"model {job.model.name}: its spec has no operations; state them in ModelSpec.layer_ops")
    layer = spec.layer_ops
    if job.data.packing == "document_mask":
        layer = tuple(replace(op, documents=True) if isinstance(op, Attention) else op for op in layer)
    dtype, stored = str(precision.param_dtype).removeprefix("torch."), precision.store_dtype.itemsize
    return Costs(
        seq_len=job.data.seq_len,
        dim=spec.dim,
        micro_batch=job.micro_batch,
        micro_batches=job.micro_batches,
        embeddings=spec.embedding_ops,
        layer=layer,
        head=spec.head_ops,
        tied=bool(spec.tied),
        styles=spec.styles,
        itemsize=precision.param_dtype.itemsize,
        reduce_itemsize=precision.reduce_dtype.itemsize,
        store_itemsize=stored,
        dtype=dtype,
        wide_dtype=dtype,
        state=(
            PersistentState(component="parameters", bytes_per_param=stored),
            PersistentState(component="gradients", bytes_per_param=stored),
        ),
        gradients_freed=True,
        update_bytes=_clip_passes(job) * stored,
        accumulate_bytes=accumulated(
            precision.param_dtype.itemsize, precision.reduce_dtype.itemsize, job.micro_batches
        ),
        stages=(Stage(0, range(spec.n_layers)),),
    )


def _clip_passes(job: Job) -> float:
    """Reads and writes of each gradient for norm and clipping, beside the update's own read.

    The norm reads it. Clipping reads and writes it, where it is a pass of its own; in an update that takes
    `grad_scale`, it only adds a write, as PyTorch's fused kernels store the gradient that they have scaled.
    """
    if not job.train.grad_clip:
        return 1.0
    return 3.0 if job.clips_apart else 2.0


def accumulated(itemsize: int, reduce_itemsize: int, micro_batches: int) -> float:
    """Mean bytes per parameter and micro batch to add gradients of `itemsize` bytes to sums of `reduce_itemsize`.

    The first micro batch adds nothing: its gradients become the sum, and are cast where the sum is wider. Each later
    one reads its gradient and the sum, and writes the sum.
    """
    if micro_batches == 1:
        return 0.0
    cast = (itemsize + reduce_itemsize) * (itemsize != reduce_itemsize)
    return (cast + (micro_batches - 1) * (itemsize + 2 * reduce_itemsize)) / micro_batches


def ranks_of(axes: Iterable[str], layout: Layout) -> int:
    """Ranks along these axes: the product of their degrees.

    An axis that folds others adds nothing beside them: its ranks are among theirs.
    """
    named = set(axes)
    return math.prod(layout.degree(axis) for axis in named if not named & set(layout.folded(axis)))


def group_of(axes: Sequence[str], layout: Layout) -> Group:
    """Size and stride of a rank's process group along these neighboring axes.

    The ranks along an axis that folds others are neighbors among the ranks of these.
    """
    spread = {name for axis in axes for name in layout.folded(axis) or (axis,)}
    size = stride = 1
    inside = True
    for axis in reversed(layout.dimensions):
        if axis.name in spread:
            size, inside = size * layout.degrees[axis.name], False
        elif inside:
            stride *= layout.degrees[axis.name]
    return Group(min(size, ranks_of(axes, layout)), stride)


class Sharing(NamedTuple):
    """Ranks that share parameters along some axes: those outside of stacks, and those of stacks.

    Ranks with other weights of a stack (`Costs.stacks_over`) share none of it.
    """

    plain: int
    stacked: int


ALONE = Sharing(1, 1)


def sharing(axes: Iterable[str], costs: Costs, layout: Layout) -> Sharing:
    """How many ranks share parameters along these axes, which include all or none of those that an axis folds."""
    axes = tuple(axes)
    ranks = ranks_of(axes, layout)
    return Sharing(ranks, ranks // ranks_of(apart(axes, costs, layout), layout))


def apart(axes: Iterable[str], costs: Costs, layout: Layout) -> tuple[str, ...]:
    """The axes, of these or folding them, along which ranks hold other weights of each stack."""
    among = set(axes)
    return tuple(
        axis
        for axis in costs.stacks_over
        if layout.degree(axis) > 1 and (axis in among or among.intersection(layout.folded(axis)))
    )


def narrowed(group: Group, ranks: int) -> Group:
    """The ranks of a group that hold the same weights of a stack, `ranks` of them: neighbors hold others."""
    return Group(ranks, group.stride * (group.size // ranks))
