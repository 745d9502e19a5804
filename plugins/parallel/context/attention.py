"""Causal attention of sequences whose positions are split over ranks: ring, all-gather, and all-to-all.

ring     keys and values go round the ranks while each rank attends to those it has (arXiv 2310.01889).
gather   each rank gathers all keys and values of a layer, then attends (Llama 3, arXiv 2407.21783, section 3.3.2).
ulysses  an all-to-all gives each rank all positions of some heads, and another one undoes it (arXiv 2309.14509).

Causal attention costs later positions more. For ring and gather a sequence is cut into 2 size chunks, and rank r holds
chunks r and 2 size - 1 - r (head-tail order), so that every rank has the same number of scores to compute.

`ring` and `gather` are one operation each for autograd, recomputation and `torch.compile`. They save q, k, v, the
output and its log-sum-exp of a rank's own positions; backward communicates keys and values again.

Numbers sent per rank, layer and sequence, with E = 2 K S N for the keys and values of a rank's own positions:
    ring: (size - 1) E forward. Backward sends the same again, and size E gradients in float32.
    gather: (size - 1) E forward. Backward sends the same again, and (size - 1) E gradients in float32.
    ulysses: (size - 1) / size of q, k, v and the output forward, and of their gradients in backward. With K < size
        key-value heads, k and v count as `size` heads.
"""

# B sequences of T positions, S = T / size positions of a rank, H query heads, K key-value heads, N head_dim.

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from .blocks import Queries, Scores, chunks_of

_collectives = torch.ops._c10d_functional


class Ranks(NamedTuple):
    """The ranks that share sequences: name of their process group, their number, and this one's place."""

    group: str
    size: int
    rank: int


def positions_of(length: int, rank: int, size: int, method: str) -> Tensor:
    """Positions [S] int64 of a sequence of `length` that a rank holds, in the order in which the rank holds them.

    method: "ring" and "gather" hold two chunks (head-tail order), so 2 size divides the length; "ulysses" one slice.
    """
    if method == "ulysses":
        return torch.arange(length).view(size, -1)[rank]
    return torch.arange(length).view(2 * size, -1)[list(chunks_of(rank, size))].flatten()


# --- between ranks --------------------------------------------------------------------------------------------------


class _Travelling:
    """A block on its way to the next rank, while this one computes; `arrived` is what the previous rank sent."""

    def __init__(self, block: Tensor, ranks: Ranks) -> None:
        sent, received = [0] * ranks.size, [0] * ranks.size
        sent[(ranks.rank + 1) % ranks.size] = received[ranks.rank - 1] = block.numel()
        self._sent = block.contiguous()
        self._coming = _collectives.all_to_all_single(self._sent.view(-1), received, sent, ranks.group)

    def arrived(self) -> Tensor:
        received: Tensor = _collectives.wait_tensor(self._coming)
        return received.view(self._sent.shape)


def _all_chunks(kv: Tensor, ranks: Ranks) -> Tensor:
    """Keys and values of the whole sequence in its order, [2, B, K, T, N], from each rank's [2, B, K, S, N]."""
    gathered = _collectives.wait_tensor(_collectives.all_gather_into_tensor(kv, ranks.size, ranks.group))
    first, second = gathered.view(ranks.size, *kv.shape).chunk(2, dim=-2)
    return torch.cat([*first, *second.flip(0)], dim=-2)


def _own_sum(dkv: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks of gradients [2, B, K, T, N] of the whole sequence, at a rank's own positions."""
    chunks = dkv.chunk(2 * ranks.size, dim=-2)
    rows = torch.stack(
        [torch.cat([chunks[at] for at in chunks_of(rank, ranks.size)], -2) for rank in range(ranks.size)]
    )
    total = _collectives.reduce_scatter_tensor(rows.flatten(0, 1), "sum", ranks.size, ranks.group)
    return _collectives.wait_tensor(total)  # type: ignore[no-any-return]


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    group: str,
    size: int,
    rank: int,
    window: int | None,
    scale: float | None,
    slopes: Sequence[float],
) -> tuple[Tensor, Tensor]:
    ranks = Ranks(group, size, rank)
    queries, kv = Queries(q, documents, rank, size, Scores(window, scale, slopes)), torch.stack((k, v))
    out, lse = queries.nothing_seen()
    for step in range(size):
        travelling = _Travelling(kv, ranks) if step + 1 < size else None
        queries.attend(kv, chunks_of((rank - step) % size, size), out, lse)
        if travelling:
            kv = travelling.arrived()
    return out.to(q.dtype), lse


def _ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group: str,
    size: int,
    rank: int,
    window: int | None,
    scale: float | None,
    slopes: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """A block's gradients leave a rank one step after the block, with this rank's share, and end where it came from."""
    ranks = Ranks(group, size, rank)
    queries, kv = Queries(q, documents, rank, size, Scores(window, scale, slopes)), torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=torch.float32)
    gradients: _Travelling | None = None
    for step in range(size):
        travelling = _Travelling(kv, ranks) if step + 1 < size else None
        dkv = queries.gradients(kv, chunks_of((rank - step) % size, size), grad, out, lse, dq)
        if gradients:
            dkv += gradients.arrived()
        if travelling:
            kv = travelling.arrived()
        gradients = _Travelling(dkv, ranks) if size > 1 else None
    if gradients:
        dkv = gradients.arrived()
    return dq.to(q.dtype), dkv.to(k.dtype)


