"""Who computes which matrix, and how shards of matrices travel to that rank and back.

A matrix lies on a mesh of ranks in slices and copies. Each is dealt to one rank. The shards of all matrices of a batch
travel along one dimension of the mesh after the other, so no process group is made for it.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from titan.contracts import shard_of

TOGETHER = 1 << 26
"""Numbers per rank of the matrices that travel at once."""

ops = torch.ops._c10d_functional


_Loads = dict[tuple[DeviceMesh | None, tuple[int, ...]], list[tuple[float, int]]]
"""(mesh, dimensions of it) -> a heap of (work so far, rank along these dimensions)."""


def batches(parameters: Iterable[Tensor]) -> "list[Batch]":
    """The batches of matrices, and of stacks [E, rows, columns] of them; the same on all ranks that share some."""
    loads: _Loads = {}
    return [batch for some in _alike(parameters) for batch in _dealt(some, loads)]


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters in groups that ranks share in the same way: one mesh, and the same dimensions of it that matter."""
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        sharing = _Sharing.of(parameter)
        found.setdefault((sharing.mesh, sharing.cuts, sharing.copies), []).append(parameter)
    return list(found.values())


class _Sharing(NamedTuple):
    """How ranks share a matrix: the dimensions of a mesh along which they exchange it.

    cuts: (dimension of the mesh, dimension of the matrix), in the order in which they cut.  copies: dimensions of the
    mesh whose ranks hold the same. A dimension that divides the elements of a stack is neither: nothing is exchanged.
    """

    mesh: DeviceMesh | None
    cuts: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> "_Sharing":
        """Of a parameter, as it lies."""
        if not isinstance(parameter, DTensor):
            return cls(None, (), ())
        mesh, placements = parameter.device_mesh, parameter.placements
        several = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        # A strided shard (FSDP over tensor parallelism) cuts what the dimensions to its right have left.
        several.sort(key=lambda dim: _is_strided(placements[dim]))
        cuts = [
            (dim, placements[dim].dim) for dim in several if placements[dim].is_shard() or _is_strided(placements[dim])
        ]
        copies = tuple(dim for dim in several if placements[dim].is_replicate())
        return cls(mesh, tuple(cut for cut in cuts if parameter.ndim == 2 or cut[1]), copies)


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor") and type(placement) is not Shard


def _dealt(parameters: Sequence[Tensor], loads: _Loads) -> "list[Batch]":
    """Matrices that are shared alike, each with the rank that computes it, in batches that travel at once.

    The longest first, to the rank with the least work so far; every rank comes to the same result.
    """
    sharing = _Sharing.of(parameters[0])
    dims = tuple(sorted([*(dim for dim, _ in sharing.cuts), *sharing.copies]))
    sizes = [sharing.mesh.size(dim) for dim in dims] if sharing.mesh is not None else []
    heap = loads.setdefault((sharing.mesh, dims), [(0.0, rank) for rank in range(math.prod(sizes))])
    found: list[list[tuple[Tensor, dict[int, int]]]] = [[]]
    numbers = 0
    for parameter in sorted(parameters, key=_work, reverse=True):
        load, rank = heapq.heappop(heap)
        heapq.heappush(heap, (load + _work(parameter), rank))
        if numbers > TOGETHER * len(heap):
            found.append([])
            numbers = 0
        numbers += parameter.numel()
        found[-1].append((parameter, dict(zip(dims, _coordinates(rank, sizes), strict=True))))
    return [Batch(batch, sharing) for batch in found]


def _work(parameter: Tensor) -> float:
    """FLOPs of an iteration, but for a factor."""
    least, most = sorted(parameter.shape[-2:])
    return (2.0 * least**2 * most + least**3) * (parameter.shape[0] if parameter.ndim > 2 else 1)


def _coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        found.append(at)
    return found[::-1]


