"""Bytes per step of a rank's collectives, counted by whole tensors as the dry run counts them."""

from collections.abc import Iterator

from titan.contracts.base.cost import CollectiveCost, Costs, Stage
from titan.contracts.base.mesh import Layout
from titan.planner.step.layout import apart, ranks_of, sharing
from titan.planner.step.memory import recomputed
from titan.planner.step.parameters import Count, Tensors, added

Moved = dict[tuple[str, tuple[str, ...]], float]
"""(collective, axes) -> bytes per step."""


def moved(place: int, costs: Costs, layout: Layout) -> Moved:
    """Bytes per step of the collectives of a rank at this place of the pipeline.

    Counts the output of an all-gather, the input of a reduce-scatter, and the tensor of an all-reduce, all-to-all or
    send. Axes of one rank are left out, and groups of one rank move nothing. Groups of ranks that hold the same weights
    of a stack are named as in the dry run: ("dp_shard", "cp / ep").
    """
    found: Moved = {}
    tensors = Tensors(costs, ranks_of(costs.stacks_over, layout))
    for stage in costs.stages:
        if stage.rank == place:
            sizes = tensors.sizes(stage)
            for cost in costs.collectives:
                if axes := tuple(axis for axis in cost.axes if layout.degree(axis) > 1):
                    of = sizes[-1:] if cost.where == "head" else sizes[:-1] if cost.skip_last_unit else sizes
                    for names, numbers in _numbers(cost, axes, added(of), costs, layout):
                        key = (cost.collective, names)
                        found[key] = found.get(key, 0.0) + numbers * _each(cost, stage, costs)
    return found


def _numbers(
    cost: CollectiveCost, axes: tuple[str, ...], params: Count, costs: Costs, layout: Layout
) -> Iterator[tuple[tuple[str, ...], float]]:
    """(axes of a group, numbers that it moves): stacks of weights move among the ranks that hold the same."""
    shards = sharing(cost.sharded_over, costs, layout)
    if not cost.per_parameter:
        yield axes, cost.numel * costs.share(cost.region) / shards.plain
        return
    yield axes, cost.numel * params.plain / shards.plain
    if params.stacked and sharing(axes, costs, layout).stacked > 1:
        others = "".join(f" / {axis}" for axis in apart(axes, costs, layout))
        yield (*axes[:-1], axes[-1] + others), cost.numel * params.stacked / shards.stacked


def _each(cost: CollectiveCost, stage: Stage, costs: Costs) -> float:
    """Bytes per step for each number that a collective moves."""
    again = recomputed(stage.layers, costs.recompute) if _joined_again(costs) else 0
    layers = cost.of_layers * (again if cost.when == "recompute" else len(stage.layers))
    times = {
        "embeddings": int(stage.embeddings),
        "layer": layers,
        "attention": layers,
        "head": int(stage.head),
    }.get(cost.where, 1)
    uses = 1 if cost.per == "step" or cost.where == "step" else costs.micro_batches
    return cost.count * (cost.itemsize or costs.itemsize) * times * uses


def _joined_again(costs: Costs) -> bool:
    """Whether a recomputed layer repeats its collectives: not where their results are saved."""
    return costs.recompute is not None and costs.recompute.saved == "input"
