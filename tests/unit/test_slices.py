"""Which slice of a tensor a rank holds: as `torch.chunk` cuts, without a tensor for each of the other ranks."""

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

from titan.contracts.base.sharding import slice_of


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
