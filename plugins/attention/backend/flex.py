"""Attention by `torch.nn.attention.flex_attention`: a kernel that the compiler makes of what is done to scores.

A soft cap and ALiBi's slopes are applied within the kernel, so that no score and no bias passes through memory.
Documents and a window are a block mask: which blocks of 128 x 128 scores are computed, B S^2 / 16,384 entries, made
once per micro batch. PyTorch has the kernel for GPUs (Triton); on a CPU it has no backward.
"""

# B rows, S tokens, H query heads, K key-value heads, N head_dim.

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan.layers.attention import AttentionCore, attend


def attend_flex(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """As `AttentionCore.attend`, in one kernel."""
    if q.device.type == "meta":
        return attend(q, k, v, scale=core.scale)  # tensors without values: what is saved is the same
    mask = _mask(documents, core.window, q.shape[2], q.device)
    score = _score(core.soft_cap, core.own_slopes(q.shape[1]), q.device)
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = _made_by(
        flex_attention, q, k, v, score_mod=score, block_mask=mask, scale=core.scale, enable_gqa=grouped
    )
    return out


def _made_by(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function that is compiled on its own where the block around it is not.

    Also where compiled blocks run eagerly, as in a validation: otherwise all scores would pass through memory.
    """
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    with torch.compiler.set_stance("default"):
        return _compiled(function)(*args, **kwargs)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _score(soft_cap: float, slopes: Sequence[float], device: torch.device) -> Any:
    """What is done to a scaled score; None: nothing."""
    if not (soft_cap or slopes):
        return None
    steep = _slopes(tuple(slopes), device) if slopes else None

    def score(found: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap:
            found = soft_cap * torch.tanh(found / soft_cap)
        return found if steep is None else found - steep[head] * (query - key)

    return score


def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.tensor(slopes, device=device)
    return _held_slopes(slopes, device)


@cache
def _held_slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a copy to the device holds up the host."""
    return torch.tensor(slopes, device=device)


_masks: dict[tuple[int, int, torch.device], tuple[weakref.ref[Tensor] | None, BlockMask]] = {}
"""The last mask of each window and length, and the documents that it is of."""


def _mask(documents: Tensor | None, window: int, length: int, device: torch.device) -> BlockMask:
    """Layers that are given the same documents share it."""
    if torch.compiler.is_compiling():
        return _new_mask(documents, window, length, device)
    kind = (window, length, device)
    of, mask = _masks.get(kind, (None, None))
    same = of is None if documents is None else of is not None and of() is documents
    if mask is None or not same:
        mask = _new_mask(documents, window, length, device)
        _masks[kind] = None if documents is None else weakref.ref(documents), mask
    return mask


def _new_mask(documents: Tensor | None, window: int, length: int, device: torch.device) -> BlockMask:
    def seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = query >= key
        if window:
            found = found & (query - key < window)
        return found if documents is None else found & (documents[b, query] == documents[b, key])

    rows = None if documents is None else len(documents)
    made: BlockMask = _made_by(create_block_mask, seen, rows, None, length, length, device=device)
    return made
