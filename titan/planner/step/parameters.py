"""Parameters of a job on one rank, by shard unit: of operations outside of stacks, and of stacks of weights.

Ranks share both, but not in the same way: stacks may be dealt out over ranks that hold copies of all else
(`Costs.stacks_over`). Each is sharded, gathered and reduced among the ranks that have the same weights. Where layers
differ, counts are of the mean layer.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from titan.contracts.base.cost import Costs, Elementwise, EmbeddingOp, Matmul, Operation, Stage
from titan.planner.step.layout import ALONE, Sharing


class Shape(NamedTuple):
    """A rank's part of a parameter, before data parallelism slices the rows.

    rows, columns: its sizes; those of a stack have their rows in one tensor.
    stacked: it is of a stack of weights.  share: of the layers that have it.
    """

    rows: float
    columns: float
    stacked: bool = False
    share: float = 1.0


class Count(NamedTuple):
    """Numbers of parameters: outside of stacks, and of stacks."""

    plain: float = 0.0
    stacked: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.plain + self.stacked


NONE = Count()


def shapes(op: Operation, costs: Costs, ways: int = 1) -> list[Shape]:
    """An operation's parameters on one rank: split by tensor, not yet by data parallelism.

    ways: ranks that each hold a part of the weights of a stack.
    """
    if isinstance(op, Matmul):
        inputs, outputs = costs.product(op)
        stacked, weights = op.stack > 1, op.stack / ways if op.stack > 1 else 1
        bias = [Shape(weights * outputs, 1.0, stacked, op.of_layers)] if op.bias else []
        return [Shape(weights * math.ceil(outputs), math.ceil(inputs), stacked, op.of_layers), *bias]
    if isinstance(op, EmbeddingOp):
        split = costs.cut("tp_sharded") if costs.style(op.module) == "embedding" else 1
        return [Shape(math.ceil(op.rows / split), float(op.width), share=op.of_layers)]
    if isinstance(op, Elementwise):
        split = costs.cut("tp_sharded") if costs.style(op.module) == "wide_norm" else 1
        return [Shape(float(math.ceil(op.width / split)), 1.0, share=op.of_layers)] * op.params
    return []


def sliced(tensors: Iterable[Shape], ranks: Sharing = ALONE) -> Count:
    """Numbers in the first rank's shards of these tensors, split along their rows."""
    counts = [0.0, 0.0]
    for rows, columns, stacked, share in tensors:
        counts[stacked] += share * (math.ceil(rows / ranks[stacked]) * columns)
    return Count(*counts)


def parameters_of(operations: Iterable[Operation], costs: Costs, ways: int = 1) -> float:
    """Parameters of operations on one rank, before data parallelism splits them; ways: as in `shapes`."""
    return sum(sliced(shapes(op, costs, ways)).total for op in operations)


class Tensors:
    """The parameters of a job on one rank, by shard unit: embeddings, layers, and the head with a tied table.

    layer: parameters of one layer.

    costs: operations and splits.  ways: ranks that each hold a part of the weights of every stack.
    """

    def __init__(self, costs: Costs, ways: int) -> None:
        self._embeddings = [shapes(op, costs) for op in costs.embeddings]
        self._layer = [shape for op in costs.layer for shape in shapes(op, costs, ways)]
        self.layer = sliced(self._layer)
        self._end = [shape for op in costs.head for shape in shapes(op, costs)]
        self._table: list[Shape] = []
        if costs.tied:
            self._table, self._embeddings = self._embeddings[0], self._embeddings[1:]
            self._end = [shape for shape in self._end if shape.columns == 1.0]
        self._sizes: dict[tuple[int, bool, bool, Sharing], list[Count]] = {}

    def sizes(self, stage: Stage, ranks: Sharing = ALONE) -> list[Count]:
        """Parameters per shard unit of a stage, in forward order, of the first of the ranks that share them."""
        key = (len(stage.layers), stage.embeddings, stage.head, ranks)
        if key not in self._sizes:
            end = [*(self._end if stage.head else ()), *(self._table if stage.embeddings or stage.head else ())]
            units = [*(self._embeddings if stage.embeddings else ()), end]
            *embeddings, last = (sliced(unit, ranks) for unit in units)
            layers = [sliced(self._layer, ranks)] * len(stage.layers)
            self._sizes[key] = [size for size in (*embeddings, *layers, last) if size.total]
        return self._sizes[key]


def added(counts: Iterable[Count]) -> Count:
    """The sum of several counts."""
    plain = stacked = 0.0
    for count in counts:
        plain, stacked = plain + count.plain, stacked + count.stacked
    return Count(plain, stacked)
