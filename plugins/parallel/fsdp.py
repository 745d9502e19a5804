"""Fully sharded data parallelism (FSDP2) and hybrid sharding (HSDP).

Parameters, gradients and optimizer state of each unit (a layer, the embedding, the head) are split over the ranks of
`dp_shard`; a unit is gathered when it is used and its gradients are reduce-scattered. With `dp_replicate` above 1 the
shards are replicated and gradients are all-reduced between the replicas, unless another technique provides
`summed_replicas`: it then finds its replica's sum in `.grad`. ZeRO: arXiv 1910.02054; FSDP: 2304.11277.

Cost per rank for P parameters over n ranks: state P/n; `zero_stage` 3 gathers P twice per micro batch (for forward and
for backward) and reduces P once; 2 gathers once and keeps P from forward to backward; 1 gathers and reduces once per
step for any number of micro batches, and holds P gathered parameters and P gradients in the reduce dtype meanwhile.
Bytes sent per gather or reduction: (n-1)/n of P in the dtype moved.

Applies mixed precision: the gather casts fp32 shards to the compute dtype, the reduction sums in the reduce dtype. A
rank that has all of the model, at degree 1 of all axes, only casts: parameters as a forward begins, and the gradients
of each unit when its backward ends. Copies of embedding tables are not made there, but of the rows looked up.
`zero_stage = 3` casts again for each use, as on many ranks, by FSDP2.

Limits: a pipeline schedule that splits the backward reduces once per step, so zero_stage 2 and 3 are refused with it.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from titan.contracts import Axis, BuildContext, Costs, Fact, Job, ModelPart, Technique, option, register, sum_gradients
from titan.contracts.base.cost import CollectiveCost, GatherPolicy
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.parts import SPARE_COPIES

# Nothing here or in a model writes to an activation in place, which is what this warns of.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.fsdp]`: ZeRO stage and offload."""

    zero_stage: Literal[1, 2, 3] | None = option(
        None,
        "3: gather parameters for each use; 2: keep them from forward to backward; 1: gather and reduce once per step; "
        "unset: 1 with several micro batches, 2 with one, the fastest of each; 3 where memory would run short",
    )