def _gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    group: str,
    size: int,
    rank: int,
    window: int | None,
    scale: float | None,
    slopes: Sequence[float],
) -> tuple[Tensor, Tensor]:
    ranks = Ranks(group, size, rank)
    queries = Queries(q, documents, rank, size, Scores(window, scale, slopes))
    out, lse = queries.nothing_seen()
    queries.attend(_all_chunks(torch.stack((k, v)), ranks), range(2 * size), out, lse)
    return out.to(q.dtype), lse


def _gather_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group: str,
    size: int,
    rank: int,
    window: int | None,
    scale: float | None,
    slopes: Sequence[float],
) -> tuple[Tensor, Tensor]:
    ranks = Ranks(group, size, rank)
    queries = Queries(q, documents, rank, size, Scores(window, scale, slopes))
    dq = torch.zeros_like(q, dtype=torch.float32)
    dkv = queries.gradients(_all_chunks(torch.stack((k, v)), ranks), range(2 * size), grad, out, lse, dq)
    return dq.to(q.dtype), _own_sum(dkv, ranks).to(k.dtype)


# --- operations -----------------------------------------------------------------------------------------------------


def _operation(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that autograd, recomputation and `torch.compile` see as one, with its gradient."""
    operation = library.custom_op(f"titan::{name}", forward, mutates_args=())
    gradient = library.custom_op(f"titan::{name}_backward", backward, mutates_args=())

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, documents, *ctx.constants = inputs
        ctx.save_for_backward(q, k, v, *output, documents)
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dq, dkv = gradient(grad, *ctx.saved_tensors, *ctx.constants)
        return dq, dkv[0], dkv[1], *[None] * 7

    operation.register_fake(lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)))
    gradient.register_fake(lambda _, q, k, *__: (torch.empty_like(q), k.new_empty(2, *k.shape)))
    operation.register_autograd(differentiate, setup_context=save)
    return operation


_RING = _operation("ring_attention", _ring, _ring_backward)
_GATHER = _operation("gather_attention", _gather, _gather_backward)

OPERATIONS = (
    torch.ops.titan.ring_attention.default,
    torch.ops.titan.gather_attention.default,
    _collectives.all_to_all_single.default,  # of ulysses
)
"""Operations whose results selective recomputation saves, as they cost much or communicate."""


def ring(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ranks: Ranks, scores: Scores) -> Tensor:
    """Causal attention of a rank's own positions to all of the sequence's; keys and values go round the ranks.

    A block travels while the one before it is computed. All ranks of the group call it, forward and backward.

    Args:
        q: [B, H, S, N], of the positions that `positions_of` names.
        k, v: [B, K, S, N], H a multiple of K.
        documents: [B, T] int64, the document of every position of the sequence, in its order; a position attends to its
            own document only. None: one document.
        ranks: the ranks that hold the sequence.
        scores: what they are besides the products of queries and keys.

    Returns [B, H, S, N] in q's dtype.
    """
    return _RING(q, k, v, documents, *ranks, *scores)[0]  # type: ignore[no-any-return]


def gather(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ranks: Ranks, scores: Scores) -> Tensor:
    """The same as `ring`, from keys and values gathered at once: fewer, larger blocks; 4 B K T N numbers in memory."""
    return _GATHER(q, k, v, documents, *ranks, *scores)[0]  # type: ignore[no-any-return]


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], ranks: Ranks
) -> Tensor:
    """Attention of all positions for a rank's own heads, between two all-to-alls.

    Args:
        q: [B, H, S, N], H a multiple of size.
        k, v: [B, K, S, N], K a multiple of size or size a multiple of K: then size / K ranks share a key-value head.
        attend: (q [B, H / size, T, N], k and v [B, max(1, K / size), T, N]) -> [B, H / size, T, N].
        ranks: the ranks that hold the sequence.

    Returns [B, H, S, N], of the rank's own positions.
    """
    size, (b, _, length, n) = ranks.size, q.shape
    if (copies := size // k.shape[1]) > 1:
        k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
    parts = [t.reshape(b, size, -1, length, n).movedim(1, 0) for t in (q, k, v)]
    heads = [part.shape[2] for part in parts]
    mine = _exchanged(torch.cat(parts, dim=2), ranks).movedim(0, 2)  # [B, heads, size, S, N]
    out = attend(*torch.split(mine.flatten(2, 3), heads, dim=1))
    others = out.reshape(b, heads[0], size, length, n).movedim(2, 0)
    return _exchanged(others, ranks).movedim(0, 1).flatten(1, 2)


class _Exchanged(torch.autograd.Function):
    """Row i of rank r becomes row r of rank i; so do the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _exchange(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.ranks), None


_exchanged: Callable[[Tensor, Ranks], Tensor] = _Exchanged.apply


def _exchange(x: Tensor, ranks: Ranks) -> Tensor:
    ones = [1] * ranks.size
    received = _collectives.all_to_all_single(x.contiguous(), ones, ones, ranks.group)
    return _collectives.wait_tensor(received)  # type: ignore[no-any-return]
