"""Attention of a rank's queries to blocks of keys and values, and its gradients, without communication.

The softmax over all keys is merged from blocks of keys. A block gives its output o_i and the logarithm l_i of its sum
of exponentials; then, in float32,

    l = log sum_i exp l_i,    o = sum_i exp(l_i - l) o_i.

Backward needs no merge: given o and l, each block's share of the gradients is what the backward of a flash kernel
computes (arXiv 2307.08691, section 3.1). Blocks without a mask use such a kernel. Masked blocks write their scores, for
some queries at a time; so do all blocks with ALiBi, and where a device has no kernel for the dtype or head_dim.
Gradients are summed in float32.
"""

# B sequences, S positions of a rank, C = S / 2 positions of a chunk, H query heads, K key-value heads, N head_dim.

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titan.layers.products import FLASH, attention_backward

_aten = torch.ops.aten

MOST_SCORES = 2**26
"""Scores that a masked block has in memory at a time, if one query of all heads and sequences has no more."""

Kind = Literal["skipped", "full", "causal", "masked"]
"""How chunks of queries see chunks of keys: not at all, all of them, up to their own position, or as a mask says."""


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two of 2 size chunks of a sequence that a rank holds (head-tail order)."""
    return rank, 2 * size - 1 - rank


# --- which block of keys a block of queries sees --------------------------------------------------------------------


class Scores(NamedTuple):
    """What scores are besides products of queries and keys, as in `titan.layers.attention.AttentionCore`.

    window: a position attends to the last `window` positions, its own included. None: to all before it.
    scale: factor of the products; None: 1 / sqrt(N).
    slopes: of ALiBi, one for each of the H query heads; empty: nothing is added.
    """

    window: int | None = None
    scale: float | None = None
    slopes: Sequence[float] = ()


class Sight(NamedTuple):
    """Which position attends to which: to itself and earlier ones, of its document, at less than `window` distance."""

    width: int  # C
    documents: Tensor | None  # [B, T]
    window: int | None
    slopes: Tensor | None  # [H]

    def kind(self, query: int, key: int) -> Kind:
        """How the queries of one chunk see the keys of another."""
        window = math.inf if self.window is None else self.window
        nearest, farthest = (query - key - 1) * self.width + 1, (query - key + 1) * self.width - 1
        if key > query or nearest >= window:
            return "skipped"
        if self.documents is not None or self.slopes is not None or farthest >= window:
            return "masked"
        return "causal" if key == query else "full"

    def mask(self, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Add biases to scores [B, H, Q, K], and set those to -inf that do not count, in place.

        queries, keys: positions [Q] and [K] int64.
        """
        distance = queries[:, None] - keys
        if self.slopes is not None:
            scores.addcmul_(self.slopes[:, None, None], distance, value=-1)
        unseen = distance < 0
        if self.window is not None:
            unseen |= distance >= self.window
        if self.documents is not None:
            unseen = (unseen | (self.documents[:, queries, None] != self.documents[:, None, keys]))[:, None]
        return scores.masked_fill_(unseen, -math.inf)


class Block(NamedTuple):
    """A block of scores that one call computes: which of a rank's queries, which of the keys at hand."""

    rows: slice
    columns: slice
    kind: Kind


def blocks_of(sight: Sight, queries: tuple[int, int], keys: Sequence[int]) -> list[Block]:
    """The blocks of a rank's two chunks of queries and any chunks of keys: few, as each costs a kernel and a merge."""
    rows = [[sight.kind(query, key) for key in keys] for query in queries]
    both = slice(0, 2 * sight.width)
    if rows == [["causal", "skipped"], ["full", "causal"]]:
        return [Block(both, both, "causal")]
    first, second = (_runs(row, sight.width) for row in rows)
    if first == second:
        return [Block(both, columns, kind) for columns, kind in first]
    halves = (slice(0, sight.width), first), (slice(sight.width, 2 * sight.width), second)
    return [Block(half, columns, kind) for half, runs in halves for columns, kind in runs]


