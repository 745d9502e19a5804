"""Hooks and forwards that join what the ranks of tensor parallelism hold: before, in and after split modules."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan.contracts.base.sharding import Slices, gathered, summed
from titan.errors import PluginError


def enter(slices: Slices, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the first argument whole.

    Raises:
        PluginError: the hidden states are no positional argument, or one of several.
    """
    if not args or any(isinstance(more, Tensor) and more.shape == args[0].shape for more in args[1:]):
        raise PluginError(
            f'{type(module).__name__} is a "gather" in ModelSpec.tensor: call it with the hidden states as its first '
            "positional argument, and with no other tensor of their shape"
        )
    return (gathered(args[0], slices), *args[1:])


def leave(slices: Slices, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """The sum of all ranks' outputs [B, S, D], of the positions that this rank holds."""
    return summed(output, slices)


def look_up(slices: Slices, table: nn.Embedding, tokens: Tensor) -> Tensor:
    """A rank looks up the words that it holds; the others count as zero."""
    width = -(-table.num_embeddings // slices.size)
    index = tokens - slices.rank * width
    here = (index >= 0) & (index < width)
    rows = F.embedding(torch.where(here, index, 0), table.weight)
    return summed(torch.where(here[..., None], rows, 0.0), slices)


def own_positions(slices: Slices, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Of an output of all positions [B, S, D], those that this rank holds."""
    return output.chunk(slices.size, dim=1)[slices.rank] if slices.positions else output


def draw_own(slices: Slices, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The hidden states of a module that draws are those of this rank's positions; so be its random numbers."""
    x, seeds, positions = args
    return x, seeds, positions.chunk(slices.size, dim=1)[slices.rank] if slices.positions else positions


def logits(mesh: DeviceMesh, split: bool, module: nn.Linear, hidden: Tensor) -> Tensor:
    """[B, S, V] of hidden states [B, S, D], split over V: as a DTensor, or gathered."""
    output: Tensor = type(module).forward(module, hidden)
    shape = torch.Size((*output.shape[:-1], module.out_features))
    # Computed, as an empty tensor of that shape would count as memory in a dry run.
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    logits = DTensor.from_local(output, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
    return logits if split else logits.redistribute(placements=[Replicate()]).to_local()
