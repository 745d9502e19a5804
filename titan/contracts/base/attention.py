"""Causal attention, within documents or with a key-value cache of earlier tokens.

With a cache, each further token costs only its own forward. Rows of a batch may have different lengths: each row's
tokens have positions of its own, from 0, and a token attends to positions up to its own. Padding on the right is
harmless: no real token attends to padding, and the row's next real tokens overwrite it.

Memory of a cache: 2 K N numbers per layer, token and row, in the dtype of the keys, allocated for the longest length at
the start. A rank with a share of the heads allocates only its share.
"""

# B rows, S tokens of this forward, T longest length, E positions in use, H query heads, K key-value heads, N head_dim.

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts.base.cost import Attention, SavedTensor


def document_mask(documents: Tensor) -> Tensor:
    """Which position attends to which: itself and earlier ones of its document. [B, S] -> [B, 1, S, S] bool."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q [B, H, S, N] to k and v [B, K, S, N], H a multiple of K; returns [B, H, S, N] in q's dtype.

    mask: [B, 1, S, S] bool, True where a position attends to another; None: causal attention.
    """
    group = q.shape[1] // k.shape[1]
    if mask is not None and group > 1:
        # The fused CUDA kernel that takes a mask knows no groups; without it the S x S scores are written out.
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    grouped = group > 1 and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def attend_unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same as `attend`, as separate operations: scores [B, H, S, S] pass through memory in q's dtype.

    Backward needs the softmax of the scores: B H S^2 numbers, which recompute modes "attention" and "selective" do not
    keep. Its softmax holds two tensors of that size besides: the gradients of the probabilities and of the scores. The
    scores are not masked in place: they are a view, for which autograd would copy the whole gradient twice more.
    """
    b, heads, s, n = q.shape
    group = heads // k.shape[1]
    if mask is None:
        mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    # The heads of a group look at the same keys: side by side as if they were tokens, they need no copies of them.
    side_by_side = (q / math.sqrt(n)).reshape(b, heads // group, group * s, n)
    scores = (side_by_side @ k.transpose(-2, -1)).view(b, heads, s, s).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1).view(b, heads // group, group * s, s) @ v).view(b, heads, s, n)


class AttentionCore(nn.Module):
    """Attention of q to k and v, without the linear layers around it: what recompute mode "attention" runs again.

    writes_scores: whether the S x S scores are saved for backward, so that recomputing the core saves memory. A model
    whose own attention does so derives its core from this class, and states `scores_written` in its costs.
    """

    def __init__(self, *, writes_scores: bool = False) -> None:
        super().__init__()
        self.writes_scores = writes_scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, H, S, N], k and v [B, K, S, N], mask [B, 1, S, S] bool or None for causal -> [B, H, S, N]."""
        return (attend_unfused if self.writes_scores else attend)(q, k, v, mask)


def attention_cost(heads: int, kv_heads: int, head_dim: int, *, scores_written: bool = False) -> Attention:
    """The cost of causal attention that saves q, k, v and its output, and what its backward needs besides.

    With a flash kernel these are float32 statistics, one per token and head. Attention that writes its scores saves the
    softmax of the scores in the compute dtype instead: S numbers per token and head. Backward holds two copies more.

    Args:
        heads, kv_heads: query heads and key-value heads, before any split.
        head_dim: features per head.
        scores_written: as in `titan.contracts.base.cost.Attention`; whether the model uses `attend_unfused`.
    """
    inputs_and_output = SavedTensor(numel=2 * (heads + kv_heads) * head_dim, region="tp_sharded")
    statistics = SavedTensor(numel=heads, region="tp_sharded", itemsize=4)
    scores = SavedTensor(numel=heads, region="tp_sharded", scores=True)
    saved = (inputs_and_output, scores if scores_written else statistics)
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scores_written=scores_written,
        scratch=2 * scores_written, saved=saved,
    )  # fmt: skip


class Cache:
    """The key-value cache of one model for one batch of rows; made for one use, of at most `length` tokens per row.

    positions: [B, S] int64 on the device, the positions of this forward's tokens in their rows; set by `place`.
    """

    positions: Tensor

    def __init__(self, length: int) -> None:
        self.length, self.end = length, 0
        self.mask: Tensor | None = None
        self._layers: dict[str, KeyValues] = {}

    def place(self, starts: Sequence[int], width: int, device: torch.device) -> None:
        """Set the positions of the tokens [B, S] of the next forward: row b starts at `starts[b]`, and S = `width`."""
        self.end = max(starts) + width
        assert self.end <= self.length, f"a row would hold {self.end} tokens, the cache has room for {self.length}"
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        self.mask = None
        if any(starts):
            seen = torch.arange(self.end, device=device) <= self.positions[..., None]
            self.mask = seen[:, None]  # [B, 1, S, E]

    def layer(self, name: str) -> "KeyValues":
        """The keys and values of one layer, made on first use."""
        return self._layers.setdefault(name, KeyValues(self))


class KeyValues:
    """Keys and values of one layer, [B, K, T, N] each, zero at positions not yet written."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._keys = self._values = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this forward's tokens to themselves and to the cached ones; adds k and v to the cache.

        q: [B, H, S, N].  k, v: [B, K, S, N], H a multiple of K; with rotary embeddings already applied.

        Returns [B, H, S, N], equal to `scaled_dot_product_attention` over the whole rows at once.
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
