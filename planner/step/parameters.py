"""Parameters of a job on one rank, by shard unit: of operations outside of stacks, and of stacks of weights.

Ranks share both, but not in the same way: stacks may be dealt out over ranks that hold copies of all else
(`Costs.stacks_over`). Each is sharded, gathered and reduced among the ranks that have the same weights. Where layers
differ, counts are of the mean layer.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from titan.contracts.base.cost import Costs, Elementwise, EmbeddingOp, Kind, Matmul, Operation, PersistentState, Stage
from titan.contracts.base.layout import Layout
from titan.planner.step.layout import ALONE, Sharing, sharing


class Shape(NamedTuple):
    """A rank's part of a parameter, before data parallelism slices the rows.

    rows, columns: its sizes; those of a stack have their rows in one tensor.
    kind: of the parameter.  share: of the layers that have it.
    """

    rows: float
    columns: float
    kind: Kind
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
        weights = op.stack / ways if op.stack > 1 else 1
        kind: Kind = "stack" if op.stack > 1 else "matrix"
        bias = [Shape(weights * outputs, 1.0, "stack" if op.stack > 1 else "vector", op.of_layers)] if op.bias else []
        return [Shape(weights * math.ceil(outputs), math.ceil(inputs), kind, op.of_layers), *bias]
    if isinstance(op, EmbeddingOp):
        split = costs.cut("tp_sharded") if costs.style(op.module) == "embedding" else 1
        return [Shape(math.ceil(op.rows / split), float(op.width), "table", op.of_layers)]
    if isinstance(op, Elementwise):
        split = costs.cut("tp_sharded") if costs.style(op.module) == "wide_norm" else 1
        return [Shape(float(math.ceil(op.width / split)), 1.0, "vector", op.of_layers)] * op.params
    return []


def sliced(tensors: Iterable[Shape], ranks: Sharing = ALONE, kinds: Sequence[Kind] = ()) -> Count:
    """Numbers in the first rank's shards of these tensors, split along their rows; kinds: of these alone, if any."""
    counts = [0.0, 0.0]
    for rows, columns, kind, share in tensors:
        if not kinds or kind in kinds:
            stacked = kind == "stack"
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
        end = [shape for op in costs.head for shape in shapes(op, costs)]
        self._end = [shape._replace(kind="head") if shape.kind == "matrix" else shape for shape in end]
        self._table: list[Shape] = []
        if costs.tied:
            self._table, self._embeddings = self._embeddings[0], self._embeddings[1:]
            self._end = [shape for shape in self._end if shape.columns == 1.0]
        self._sizes: dict[tuple[int, bool, bool, Sharing, Sequence[Kind]], list[Count]] = {}

    def largest(self, stage: Stage, ranks: Sharing = ALONE) -> float:
        """Numbers in the largest tensor of a stage, of the first of the ranks that share it."""
        ends = [*(self._embeddings if stage.embeddings else ()), self._end if stage.head else ()]
        tensors = [shape for unit in ends for shape in unit] + self._layer * bool(stage.layers)
        tensors += self._table * (stage.embeddings or stage.head)
        return max((sliced([shape._replace(share=1.0)], ranks).total for shape in tensors), default=0.0)

    def sizes(self, stage: Stage, ranks: Sharing = ALONE, kinds: tuple[Kind, ...] = ()) -> list[Count]:
        """Parameters per shard unit of a stage, in forward order, of the first of the ranks that share them.

        kinds: of these kinds alone; empty: of all. Units without any are left out.
        """
        key = (len(stage.layers), stage.embeddings, stage.head, ranks, kinds)
        if key not in self._sizes:
            end = [*(self._end if stage.head else ()), *(self._table if stage.embeddings or stage.head else ())]
            units = [*(self._embeddings if stage.embeddings else ()), end]
            *embeddings, last = (sliced(unit, ranks, kinds) for unit in units)
            layers = [sliced(self._layer, ranks, kinds)] * len(stage.layers)
            self._sizes[key] = [size for size in (*embeddings, *layers, last) if size.total]
        return self._sizes[key]


def state_bytes(held: PersistentState, stage: Stage, costs: Costs, layout: Layout, tensors: Tensors) -> float:
    """Bytes of state on one rank of a stage."""
    sizes = [size.total for size in tensors.sizes(stage, sharing(held.axes, costs, layout), held.kinds)]
    numel = min(held.gathered_units * max(sizes, default=0.0), sum(sizes)) if held.gathered_units else sum(sizes)
    return held.bytes_per_param * numel


def added(counts: Iterable[Count]) -> Count:
    """The sum of several counts."""
    plain = stacked = 0.0
    for count in counts:
        plain, stacked = plain + count.plain, stacked + count.stacked
    return Count(plain, stacked)