class _Runner(nn.Module):
    """Hides that a module is sharded from a pipeline engine, which would else reduce once per step by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.module(*args, **kwargs)
        return result


@register
class FullyShardedDataParallel(Technique):
    """Shards parameters, gradients and optimizer state over data-parallel ranks (FSDP2, HSDP, ZeRO 1-3)."""

    name = "fsdp"
    Config = Config
    phase = "shard"
    axes = (
        Axis(
            name="dp_shard",
            data="dealt",
            weights="copies",
            topology_order=20,
            default=-1,
            doc="ranks that shard one copy of the model state",
        ),
    )
    covers = ("dp_replicate",)
    provides = ("mixed_precision", "gathered_parameters", "summed_gradients")
    default = True
    search_space: ClassVar = tuple({"zero_stage": stage} for stage in (1, 2, 3))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._roots: list[FSDPModule] = []
        self._stage = 3

    def facts(self) -> dict[Fact, str]:
        """Gathered or cast parameters are allocated anew; stages 2 and 3 shard gradients as soon as they are there."""
        stage = self.config.zero_stage
        moved = "[plugins.fsdp] gathers or casts parameters into newly allocated memory"
        sharded = f"[plugins.fsdp] zero_stage = {stage} reduces gradients per micro batch; set zero_stage = 1"
        return {"moves_parameters": moved, **({"reduces_per_micro_batch": sharded} if stage in (2, 3) else {})}

    def _stage_of(self, job: Job) -> int:
        several = job.micro_batches > 1 or job.layout.degree_of("layers") > 1
        return self.config.zero_stage or (1 if several else 2)

    def _is_alone(self, job: Job) -> bool:
        """Whether a rank gathers from nobody, and keeps what it has cast until the backward."""
        replicas = job.layout.degree("dp_replicate") if _replicates(job) else 1
        ranks = job.layout.degree("dp_shard") * job.layout.degree_of("sliced") * replicas
        return ranks == 1 and job.needs_no_shards and self._stage_of(job) < 3

    def unset_options(self, job: Job) -> list[dict[str, Any]]:
        """The fastest stage, or the one that holds least."""
        return [{"zero_stage": self._stage_of(job)}, {"zero_stage": 3}]

    def cost(self, costs: Costs, job: Job) -> Costs:
        """State over dp_shard and axes that slice sequences; gathers and reductions as often as the stage says."""
        stage, shard = self._stage_of(job), ("dp_shard", *job.layout.axes_of("sliced"))
        gathered: tuple[Literal["step", "micro_batch", "use"], ...] = ("step", "micro_batch", "use")
        every: Literal["step", "micro_batch"] = "step" if stage == 1 else "micro_batch"
        replicated = _replicates(job)
        if self._is_alone(job):
            return costs.casting()
        return replace(
            costs,
            state=tuple(replace(each, axes=tuple(dict.fromkeys((*each.axes, *shard)))) for each in costs.state),
            gather=GatherPolicy(
                gather_every=gathered[stage - 1],
                reduce_every=every,
                sums_replicas=replicated,
                spare_copies=SPARE_COPIES,
            ),
            collectives=(*costs.collectives, *self._collectives(costs, stage, shard, replicated)),
            updated_over=shard,
            # Stages 2 and 3 add what they have reduced: a shard, beside computation.
            accumulate_bytes=costs.accumulate_bytes if stage == 1 else 0.0,
            copied_bytes=_copied(costs, stage, replicated) if math.prod(map(job.layout.degree, shard)) == 1 else 0.0,
        )

    def _collectives(self, costs: Costs, stage: int, over: tuple[str, ...], replicated: bool) -> list[CollectiveCost]:
        per: Any = "step" if stage == 1 else "micro_batch"
        settings: dict[str, Any] = {"where": "unit", "per_parameter": True, "overlaps": True}
        shard: dict[str, Any] = {**settings, "axes": over, "per": per}
        found = [CollectiveCost(collective="all_gather", when="forward", numel=1, **shard)]
        if stage == 3:
            found.append(
                CollectiveCost(collective="all_gather", when="backward", numel=1, skip_last_unit=True, **shard)
            )
        if stage > 1 and costs.micro_batches > 1:
            # Prefetched at the end of a backward that is not the step's last, for nobody.
            again: dict[str, Any] = {**shard, "where": "head", "per": "step"}
            found.append(CollectiveCost(collective="all_gather", when="backward", numel=1, **again))
        summed: dict[str, Any] = {"when": "backward", "itemsize": costs.reduce_itemsize}
        found.append(CollectiveCost(collective="reduce_scatter", numel=1, **summed, **shard))
        if not replicated:
            return found
        replicas = CollectiveCost(
            axes=("dp_replicate",),
            collective="all_reduce",
            numel=1,
            sharded_over=over,
            per="step",
            **summed,
            **settings,
        )
        return [*found, replicas]

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Wrap each unit, then the rest with the part itself."""
        pipelined = context.job.layout.degree_of("layers") > 1
        self._stage = self._stage_of(context.job)
        if self._is_alone(context.job):
            part.cast_parameters(context.spec, context.precision)
            return
        replicated = _replicates(context.job)
        shards = ("dp_shard", *context.mesh.layout.axes_of("sliced"))
        dimensions = (("dp_replicate",), shards) if replicated else (shards,)
        policy = context.precision.policy()
        settings: dict[str, Any] = {"mesh": context.mesh.flat(*dimensions), "mp_policy": policy}
        settings["shard_placement_fn"] = partial(_even_dimension, mesh=settings["mesh"])
        if context.job.stating("weights_on_host"):
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
        self._shard_folded(part, context.mesh, dimensions, settings)
        *units, last = part.units(context.spec)
        for unit in units:
            fully_shard(unit, reshard_after_forward=self._stage == 3, **settings)
        # What the forward ends with, the backward begins with: gathering it again would only cost.
        fully_shard(last, reshard_after_forward=False, **settings)
        root = fully_shard(part.module, reshard_after_forward=False, **settings)
        # A rank alone sums nothing; told to, PyTorch may copy each of its gradients again, divided by 1.
        if settings["mesh"].size() > 1:
            sum_gradients(root)
        self._roots.append(root)
        if pipelined and self._stage > 1:
            part.runner = _Runner(part.module)

    def _shard_folded(
        self, part: ModelPart, mesh: Mesh, dimensions: Sequence[Sequence[str]], settings: dict[str, Any]
    ) -> None:
        """Shard slices along an axis that folds others over what it leaves of them.

        They are gathered with the unit around them.
        """
        meshes = {axis: mesh.flat(*dimensions, without=axis) for _, axis in part.folded(mesh)}
        if not meshes:
            return
        infos, with_mesh = {axis: _mesh_info(own) for axis, own in meshes.items()}, _fsdp_common.ShardPlacementResult
        settings["shard_placement_fn"] = lambda parameter: (
            with_mesh(_even_dimension(parameter, meshes[axis]), infos[axis])
            if (axis := mesh.fold_of(parameter))
            else _even_dimension(parameter, settings["mesh"])
        )

    def before_microbatch(self, index: int, count: int) -> None:
        """Stage 1 gathers and reduces once per step; the others shard gradients each time, replicas sum them once."""
        last = index == count - 1
        for root in self._roots:
            # FSDP remembers the order of forwards until a "last" backward, and prefetches by it: from a micro batch
            # that is done, the step ends with one more gather of the head, for nobody. Forgetting waits for reductions:
            # stage 1 has none under way, the others would lose more than that gather.
            root.set_is_last_backward(last or self._stage == 1)
            if self._stage == 1:
                root.set_requires_gradient_sync(last)
                root.set_reshard_after_backward(last)
            else:
                root.set_requires_all_reduce(last)


