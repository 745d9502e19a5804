"""Layouts are arithmetic: coordinates, roles, what does not fit; and which slice of a tensor a rank holds."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.contracts.base.layout import Axis, DataFact, WeightsFact, lay_out
from titan.contracts.base.sharding import slice_of

AXES = [
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc=""),
    Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, default=-1, doc=""),
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc=""),
    Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc=""),
]


def test_order_is_outer_to_inner_and_the_rest_goes_to_one_axis() -> None:
    layout, faults = lay_out(AXES, {"tp": 2, "pp": 3}, 24)
    assert not faults and dict(layout.degrees) == {"pp": 3, "dp_replicate": 1, "dp_shard": 4, "tp": 2}
    assert layout.world_size == 24 and str(layout) == "pp 3 x dp_shard 4 x tp 2"


def test_coordinates_count_through_all_ranks() -> None:
    layout, _ = lay_out(AXES, {"tp": 2, "pp": 2, "dp_replicate": 2, "dp_shard": 3}, 24)
    seen = {tuple(layout.coordinate(rank).values()) for rank in range(24)}
    assert len(seen) == 24
    assert layout.coordinate(0) == dict.fromkeys(layout.degrees, 0)
    assert layout.coordinate(1)["tp"] == 1 and layout.coordinate(23)["pp"] == 1


def test_roles_number_the_ranks_that_differ_in_them() -> None:
    layout, _ = lay_out(AXES, {"tp": 2, "pp": 2, "dp_replicate": 2, "dp_shard": 3}, 24)
    assert layout.degree_of("dealt") == 6 and layout.degree_of("slices", "layers") == 4
    by_index = [layout.index_of(rank, "dealt") for rank in range(24)]
    assert sorted(set(by_index)) == list(range(6)) and all(by_index.count(i) == 4 for i in range(6))


@pytest.mark.parametrize(
    ("wanted", "ranks", "words"),
    [
        ({"tpp": 2}, None, "no plugin owns this axis (did you mean 'tp'?)"),
        ({"tp": 0}, None, "must be a positive degree"),
        ({"tp": -1}, None, "only one axis can take all remaining ranks"),
        ({"tp": 3, "dp_shard": 1}, 8, "tp 3 = 3 ranks, but there are 8; use 3 ranks"),
        ({"tp": 3}, 8, "but there are 8"),
    ],
)
def test_faults(wanted: dict[str, int], ranks: int | None, words: str) -> None:
    _, faults = lay_out(AXES, wanted, ranks)
    assert len(faults) == 1 and words in faults[0][1]


@pytest.mark.parametrize(
    ("data", "weights", "why"),
    [
        ("same", "copies", "its ranks would all do the same work"),
        ("same", "own", 'ranks with weights of their own must see other samples, "dealt"'),
        ("sliced", "slices", 'ranks that slice sequences must hold "copies"'),
        ("sliced", "layers", 'ranks that slice sequences must hold "copies"'),
    ],
)
def test_facts_that_contradict_each_other(data: DataFact, weights: WeightsFact, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        Axis(name="a", data=data, weights=weights, topology_order=0, doc="")
    assert str(refused.value) == f'mesh axis \'a\': data = "{data}" with weights = "{weights}": {why}'


def _like(sizes: tuple[int, ...], place: tuple[int, ...], placements: tuple[Placement, ...]) -> Any:
    """What `slice_of` reads of a DTensor."""
    mesh = SimpleNamespace(ndim=len(sizes), size=sizes.__getitem__, get_local_rank=place.__getitem__)
    return SimpleNamespace(device_mesh=mesh, placements=placements)


def _chunk(tensor: Tensor, ranks: int, at: int, dim: int) -> Tensor:
    pieces = tensor.chunk(ranks, dim)
    return pieces[at] if at < len(pieces) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 12])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_is_that_of_chunk(rows: int, dim: int) -> None:
    whole = torch.arange(rows * 3).view((rows, 3) if dim == 0 else (3, rows))
    for ranks in (1, 2, 4, 6, 8):
        for at in range(ranks):
            found, expected = slice_of(whole, _like((ranks,), (at,), (Shard(dim),))), _chunk(whole, ranks, at, dim)
            assert torch.equal(found, expected) and found.shape == expected.shape
            assert found.storage_offset() == expected.storage_offset() and found.stride() == expected.stride()


def test_a_strided_shard_slices_what_the_mesh_dimensions_to_its_right_have_left() -> None:
    whole = torch.arange(30).view(10, 3)
    placements = (_StridedShard(0, split_factor=2), Replicate(), Shard(0))
    for outer, inner in product(range(4), range(2)):
        found = slice_of(whole, _like((4, 5, 2), (outer, 3, inner), placements))
        assert torch.equal(found, _chunk(_chunk(whole, 2, inner, 0), 4, outer, 0))


def test_a_slice_is_one_tensor_however_many_ranks_there_are() -> None:
    class Counted(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **kwargs or {})
            self.made += len(tree_leaves(found))
            return found

    with Counted() as counted:
        slice_of(torch.empty(4096, 2, device="meta"), _like((2048,), (7,), (Shard(0),)))
    assert counted.made == 2, "the whole tensor and its slice"
