"""FLOPs of an operation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from titan.contracts.base.collectives import Operation
from titan.layers.products import FLASH, FLASH_BACKWARD

_FORWARD, _BACKWARD = FLASH.overloadpacket, FLASH_BACKWARD.overloadpacket


def attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, products: tuple[int, int]) -> int:
    """FLOPs of matrix products of attention.

    q [B, H, S, N], k [B, K, T, N], v [B, K, T, M]: shapes.  products: how many products have the size of q k', and how
    many the size of scores times v. Masked positions count as well, also causal ones, as is usual.
    """
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[-2] * (products[0] * width + products[1] * v[-1])


def flops_of(operation: Operation, args: Any, kwargs: Mapping[str, Any], out: Any) -> tuple[int, int]:
    """(FLOPs, FLOPs among them that are recomputation) of a matrix product or attention; (0, 0) for other operations.

    Attention saves no scores: its backward recomputes them, one product in five.
    """
    packet = operation.overloadpacket
    if packet is _FORWARD:
        return attention_flops(args[0].shape, args[1].shape, args[2].shape, (1, 1)), 0
    if packet is _BACKWARD:
        shapes = args[1].shape, args[2].shape, args[3].shape
        return attention_flops(*shapes, (3, 2)), attention_flops(*shapes, (1, 0))
    formula = flop_registry.get(packet)
    return (0, 0) if formula is None else (int(formula(*args, **kwargs, out_val=out)), 0)


def computes(packet: object) -> bool:
    """Whether `flops_of` counts FLOPs for this operation."""
    return packet in (_FORWARD, _BACKWARD) or packet in flop_registry