def _copied(costs: Costs, stage: int, replicated: bool) -> float:
    """Mean bytes per parameter and micro batch that a group of one rank copies, where FSDP2 has collectives for it.

    A gather casts the stored parameters and copies the result. A reduction copies gradients into its own dtype, copies
    that, may divide it by 1 where there are replicas, and casts it to the dtype that is stored. Stages 2 and 3 then add
    it to the sum of earlier micro batches; stage 1 has added them before. Experts that are sharded by themselves, by
    one rank of many, are left out.
    """
    width, reduce, store, once = costs.itemsize, costs.reduce_itemsize, costs.store_itemsize, 1 / costs.micro_batches
    gathers, reductions = {1: (once, once), 2: (1.0, 1.0), 3: (2.0, 1.0)}[stage]
    made = reduce if stage == 1 and costs.micro_batches > 1 else width
    reduction = made + (5 if replicated and SPARE_COPIES else 3) * reduce + (reduce + store) * (reduce != store)
    added = 3 * (reduce if replicated else store) * (1 - once) * (stage > 1)
    return gathers * (store + 3 * width) + reductions * reduction + added


def _replicates(job: Job) -> bool:
    """Whether gradients are summed over replicas here, and not by a technique that does only that."""
    return job.layout.degree("dp_replicate") > 1 and not job.provides("summed_replicas")


def _even_dimension(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """Of a stack of weights the first dimension that shards evenly: its elements are few, and ranks are many.

    None: the first dimension, as for all else. Every rank has the same answer, however its own slice came out.
    """
    if parameter.ndim < 3:
        return None
    sizes = list(parameter.shape)
    mesh_of = parameter.device_mesh.shape if isinstance(parameter, DTensor) else ()
    placements = zip(parameter.placements, mesh_of, strict=True) if mesh_of else ()
    for placement, ranks in placements:
        if isinstance(placement, Shard):
            sizes[placement.dim] = 0 if sizes[placement.dim] % ranks else sizes[placement.dim] // ranks
    ranks = mesh.size(-1)
    return Shard(next((dim for dim, size in enumerate(sizes) if size and size % ranks == 0), 0))


def _mesh_info(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