def _runs(row: Sequence[Kind], width: int) -> list[tuple[slice, Kind]]:
    """Neighbouring chunks of keys of one kind, as one."""
    runs: list[tuple[slice, Kind]] = []
    at = 0
    for kind, chunks in groupby(row):
        end = at + width * len(list(chunks))
        if kind != "skipped":
            runs.append((slice(at, end), kind))
        at = end
    return runs


# --- one block ------------------------------------------------------------------------------------------------------


def is_fused(q: Tensor, kind: Kind) -> bool:
    """Whether a fused kernel computes the block. Meta tensors stand for a device that has one."""
    if kind == "masked" or q.device.type != "cuda":
        return kind != "masked" and q.device.type in ("cpu", "meta")
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, kind == "causal", False)
    return q.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(parameters)


def forward_fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """As `forward_written`, by a kernel, whose output has the dtype of q."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.device.type == "cuda":
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = FLASH(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def backward_fused(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward_written`, by a kernel, whose gradients have the dtype of q."""
    grad, q, k, v, out = (t if t.stride(-1) == 1 else t.contiguous() for t in (grad, q, k, v, out))
    lse = lse.contiguous()
    if q.device.type == "cuda":
        lengths, unused = q.shape[2:3] + k.shape[2:3], q.new_empty(2, dtype=torch.uint64)  # of dropout
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, unused, unused, scale=scale
        )
    return attention_backward((grad, q, k, v, out), lse, causal, None, scale)


Mask = Callable[[Tensor, slice], Tensor]
"""Biases and masks the scores [B, H, Q, K] of some queries of a block, in place."""


