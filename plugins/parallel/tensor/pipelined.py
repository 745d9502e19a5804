"""Asynchronous tensor parallelism: collectives of hidden states run beside the products that they feed or follow.

PyTorch's compiler replaces an all-gather and the products of its result by one operation, which multiplies the slices
that are there while it copies the next from another rank; and a product and its reduce-scatter by one that sends each
slice as soon as it is multiplied (`torch._inductor.fx_passes.micro_pipeline_tp`). Ranks read each other's memory
directly (symmetric memory), so they must share a node with links between all of its GPUs, such as NVLink.

Of a compiled layer the compiler so replaces each all-gather and, in forward, each reduce-scatter. It leaves the
reduce-scatters of backward, whose summands several products make, and linears with a bias or in float8. PyTorch's
announcement measured 20 to 29 % of the forward and 8 % of the step at most, for llama3 7B and 70B on H100
(https://discuss.pytorch.org/t/209487).

Memory: a workspace per group of ranks as large as the largest slice that is sent. Never run on a GPU by this project.
"""

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titan.contracts import BuildContext, Costs, Job, kind_of
from titan.contracts.base.cost import CollectiveCost, Matmul
from titan.contracts.plugin.registry import lacking
from titan.errors import ConfigError

HIDDEN = 0.5
"""Share of the time of a replaced collective that a plan takes for hidden: an assumption, on the side of caution.

The plan of configs/llama7b.toml at tp 8 so gains 3 % of a step, where the announcement measured up to 8 %."""


def refusals(job: Job, sequence_parallel: bool) -> Iterator[str]:
    """Why collectives of this job cannot run beside products, a sentence each; a job with device "auto" is for GPUs."""
    tp, own = job.layout.degree("tp"), "async_tp = true"
    if tp == 1:
        yield f"{own} needs mesh.tp above 1, as one rank sends nothing; set async_tp = false"
        return
    if not sequence_parallel:
        yield f"{own} pipelines all-gathers and reduce-scatters; sequence_parallel = false makes none, set it to true"
    if not job.provides("compiled_layers"):
        yield f"{own} {lacking('compiled_layers')}"
    for why in job.stating("skips_inductor"):
        yield f"{own} is a pass of inductor over compiled layers, and {why}"
    if all(op.bias for op in job.spec.layer_ops if isinstance(op, Matmul)):
        yield f"{own} overlaps products without a bias, and all linears of this model have one; set async_tp = false"
    if job.run.device == "cpu":
        yield f'{own} needs GPUs, and [run] device = "cpu"; set async_tp = false'
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # of a rank that runs; a plan is for machines elsewhere
    if per_node and _across_nodes(job, per_node):
        yield f"{own} needs the {tp} ranks of mesh.tp in one node, and nodes have {per_node} ranks; lower mesh.tp"


def _across_nodes(job: Job, per_node: int) -> bool:
    """Whether ranks of tp are on several nodes of so many ranks, which have consecutive numbers."""
    layout = job.layout
    names = [axis.name for axis in layout.dimensions]
    inner = math.prod(layout.degree(name) for name in names[names.index("tp") :])
    return per_node % inner != 0


def enable(group: dist.ProcessGroup, context: BuildContext) -> None:
    """Let the compiler pipeline the collectives of a group. Of all ranks of the group, before the first forward.

    Raises:
        ConfigError: the device is no GPU.
    """
    if kind_of(context.device) != "cuda":
        why = f"async_tp = true needs GPUs, and this rank is on a {context.device.type}; set async_tp = false"
        raise ConfigError(why, "[plugins.tensor]")
    import torch._inductor.config as inductor  # here: its import takes seconds, which jobs without it save

    inductor._micro_pipeline_tp = True  # type: ignore[attr-defined]
    if context.device.type != "cuda":
        return  # a rehearsal
    from torch.distributed import _symmetric_memory

    enable_group: Any = _symmetric_memory.enable_symm_mem_for_group
    with warnings.catch_warnings():
        # Deprecated as needless in 2.13, whose pass still asks for it (PyTorch pull request 172163).
        warnings.simplefilter("ignore", FutureWarning)
        enable_group(group.group_name)


def partly_hidden(collectives: Iterable[CollectiveCost], costs: Costs) -> Iterator[CollectiveCost]:
    """The collectives of tp, those that the compiler replaces cut into a share that overlaps products and the rest."""
    products = [op for op in costs.layer if isinstance(op, Matmul)]
    plain = not any(op.bias or op.dtype or op.stack > 1 for op in products)
    for cost in collectives:
        replaced = (cost.collective, cost.when) in (
            ("all_gather", "forward"),
            ("all_gather", "backward"),
            ("reduce_scatter", "forward"),
        )
        if plain and replaced and cost.where == "layer":
            yield replace(cost, count=cost.count * HIDDEN, overlaps=True)
            yield replace(cost, count=cost.count * (1 - HIDDEN))
        else:
            yield cost
