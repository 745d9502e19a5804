"""Stacks of weights from outside, spread over ranks that data parallelism has already: an axis that folds two others.

Each rank holds some elements of a stack [E, ...], and gathers the others when the stack is used. Gradients are summed
over the ranks that hold the same elements by whoever shards or replicates parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from titan.contracts import Axis, BuildContext, Job, ModelPart, ModelSpec, Technique, register
from titan.contracts.base.sharding import Slices, gathered
from titan.contracts.base.spec import nearest


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Spread(Technique):
    """Spreads the elements of stacks over `mesh.spread`."""

    name = "spread"
    Config = Config
    phase = "partition"
    axes = (
        Axis(
            name="spread", weights="slices", folds=("dp_shard", "cp"), topology_order=25, doc="ranks that share stacks"
        ),
    )

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        ranks, count = job.layout.degree("spread"), getattr(job.model.config, "stacked", 0)
        if ranks > 1 and not count:
            yield f"mesh.spread = {ranks}: model {job.model.name} has no stacks; set mesh.spread = 1"
        elif count % ranks:
            near = nearest(ranks, lambda n: count % n == 0, most=count)
            yield f"[model] stacked = {count} cannot be spread over mesh.spread = {ranks} ranks; nearest: {near}"

    def spec(self, spec: ModelSpec) -> ModelSpec:
        tensor = {glob: style for glob, style in spec.tensor.items() if glob != "layers.*.ffn.stack"}
        return replace(spec, tensor=tensor)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        if "spread" not in context.mesh:
            return
        mesh = context.mesh["spread"]
        slices = Slices(context.mesh.group("spread").group_name, mesh.size(), mesh.get_local_rank(), positions=True)
        for _, layer in part.layers(context.spec):
            module = layer.get_submodule("ffn.stack")
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
            module.whole = partial(_gather, slices)


def _gather(slices: Slices, weight: Tensor) -> Tensor:
    """All elements [E, ...] from those of this rank; gradients are summed over ranks, each of which gets its own."""
    own = weight.to_local()
    return gathered(own.flatten(1)[None], slices)[0].unflatten(1, own.shape[1:])
