"""The layout: named axes over the ranks of a run, each with facts about its ranks. Arithmetic, without process groups.

Only the plugin that owns an axis knows it by name; all else asks for facts.

An axis that folds others is no dimension of its own: it divides the ranks of these axes anew, for some parameters. Let
f be the number of a rank among them, outer axes first. Its place on the folding axis is f mod degree, so ranks along it
are neighbors. What the axis leaves of the axes it folds, its remainder, are the ranks with the same place.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal, get_args, get_type_hints

from titan.contracts.base.spec import nearest
from titan.contracts.plugin.options import coerce, did_you_mean, shown

DataFact = Literal["same", "dealt", "sliced"]
"""What the ranks along an axis see: the same samples, other samples, or other positions of the same samples.

Tokens and losses are summed over axes that are "dealt" or "sliced".
"""

WeightsFact = Literal["copies", "slices", "layers", "own"]
"""What the ranks along an axis hold: copies of the weights, slices of the same layers, other layers, or weights of
their own, which drift apart.

A gradient is summed over every axis that is "dealt" or "sliced" and along which the parameter is a copy. The global
norm adds the squares over "slices" and "layers". Nothing of a step is summed over "own": each rank along such an axis
(with the ranks inside of it, a worker) makes steps of its own, until its technique exchanges weights. Rows of metrics
have the mean of the workers; a checkpoint has what each of them holds.
"""

AxisFact = DataFact | WeightsFact


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis that a plugin owns. Users set its degree in `[mesh]`. A wrong value of a field is a ValueError.

    name: the TOML key.  weights: which weights the ranks along the axis hold.
    data: which data they see; None where the axis folds others, which say so.
    folds: axes whose ranks this one divides anew, for the parameters that are slices along it. The degree divides the
        product of theirs and multiplies the world by nothing.
    topology_order: position from outer axes (slow links) to inner axes (fast links); ranks along the axis with the
        largest value are neighbors. Built-in: worker -10, pp 0, dp_replicate 10, dp_shard 20, cp 30, tp 40. Of an axis
        that folds others, only its place in lists.
    doc: one line for help texts.
    default: degree where the TOML sets none; -1: all remaining ranks (at most one axis of a mesh), or all it folds.
    """

    name: str
    data: DataFact | None = None
    weights: WeightsFact
    folds: tuple[str, ...] = ()
    topology_order: float
    doc: str
    default: int = 1

    def __post_init__(self) -> None:
        for field, hint in get_type_hints(Axis).items():
            value = getattr(self, field)
            try:
                coerce(value, hint)
            except ValueError as error:
                raise ValueError(f"mesh axis {self.name!r}: {field} = {shown(value)}: {error}") from None
        if what := self._contradiction():
            raise ValueError(f"mesh axis {self.name!r}: {what}")

    @property
    def family(self) -> str:
        """What communication along the axis is reported as: "tp", "cp", "ep", "dp", "worker" or "pp"."""
        slices, copies = "tp" if self.data == "same" else "ep", "cp" if self.data == "sliced" else "dp"
        return {"layers": "pp", "own": "worker", "slices": slices, "copies": copies}[self.weights]

    def _contradiction(self) -> str:
        if not self.name.isidentifier():
            return "name: must be a Python identifier"
        if self.default < 1 and self.default != -1:
            return f"default = {self.default}: must be at least 1, or -1 for all remaining ranks"
        if self.folds and self.data is not None:
            return f'data = "{self.data}" with folds = {self.folds}: the axes that it folds say which data ranks see'
        if self.folds and self.weights != "slices":
            return f'weights = "{self.weights}" with folds = {self.folds}: ranks along such an axis must hold "slices"'
        if not self.folds and self.data is None:
            return f"data: must be one of {', '.join(map(repr, get_args(DataFact)))}, unless the axis folds others"
        if (self.data, self.weights) == ("same", "copies"):
            return 'data = "same" with weights = "copies": its ranks would all do the same work'
        if self.data == "sliced" and self.weights != "copies":
            return f'data = "sliced" with weights = "{self.weights}": ranks that slice sequences must hold "copies"'
        if self.data == "same" and self.weights == "own":
            return 'data = "same" with weights = "own": ranks with weights of their own must see other samples, "dealt"'
        return ""


