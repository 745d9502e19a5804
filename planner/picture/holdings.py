"""What each rank of a job holds, and which ranks communicate: what a picture of its layout shows.

All of it follows from the facts of the axes, the stages and the costs, so it holds for the axes of any plugin.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titan.contracts.base.cost import Costs
from titan.contracts.base.layout import Layout
from titan.planner.picture.traffic import Among, exchanged, passed_on


class Part(NamedTuple):
    """One of several equal parts. number: from 0.  of: how many there are."""

    number: int
    of: int

    def within(self, outer: "Part") -> "Part":
        """The part of the whole, where this is a part of `outer`."""
        return Part(outer.number * self.of + self.number, outer.of * self.of)


@dataclass(frozen=True)
class Holding:
    """What a rank holds of the weights, and sees of a step's batch.

    layers: of each of its stages.  embeddings, head: whether it has them.
    sliced: its part of each matrix of these layers.  folded: the same of parameters that are slices along an axis that
        folds others; None where there is no such axis.
    kept, kept_folded: what the rank keeps of `sliced` and `folded` between steps; the rest is gathered for use.
    own: its place among ranks with weights of their own.
    samples: of the global batch.  positions: of each sequence.
    hidden: of each sequence, what lies on the rank between matrices that are split.
    """

    rank: int
    layers: tuple[range, ...]
    embeddings: bool
    head: bool
    sliced: Part
    folded: Part | None
    kept: Part
    kept_folded: Part | None
    own: Part
    samples: Part
    positions: Part
    hidden: Part


def holdings(layout: Layout, costs: Costs, ranks: Iterable[int]) -> Iterator[Holding]:
    """The holdings of these ranks, in their order."""
    keeps = {axis for state in costs.state if state.component == "parameters" for axis in state.axes}
    folding = [axis.name for axis in layout.axes if axis.folds and layout.degrees[axis.name] > 1]
    for rank in ranks:
        place = layout.index_of(rank, "layers")
        stages = [stage for stage in costs.stages if stage.rank == place]
        sliced, positions = (_part(layout, rank, layout.axes_of(fact)) for fact in ("slices", "sliced"))
        yield Holding(
            rank=rank,
            layers=tuple(stage.layers for stage in stages),
            embeddings=any(stage.embeddings for stage in stages),
            head=any(stage.head for stage in stages),
            sliced=sliced,
            folded=_part(layout, rank, folding) if folding else None,
            kept=_part(layout, rank, keeps),
            kept_folded=_rest(layout, rank, folding, keeps) if folding else None,
            own=_part(layout, rank, layout.axes_of("own")),
            samples=_part(layout, rank, layout.axes_of("dealt")),
            positions=positions,
            hidden=_hidden(costs, sliced, positions),
        )


def _part(layout: Layout, rank: int, axes: Iterable[str]) -> Part:
    """The place of a rank among those along these axes."""
    at, named, found = layout.coordinate(rank), set(axes), Part(0, 1)
    for axis in layout.axes:
        if axis.name in named:
            found = Part(at[axis.name], layout.degrees[axis.name]).within(found)
    return found


def _rest(layout: Layout, rank: int, folding: Sequence[str], keeps: set[str]) -> Part:
    """The place of a rank among those along `keeps` that hold the same slices along folding axes."""
    found, folds = Part(0, 1), {name for axis in folding for name in layout.folded(axis)}
    for axis in folding:
        among = layout.folded(axis)
        if set(among) & keeps:
            number = _part(layout, rank, among).number // layout.degrees[axis]
            found = Part(number, layout.remainder(axis)).within(found)
    return _part(layout, rank, keeps - folds).within(found)


def _hidden(costs: Costs, sliced: Part, positions: Part) -> Part:
    """Positions between split matrices: fewer than elsewhere where the ranks that share a matrix slice them too."""
    ways = round(costs.splits["hidden"] / costs.splits["seq_full"])
    return sliced.within(positions) if ways == sliced.of else positions


@dataclass(frozen=True)
class Exchange:
    """A collective of a step, or what stages send to each other ("send").

    kind: "all_gather".  axes: along which the ranks of a group differ: "dp_shard x cp / ep".
    least, most: bytes per rank and step, by whole tensors as a dry run counts them; places in a pipeline differ.
    group: of each rank, by number of the group, from 0.
    """

    kind: str
    axes: str
    least: float
    most: float
    group: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks per group."""
        return self.group.count(0)


def exchanges(layout: Layout, costs: Costs) -> list[Exchange]:
    """What the ranks of a job exchange in a step, by the planner's costs."""
    places = range(1 + max(stage.rank for stage in costs.stages))
    moved = [exchanged(place, costs, layout) for place in places]
    keys = dict.fromkeys(key for each in moved for key in each)
    sizes = {key: [each.get(key, 0.0) for each in moved] for key in keys}
    if len(places) > 1:
        sizes["send", Among((costs.pipeline_axis,))] = [passed_on(place, costs, layout) for place in places]
    return [
        Exchange(kind, " x ".join(among.names), min(bytes_), max(bytes_), groups(layout, among))
        for (kind, among), bytes_ in sizes.items()
        if max(bytes_)
    ]


def groups(layout: Layout, among: Among) -> tuple[int, ...]:
    """The number of each rank's group, from 0 in the order of their first ranks."""
    numbers: dict[tuple[int, ...], int] = {}
    spread = {name for axis in among.axes for name in layout.folded(axis) or (axis,)}
    alike = [axis.name for axis in layout.dimensions if axis.name not in spread] + list(among.apart)
    found = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        key = [at[name] for name in alike]
        for axis in among.axes:
            if (folded := layout.folded(axis)) and not set(folded) & set(among.axes):
                key.append(_part(layout, rank, folded).number // layout.degrees[axis])
        found.append(numbers.setdefault(tuple(key), len(numbers)))
    return tuple(found)
