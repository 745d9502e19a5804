"""What a rank's collectives move in a step, in bytes: of whole tensors, as a dry run counts them."""

from titan.contracts.base.cost import CollectiveCost, Costs, Stage
from titan.contracts.base.mesh import Layout
from titan.planner.step.memory import Tensors, ranks_of, recomputed

Moved = dict[tuple[str, tuple[str, ...]], float]
"""(collective, axes) -> bytes a step."""


def moved(place: int, costs: Costs, layout: Layout) -> Moved:
    """Bytes that the collectives of a rank at this place of the pipeline move in a step.

    Of an all-gather what it yields, of a reduce-scatter what it takes in, of an all-reduce what it holds; groups of one
    rank move nothing.
    """
    found: Moved = {}
    tensors = Tensors(costs)
    for stage in costs.stages:
        if stage.rank == place:
            sizes = tensors.sizes(stage, 1)
            for traffic in costs.traffic:
                if ranks_of(traffic.axes, layout) > 1:
                    key = (traffic.collective, traffic.axes)
                    of = sizes[-1:] if traffic.where == "head" else sizes[:-1] if traffic.kept else sizes
                    params = sum(of)
                    found[key] = found.get(key, 0.0) + _of(traffic, stage, params, costs, layout)
    return found


def _of(traffic: CollectiveCost, stage: Stage, params: float, costs: Costs, layout: Layout) -> float:
    again = recomputed(stage.layers, costs.recompute) if _joined_again(costs) else 0
    times = {
        "stem": int(stage.stem),
        "layer": again if traffic.when == "recompute" else len(stage.layers),
        "head": int(stage.head),
    }.get(traffic.where, 1)
    uses = 1 if traffic.every == "step" or traffic.where == "step" else costs.micro_batches
    numbers = params if traffic.per_parameter else costs.share("whole")
    size = traffic.count * traffic.numbers * numbers * (traffic.bytes or costs.bytes)
    return size * times * uses / ranks_of(traffic.over, layout)


def _joined_again(costs: Costs) -> bool:
    """Whether collectives run again when a layer is computed again: not where their results are kept."""
    return costs.recompute is not None and costs.recompute.keeps == "input"