def forward_written(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of q [B, H, Q, N] to k and v [B, K, K', N], and its log-sum-exp [B, H, Q], both float32.

    A query that sees no key has output 0 and log-sum-exp -inf.
    """
    outs, sums = [], []
    for rows in _parts(q, k):
        side_by_side, scores = _scores(q, rows, k, mask, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)).exp_()
        outs.append(_product(scores.view(*side_by_side.shape[:3], -1), v).view(*scores.shape[:3], -1))
        sums.append(lse.squeeze(-1))
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def backward_written(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of q, k and v, float32; out and lse are those over all keys."""
    dqs = []
    dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    for rows in _parts(q, k):
        side_by_side, scores = _scores(q, rows, k, mask, scale)
        softmax = scores.sub_(lse[:, :, rows, None]).exp_().view(*side_by_side.shape[:3], -1)
        gradient = grad[:, :, rows].reshape(side_by_side.shape)
        mean = (gradient.float() * out[:, :, rows].reshape(side_by_side.shape)).sum(-1, keepdim=True)
        dv += _product(softmax.mT, gradient)
        # Of the scores before they are scaled.
        unscaled = _product(gradient, v.mT).sub_(mean).mul_(softmax).mul_(_scale(q, scale))
        dk += _product(unscaled.mT, side_by_side)
        dqs.append(_product(unscaled, k).view(*q[:, :, rows].shape))
    return torch.cat(dqs, dim=2), dk, dv


def _parts(q: Tensor, k: Tensor) -> list[slice]:
    """Slices of the queries whose scores are in memory together."""
    b, h, length = q.shape[:3]
    step = max(1, MOST_SCORES // (b * h * k.shape[2]))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _scores(q: Tensor, rows: slice, k: Tensor, mask: Mask | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Some queries of a group of heads side by side, [B, K, H / K Q, N], and their scores [B, H, Q, K'] in float32.

    The heads of a group see the same keys: side by side as if they were positions, they need no copies of them.
    """
    b, h, length, n = q[:, :, rows].shape
    side_by_side = q[:, :, rows].reshape(b, k.shape[1], -1, n)
    scores = _product(side_by_side, k.mT).mul_(_scale(q, scale)).view(b, h, length, -1)
    return side_by_side, scores if mask is None else mask(scores, rows)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in float32, of factors in the dtype of inputs where the device sums these in float32."""
    dtype = b.dtype if a.dtype == torch.float32 else a.dtype
    if a.device.type == "cuda" and dtype != torch.float32:
        product = torch.bmm(a.to(dtype).flatten(0, 1), b.to(dtype).flatten(0, 1), torch.float32)
    else:
        product = torch.bmm(a.float().flatten(0, 1), b.float().flatten(0, 1))
    return product.view(*a.shape[:2], *product.shape[1:])


# --- all blocks of a rank's queries ---------------------------------------------------------------------------------


class Queries:
    """A rank's queries [B, H, S, N] of its two chunks, and which keys they see."""

    def __init__(self, q: Tensor, documents: Tensor | None, rank: int, size: int, scores: Scores) -> None:
        self.q, self.chunks, self.scale = q, chunks_of(rank, size), scores.scale
        # Made once: a copy to a device holds up the host.
        slopes = torch.tensor(scores.slopes, device=q.device) if scores.slopes else None
        self.sight = Sight(q.shape[2] // 2, documents, scores.window, slopes)

    def nothing_seen(self) -> tuple[Tensor, Tensor]:
        """Output [B, H, S, N] and log-sum-exp [B, H, S] of no keys yet, float32."""
        lse = self.q.new_full(self.q.shape[:-1], -math.inf, dtype=torch.float32)
        return torch.zeros_like(self.q, dtype=torch.float32), lse

    def _positions(self, chunks: Sequence[int]) -> Tensor:
        width = self.sight.width
        return torch.cat([torch.arange(at * width, (at + 1) * width, device=self.q.device) for at in chunks])

    def _mask(self, block: Block, chunks: Sequence[int]) -> Mask | None:
        if block.kind == "full":
            return None
        queries, keys = self._positions(self.chunks)[block.rows], self._positions(chunks)[block.columns]
        return lambda scores, rows: self.sight.mask(scores, queries[rows], keys)

    def attend(self, kv: Tensor, chunks: Sequence[int], out: Tensor, lse: Tensor) -> None:
        """Merge attention to the keys and values [2, B, K, T', N] of some chunks into out and lse."""
        for block in blocks_of(self.sight, self.chunks, chunks):
            q, (k, v) = self.q[:, :, block.rows], kv[..., block.columns, :]
            if is_fused(q, block.kind):
                results = forward_fused(q, k, v, block.kind == "causal", self.scale)
            else:
                results = forward_written(q, k, v, self._mask(block, chunks), self.scale)
            merge(out[:, :, block.rows], lse[:, :, block.rows], *results)

    def gradients(
        self, kv: Tensor, chunks: Sequence[int], grad: Tensor, out: Tensor, lse: Tensor, dq: Tensor
    ) -> Tensor:
        """Add to dq [B, H, S, N]; return the gradients [2, B, K, T', N] of some chunks' keys and values, in float32."""
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        for block in blocks_of(self.sight, self.chunks, chunks):
            rows, columns, kind = block
            k, v = kv[..., columns, :]
            given, own, past, total = (t[:, :, rows] for t in (grad, self.q, out, lse))
            if is_fused(own, kind):
                shares = backward_fused(given, own, k, v, past, total, kind == "causal", self.scale)
            else:
                shares = backward_written(given, own, k, v, past, total, self._mask(block, chunks), self.scale)
            for whole, share in zip((dq[:, :, rows], *dkv[..., columns, :]), shares, strict=True):
                whole += share
        return dkv


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's output and log-sum-exp into those of earlier blocks, in place."""
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)  # no key seen so far: -inf less -inf is no number
    out.mul_((lse - finite).exp_()[..., None]).add_(block_out * (block_lse - finite).exp_()[..., None])
    lse.copy_(total)
