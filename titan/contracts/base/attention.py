"""Causal attention, within documents or with a cache of the tokens that a model has gone through.

With a cache each further token costs that token alone. Rows of a batch may be of uneven length: each has its tokens at
positions of its own, counted from 0, and a token sees the positions up to its own. So what pads a row to the right is
harmless: no real token sees it, and the row's next real tokens are written over it.

Cost of a cache: 2 K N numbers a layer, token and row, in the dtype of the keys, held for the longest length from the
start. A rank that has a share of the heads holds their share.
"""

# B rows, S tokens of this forward, T longest length, E positions in use, H query heads, K key-value heads, N head_dim.

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents: Tensor) -> Tensor:
    """Which position may see which: itself and earlier ones of its document. [B, S] -> [B, 1, S, S] bool."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q [B, H, S, N] to k and v [B, K, S, N], with H a multiple of K; returns [B, H, S, N].

    mask [B, 1, S, S] bool says which position sees which; None: each sees itself and all before it.
    """
    group = q.shape[1] // k.shape[1]
    if mask is not None and group > 1:
        # The fused CUDA kernel that takes a mask knows no groups; without it the S x S scores are written out.
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    grouped = group > 1 and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class Cache:
    """What one model remembers of a batch of rows; made for one use, of at most `length` tokens a row.

    positions [B, S] int64: where the tokens of this forward stand in their rows; `place` sets it.
    """

    positions: Tensor

    def __init__(self, length: int) -> None:
        self.length, self.end = length, 0
        self.mask: Tensor | None = None
        self._layers: dict[str, KeyValues] = {}

    def place(self, starts: Sequence[int], width: int, device: torch.device) -> None:
        """Say where the tokens [B, S] of the coming forward stand: row b from `starts[b]` on, S = `width`."""
        self.end = max(starts) + width
        assert self.end <= self.length, f"a row would hold {self.end} tokens, the cache has room for {self.length}"
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        self.mask = None
        if any(starts):
            seen = torch.arange(self.end, device=device) <= self.positions[..., None]
            self.mask = seen[:, None]  # [B, 1, S, E]

    def layer(self, name: str) -> "KeyValues":
        """The part of one layer."""
        return self._layers.setdefault(name, KeyValues(self))


class KeyValues:
    """Keys and values of one layer, [B, K, T, N] each, zero where nothing has been written."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._keys = self._values = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this forward's tokens to themselves and to what is remembered, which k and v join.

        q [B, H, S, N]; k, v [B, K, S, N], with H a multiple of K; rotated already where the model rotates. Returns
        [B, H, S, N], as `scaled_dot_product_attention` does for the whole rows at once.
        """
        cache = self._cache
        if not self._keys.numel():
            shape = (*k.shape[:2], cache.length, k.shape[-1])
            self._keys, self._values = k.new_zeros(shape), v.new_zeros(shape)
        at = cache.positions[:, None, :, None].expand_as(k)
        self._keys.scatter_(2, at, k)
        self._values.scatter_(2, at, v)
        if cache.mask is None:  # all rows begin here, so plain causal attention, which has the fast kernels
            return attend(q, k, v)
        # The heads of a group look at the same keys: side by side as if they were tokens, they need no copies of them.
        b, heads, s, n = q.shape
        group = heads // k.shape[1]
        side_by_side = q.reshape(b, heads // group, group * s, n)
        keys, values = self._keys[:, :, : cache.end], self._values[:, :, : cache.end]
        mask = cache.mask.repeat(1, 1, group, 1)
        return F.scaled_dot_product_attention(side_by_side, keys, values, attn_mask=mask).reshape(b, heads, s, n)
