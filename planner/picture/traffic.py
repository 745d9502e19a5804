"""Bytes per step of a rank's collectives, counted by whole tensors as the dry run counts them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from titan.contracts.base.cost import CollectiveCost, Costs, Stage
from titan.contracts.base.layout import Layout
from titan.planner.step.activations import recomputed
from titan.planner.step.layout import apart, ranks_of, sharing
from titan.planner.step.parameters import Count, Tensors, added

Moved = dict[tuple[str, tuple[str, ...]], float]
"""(collective, axes) -> bytes per step."""


class Among(NamedTuple):
    """The groups of ranks in which a collective runs.

    axes: of degree above 1, along which the ranks of a group differ.
    apart: folding axes along which they hold the same slices of a stack.
    """

    axes: tuple[str, ...]
    apart: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The axes as the dry run names them: ("dp_shard", "cp / ep")."""
        return *self.axes[:-1], " / ".join((self.axes[-1], *self.apart))


def moved(place: int, costs: Costs, layout: Layout) -> Moved:
    """Bytes per step of the collectives of a rank at this place of the pipeline.

    Counts the output of an all-gather, the input of a reduce-scatter, and the tensor of an all-reduce, all-to-all or
    send. Axes of one rank are left out, and groups of one rank move nothing. Groups of ranks that hold the same weights
    of a stack are named as in the dry run: ("dp_shard", "cp / ep").
    """
    return {(kind, among.names): size for (kind, among), size in exchanged(place, costs, layout).items()}


def exchanged(place: int, costs: Costs, layout: Layout) -> dict[tuple[str, Among], float]:
    """`moved`, with the groups as axes instead of names: (collective, groups) -> bytes per step."""
    found: dict[tuple[str, Among], float] = {}
    tensors = Tensors(costs, ranks_of(costs.stacks_over, layout))
    for stage in costs.stages:
        if stage.rank == place:
            sizes = tensors.sizes(stage)
            for cost in costs.collectives:
                if axes := tuple(axis for axis in cost.axes if layout.degree(axis) > 1):
                    of = sizes[-1:] if cost.where == "head" else sizes[:-1] if cost.skip_last_unit else sizes
                    of = tensors.sizes(stage, kinds=cost.kinds) if cost.kinds else of
                    for among, numbers in _numbers(cost, axes, added(of), costs, layout):
                        key = (cost.collective, among)
                        found[key] = found.get(key, 0.0) + numbers * _each(cost, stage, costs)
    return found


def passed_on(place: int, costs: Costs, layout: Layout) -> float:
    """Bytes per step that a rank at this place of the pipeline sends to neighboring stages on other ranks.

    Hidden states forward, and their gradients backward, of each micro batch. The gradients of tied tensors are left
    out.
    """
    links = [(one.rank, next_.rank) for one, next_ in pairwise(costs.stages) if one.rank != next_.rank]
    neighbors = sum(link.count(place) for link in links)
    hidden = costs.dim * costs.share("hidden") * costs.itemsize / ranks_of(costs.sent_over, layout)
    return neighbors * costs.micro_batches * hidden


def _numbers(
    cost: CollectiveCost, axes: tuple[str, ...], params: Count, costs: Costs, layout: Layout
) -> Iterator[tuple[Among, float]]:
    """(groups, numbers that each moves): stacks of weights move among the ranks that hold the same."""
    shards = sharing(cost.sharded_over, costs, layout)
    if not cost.per_parameter:
        yield Among(axes), cost.numel * costs.share(cost.region) / shards.plain
        return
    yield Among(axes), cost.numel * params.plain / shards.plain
    if params.stacked and sharing(axes, costs, layout).stacked > 1:
        yield Among(axes, apart(axes, costs, layout)), cost.numel * params.stacked / shards.stacked


def _each(cost: CollectiveCost, stage: Stage, costs: Costs) -> float:
    """Bytes per step for each number that a collective moves."""
    # A recomputed layer repeats its collectives, but not where their results are saved.
    repeats = costs.recompute is not None and costs.recompute.saved == "input"
    again = recomputed(stage.layers, costs.recompute) if repeats else 0
    layers = cost.of_layers * (again if cost.when == "recompute" else len(stage.layers))
    times = {"embeddings": int(stage.embeddings), "layer": layers, "attention": layers, "head": int(stage.head)}.get(
        cost.where, 1
    )
    uses = 1 if cost.per == "step" or cost.where == "step" else costs.micro_batches
    return cost.count * (cost.itemsize or costs.itemsize) * times * uses
