"""Which slice of a tensor a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


def slice_of(whole: Tensor, like: DTensor) -> Tensor:
    """The slice of `whole` that this rank's shard of `like` covers, without communication.

    A strided shard (FSDP over tensor parallelism) slices what the mesh dimensions to its right have left, so those mesh
    dimensions are applied first.
    """
    mesh, piece = like.device_mesh, whole
    for dim in sorted(range(mesh.ndim), key=lambda dim: _is_strided(like.placements[dim])):
        placement = like.placements[dim]
        if isinstance(placement, Replicate):
            continue
        assert hasattr(placement, "dim"), f"cannot slice for {placement}"
        pieces = piece.chunk(mesh.size(dim), dim=placement.dim)
        at = mesh.get_local_rank(dim)
        piece = pieces[at] if at < len(pieces) else piece.narrow(placement.dim, 0, 0)
    return piece


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor") and type(placement) is not Shard