def _part(size: int, ranks: int, at: int) -> int:
    """How many of `size` rows a rank has, as `torch.chunk` cuts."""
    each = -(-size // ranks)
    return max(0, min(each, size - at * each))


class _Places(NamedTuple):
    """Matrices of which this rank holds pieces, by the place, along a dimension of the mesh, of the rank they go to.

    numbers: in the batch, place after place.  shapes: of their pieces here.  sizes: by place, numbers in these pieces.
    starts: of each piece, where every place is padded to the fullest.  mine: those of this rank's own place.
    """

    dim: int
    numbers: list[int]
    shapes: list[list[int]]
    sizes: list[int]
    starts: list[int]
    mine: list[int]


class _Exchange(NamedTuple):
    """How a cut is undone and made.

    axis: of the matrix.  pieces: of this rank's own matrices the shapes, place after place.  sizes: by place, numbers
    in them.
    """

    places: _Places
    axis: int
    pieces: list[list[int]]
    sizes: list[int]


class Batch:
    """Matrices that travel at once, each to the rank that computes it and back.

    dealt: (parameter, dimension of the mesh -> place of the rank along it).
    """

    def __init__(self, dealt: Sequence[tuple[Tensor, dict[int, int]]], sharing: _Sharing) -> None:
        self.parameters = [parameter for parameter, _ in dealt]
        self._owners = [owner for _, owner in dealt]
        self._sharing = sharing
        self._empty = torch.empty(0)

    def gather(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """Number in the batch -> the whole matrix, of those that this rank computes; shards: of all of them."""
        self._empty = shards[0].new_empty(0)
        pieces = {number: shards[number] for number in self._held(self._sharing.copies)}
        for exchange in reversed(self._exchanges):
            pieces = self._collected(exchange, pieces)
        return pieces

    def scatter(self, wholes: Mapping[int, Tensor]) -> list[Tensor]:
        """This rank's shard of each matrix of the batch, from the whole ones that each rank has computed."""
        pieces = dict(wholes)
        for exchange in self._exchanges:
            pieces = self._spread(exchange, pieces)
        for places in self._copies:
            pieces = self._copied(places, pieces)
        return [pieces[number] for number in range(len(self.parameters))]

    # --- what does not change over a run ---

    @cached_property
    def _here(self) -> list[int]:
        """This rank's place along each dimension of the mesh."""
        assert self._sharing.mesh is not None
        return list(self._sharing.mesh.get_coordinate() or ())

    @cached_property
    def _exchanges(self) -> list[_Exchange]:
        """Of each cut."""
        found = []
        for level, (dim, axis) in enumerate(self._sharing.cuts):
            later = [*(other for other, _ in self._sharing.cuts[level + 1 :]), *self._sharing.copies]
            places = self._places(dim, later, level)
            by_place = [[self._shape(n, level, at) for n in places.mine] for at in range(self._ranks(dim))]
            sizes = [sum(map(math.prod, shapes)) for shapes in by_place]
            found.append(_Exchange(places, axis, _flat(by_place), sizes))
        return found

    @cached_property
    def _copies(self) -> list[_Places]:
        """Of each dimension along which ranks hold the same."""
        copies, last = self._sharing.copies, len(self._sharing.cuts) - 1
        return [self._places(dim, copies[left + 1 :], last) for left, dim in enumerate(copies)]

    def _places(self, dim: int, others: Sequence[int], level: int) -> _Places:
        """Of the matrices whose rank is at this rank's place along the others; pieces after the cut `level`."""
        by_place: list[list[int]] = [[] for _ in range(self._ranks(dim))]
        for number in self._held(others):
            by_place[self._owners[number][dim]].append(number)
        shapes = [[self._shape(number, level) for number in some] for some in by_place]
        ends = [list(accumulate(map(math.prod, some), initial=0)) for some in shapes]
        sizes = [some[-1] for some in ends]
        starts = [place * max(sizes) + at for place, some in enumerate(ends) for at in some[:-1]]
        return _Places(dim, _flat(by_place), _flat(shapes), sizes, starts, by_place[self._here[dim]])

    def _held(self, dims: Sequence[int]) -> list[int]:
        """Matrices whose rank is at this rank's place along these dimensions."""
        return [n for n, owner in enumerate(self._owners) if all(owner[dim] == self._here[dim] for dim in dims)]

    def _shape(self, number: int, level: int, at: int | None = None) -> list[int]:
        """Of the piece that is there after the cut `level`: here, or at place `at` along its dimension."""
        shape = self._uncut(number)
        for this, (dim, axis) in enumerate(self._sharing.cuts[: level + 1]):
            place = self._here[dim] if at is None or this < level else at
            shape[axis] = _part(shape[axis], self._ranks(dim), place)
        return shape

    def _uncut(self, number: int) -> list[int]:
        """Of the matrix; of a stack that is divided by its elements, with those that are here."""
        parameter = self.parameters[number]
        return [*shard_of(parameter).shape[: parameter.ndim - 2], *parameter.shape[-2:]]

    def _ranks(self, dim: int) -> int:
        assert self._sharing.mesh is not None
        return self._sharing.mesh.size(dim)

    def _group(self, dim: int) -> str:
        assert self._sharing.mesh is not None
        return self._sharing.mesh.get_group(dim).group_name

    # --- in each step ---

    def _collected(self, exchange: _Exchange, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Undo a cut: pieces go to their matrix's place along its dimension, where they are put together."""
        places, mine = exchange.places, exchange.places.mine
        sent = [pieces[n] for n in places.numbers]
        found = _parted(self._exchanged(places.dim, sent, places.sizes, exchange.sizes), exchange.pieces)
        return {n: torch.cat(found[i :: len(mine)], exchange.axis) for i, n in enumerate(mine)}

    def _spread(self, exchange: _Exchange, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Cut: from its matrix's place along a dimension, each rank along it gets its slice."""
        places, ranks = exchange.places, len(exchange.sizes)
        slices = [_cut(pieces[n], ranks, exchange.axis) for n in places.mine]
        arrived = self._exchanged(places.dim, _flat(zip(*slices, strict=True)), exchange.sizes, places.sizes)
        return dict(zip(places.numbers, _parted(arrived, places.shapes), strict=True))

    def _copied(self, places: _Places, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """From its matrix's place along a dimension, each rank along it gets the same."""
        mine = [pieces[n].reshape(-1) for n in places.mine]
        padding = max(places.sizes) - places.sizes[self._here[places.dim]]
        flat = torch.cat([*mine, self._empty.new_zeros(padding)])
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(flat, len(places.sizes), self._group(places.dim)))
        found = zip(places.numbers, places.starts, places.shapes, strict=True)
        return {n: gathered.narrow(0, start, math.prod(shape)).view(*shape) for n, start, shape in found}

    def _exchanged(self, dim: int, tensors: Sequence[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Numbers from each place along a dimension, for numbers that go there, both place after place."""
        flat = torch.cat([self._empty, *(tensor.reshape(-1) for tensor in tensors)])
        arrived: Tensor = ops.wait_tensor(ops.all_to_all_single(flat, received, sent, self._group(dim)))
        return arrived


def _flat(some: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(some))


def _cut(tensor: Tensor, ranks: int, axis: int) -> list[Tensor]:
    """A slice for each rank, also where there are fewer rows than ranks."""
    return list(tensor.split([_part(tensor.shape[axis], ranks, at) for at in range(ranks)], axis))


def _parted(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, one after the other in a flat one."""
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]