@dataclass(frozen=True)
class Layout:
    """Degrees of all axes, axis name -> ranks along it; axes are sorted by `topology_order`. Pure arithmetic."""

    axes: tuple[Axis, ...]
    degrees: Mapping[str, int]

    @cached_property
    def dimensions(self) -> tuple[Axis, ...]:
        """The axes whose degrees multiply to the world: all but those that fold others."""
        return tuple(axis for axis in self.axes if not axis.folds)

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs: the product of the degrees of all axes that fold no others."""
        return math.prod(self.degrees[axis.name] for axis in self.dimensions)

    def degree(self, axis: str) -> int:
        """Degree of an axis; 1 where no plugin owns such an axis."""
        return self.degrees.get(axis, 1)

    def axes_of(self, *facts: AxisFact) -> tuple[str, ...]:
        """Names of the axes that state one of these facts, outer to inner; none that folds others: each rank once."""
        return tuple(axis.name for axis in self.dimensions if axis.data in facts or axis.weights in facts)

    def degree_of(self, *facts: AxisFact) -> int:
        """Ranks along all axes that state one of these facts: the product of their degrees."""
        return math.prod(self.degrees[name] for name in self.axes_of(*facts))

    @property
    def workers(self) -> int:
        """Ranks along the axis with weights of their own; 1 where there is none."""
        return self.degree_of("own")

    @property
    def worker_axis(self) -> str:
        """The axis above 1 whose ranks have weights of their own; empty where there is none."""
        return next((name for name in self.axes_of("own") if self.degrees[name] > 1), "")

    def folded(self, axis: str) -> tuple[str, ...]:
        """Names of the axes of this layout that an axis folds, outer to inner; empty where it folds none."""
        folds = next((one.folds for one in self.axes if one.name == axis), ())
        return tuple(one.name for one in self.dimensions if one.name in folds) if folds else ()

    def remainder(self, axis: str) -> int:
        """Ranks that a folding axis leaves of those it folds: they hold the same slices along it."""
        return math.prod(self.degrees[name] for name in self.folded(axis)) // self.degrees[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: axis name -> position, from 0."""
        at = {}
        for axis in reversed(self.dimensions):
            rank, at[axis.name] = divmod(rank, self.degrees[axis.name])
        for axis in self.axes:
            if axis.folds:
                at[axis.name] = self._index(at, self.folded(axis.name)) % self.degrees[axis.name]
        return at

    def index_of(self, rank: int, *facts: AxisFact) -> int:
        """Position of a rank among the ranks along all axes that state one of these facts, from 0."""
        return self._index(self.coordinate(rank), self.axes_of(*facts))

    def index_within_worker(self, rank: int, *facts: AxisFact) -> int:
        """The same among the ranks of its worker alone."""
        own = self.axes_of("own")
        return self._index(self.coordinate(rank), [name for name in self.axes_of(*facts) if name not in own])

    def _index(self, at: Mapping[str, int], names: Sequence[str]) -> int:
        index = 0
        for name in names:
            index = index * self.degrees[name] + at[name]
        return index

    def product(self, names: Sequence[str]) -> str:
        """`dp_shard 4 x cp 2`, of those above 1; empty where all are 1."""
        return " x ".join(f"{name} {self.degrees[name]}" for name in names if self.degrees[name] > 1)

    def __str__(self) -> str:
        world = self.product([axis.name for axis in self.dimensions]) or "one rank"
        return ", ".join([world, *filter(None, (self.product([axis.name]) for axis in self.axes if axis.folds))])


