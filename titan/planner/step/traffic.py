"""Bytes per step of a rank's collectives, counted by whole tensors as the dry run counts them."""

from titan.contracts.base.cost import CollectiveCost, Costs, Stage
from titan.contracts.base.mesh import Layout
from titan.planner.step.layout import ranks_of
from titan.planner.step.memory import Tensors, recomputed

Moved = dict[tuple[str, tuple[str, ...]], float]
"""(collective, axes) -> bytes per step."""


def moved(place: int, costs: Costs, layout: Layout) -> Moved:
    """Bytes per step of the collectives of a rank at this place of the pipeline.

    Counts the output of an all-gather, the input of a reduce-scatter, and the tensor of an all-reduce, all-to-all or
    send. Axes of one rank are left out, and groups of one rank move nothing.
    """
    found: Moved = {}
    tensors = Tensors(costs)
    for stage in costs.stages:
        if stage.rank == place:
            sizes = tensors.sizes(stage, 1)
            for cost in costs.collectives:
                if axes := tuple(axis for axis in cost.axes if layout.degree(axis) > 1):
                    key = (cost.collective, axes)
                    of = sizes[-1:] if cost.where == "head" else sizes[:-1] if cost.skip_last_unit else sizes
                    params = sum(of)
                    found[key] = found.get(key, 0.0) + _of(cost, stage, params, costs, layout)
    return found


def _of(cost: CollectiveCost, stage: Stage, params: float, costs: Costs, layout: Layout) -> float:
    again = recomputed(stage.layers, costs.recompute) if _joined_again(costs) else 0
    layers = again if cost.when == "recompute" else len(stage.layers)
    times = {
        "embeddings": int(stage.embeddings),
        "layer": layers,
        "attention": layers,
        "head": int(stage.head),
    }.get(cost.where, 1)
    uses = 1 if cost.per == "step" or cost.where == "step" else costs.micro_batches
    numbers = params if cost.per_parameter else costs.share(cost.region)
    size = cost.count * cost.numel * numbers * (cost.itemsize or costs.itemsize)
    return size * times * uses / ranks_of(cost.sharded_over, layout)


def _joined_again(costs: Costs) -> bool:
    """Whether a recomputed layer repeats its collectives: not where their results are saved."""
    return costs.recompute is not None and costs.recompute.saved == "input"
