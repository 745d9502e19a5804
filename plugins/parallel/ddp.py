"""Replicated data parallelism: every rank holds the whole model state, and gradients are all-reduced.

Built on FSDP2's replicate, so buckets are the model's units, the all-reduce of one overlaps the backward of the next,
and mixed precision means the same as when sharded. PyTorch DDP: arXiv 2006.15704. A rank that has all of the model, and
no other to sum gradients with, only casts.

Cost per rank for P parameters over n ranks: the whole state; 2 (n-1)/n P sent once per step, however many micro
batches.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule

from titan.contracts import Axis, BuildContext, Costs, Job, ModelPart, Technique, register, sum_gradients
from titan.contracts.base.cost import CollectiveCost, GatherPolicy
from titan.contracts.base.parts import SPARE_COPIES


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.ddp]`: none; its degree is `mesh.dp_replicate`."""


@register
class DistributedDataParallel(Technique):
    """Replicates the model over data-parallel ranks and all-reduces gradients (DDP)."""

    name = "ddp"
    Config = Config
    phase = "shard"
    axes = (
        Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc="replicas of the model state"),
    )
    provides = ("mixed_precision", "summed_gradients", "summed_replicas")
    conflicts: ClassVar = {
        "gathered_parameters": "both wrap the parameters, and the other replicates over dp_replicate too; for DDP set "
        "mesh.dp_shard = 1, and mesh.dp_replicate to the number of ranks"
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._roots: list[FSDPModule] = []

    def cost(self, costs: Costs, job: Job) -> Costs:
        """One all-reduce of all gradients per step, overlapped with the last backward."""
        if _is_alone(job):
            return costs.casting()
        summed = CollectiveCost(
            axes=("dp_replicate", *job.layout.axes_of("sliced")),
            collective="all_reduce",
            where="unit",
            when="backward",
            numel=1,
            itemsize=costs.reduce_itemsize,
            per_parameter=True,
            overlaps=True,
            per="step",
        )
        return replace(
            costs,
            collectives=(*costs.collectives, summed),
            gather=GatherPolicy(
                gather_every="micro_batch", reduce_every="step", sums_replicas=True, spare_copies=SPARE_COPIES
            ),
        )

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Wrap each unit of one module, then what is left with the part itself."""
        if _is_alone(context.job):
            part.cast_parameters(context.spec, context.precision)
            return
        replicas, policy = ("dp_replicate", *context.mesh.layout.axes_of("sliced")), context.precision.policy()
        for module, axis in part.folded(context.mesh):
            replicate(module, mesh=context.mesh.flat(replicas, without=axis), mp_policy=policy)
        settings: dict[str, Any] = {"mesh": context.mesh.flat(replicas), "mp_policy": policy}
        for unit in part.units(context.spec):
            if len(unit) == 1:
                replicate(unit[0], **settings)
        root = replicate(part.module, **settings)
        sum_gradients(root)
        self._roots.append(root)

    def before_microbatch(self, index: int, count: int) -> None:
        """Gradients add up locally and are summed with the last micro batch."""
        last = index == count - 1
        for root in self._roots:
            root.set_is_last_backward(last)
            root.set_requires_gradient_sync(last)


def _is_alone(job: Job) -> bool:
    return job.layout.degree("dp_replicate") * job.layout.degree_of("sliced") == 1 and job.needs_no_shards