def lay_out(
    axes: Sequence[Axis], wanted: Mapping[str, int], world_size: int | None
) -> tuple[Layout, list[tuple[str, str]]]:
    """The layout of the wanted degrees over `world_size` ranks (None: as many as they need), and (axis, sentence) of
    each error. With errors, the layout serves further checks alone."""
    ordered = tuple(sorted(axes, key=lambda axis: axis.topology_order))
    known = {axis.name for axis in ordered}
    faults = [(name, f"no plugin owns this axis{did_you_mean(name, known)}") for name in wanted if name not in known]
    degrees = {axis.name: wanted.get(axis.name, axis.default) for axis in ordered}
    for name, degree in degrees.items():
        if degree < 1 and degree != -1:
            faults.append((name, f"= {degree}: must be a positive degree, or -1 for all remaining ranks"))
            degrees[name] = 1
    layout = Layout(ordered, degrees)
    left = [axis.name for axis in layout.dimensions if degrees[axis.name] == -1]
    what = "only one axis can take all remaining ranks, and"
    faults += [(name, f"= -1: {what} {left[0]} already does; set a degree") for name in left[1:]]
    degrees |= dict.fromkeys(left, 1)
    fixed = layout.world_size
    if left and world_size is None:
        degrees[left[0]] = _least(layout, left[0])
    elif left and world_size is not None and world_size % fixed == 0:
        degrees[left[0]] = world_size // fixed
    for axis in layout.axes:
        if degrees[axis.name] == -1:
            degrees[axis.name] = math.prod(degrees[name] for name in layout.folded(axis.name))
    needed = layout.world_size
    if world_size is not None and needed != world_size:
        product = layout.product([axis.name for axis in layout.dimensions]) or "1"
        near = max(needed, round(world_size / needed) * needed)
        advice = f"use {needed} ranks" + (f" (or {near} with dp_shard = -1)" if near != needed else "")
        return layout, [*faults, ("", f"{product} = {needed} ranks, but there are {world_size}; {advice}")]
    own = [axis for axis in layout.axes_of("own") if degrees[axis] > 1]
    what = f"and mesh.{layout.worker_axis} would both have weights of their own; set one of them to 1"
    return layout, [*faults, *unfoldable(layout), *((axis, f"= {degrees[axis]}: {what}") for axis in own[1:])]


def _least(layout: Layout, axis: str) -> int:
    """The smallest degree of an axis for which those that fold it come out even."""
    least = 1
    for folding in layout.axes:
        folded, degree = layout.folded(folding.name), layout.degrees[folding.name]
        if axis in folded and degree > 1:
            others = math.prod(layout.degrees[name] for name in folded if name != axis)
            least = math.lcm(least, degree // math.gcd(degree, others))
    return least


def unfoldable(layout: Layout) -> Iterator[tuple[str, str]]:
    """(axis, sentence) for each folding axis that does not divide what it folds, or that another divides already."""
    folding = [axis.name for axis in layout.axes if axis.folds and layout.degrees[axis.name] > 1]
    for axis in folding:
        degree, folded = layout.degrees[axis], layout.folded(axis)
        ranks = math.prod(layout.degrees[name] for name in folded)
        if ranks % degree:
            of = layout.product(folded) or " x ".join(f"{name} 1" for name in folded) or "no axis"
            of += f" = {ranks}" if " x " in of else ""
            near = nearest(degree, lambda number: ranks % number == 0, most=ranks)  # noqa: B023 (it is called at once)
            yield axis, f"= {degree}: must divide the ranks of the axes that it folds, {of}; nearest: {near}"
    for first, second in combinations(folding, 2):
        if both := set(layout.folded(first)) & set(layout.folded(second)):
            what = f"mesh.{first} divides the ranks of {' and '.join(sorted(both))} already; set one of them to 1"
            yield second, f"= {layout.degrees[second]}: {what}"
