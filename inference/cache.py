"""A key-value cache: with it, each further token of a text costs only its own forward.

Rows of a batch may have different lengths: each row's tokens have positions of its own, from 0, and a token attends to
positions up to its own. Padding on the right is harmless: no real token attends to padding, and the row's next real
tokens overwrite it.

Memory: 2 K N numbers per layer, token and row, in the dtype of the keys, allocated for the longest length at the start.
A rank with a share of the heads allocates only its share.
"""

# B rows, S tokens of this forward, T longest length, E positions in use, H query heads, K key-value heads, N head_dim.

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.layers.attention import AttentionCore, alibi, attend, attend_unfused


class Cache:
    """The key-value cache of one model for one batch of rows; made for one use, of at most `length` tokens per row."""

    def __init__(self, length: int) -> None:
        self.length, self.end = length, 0
        self.masks: dict[tuple[int, tuple[float, ...]], Tensor | None] = {}
        self._held: dict[AttentionCore, tuple[Tensor, Tensor]] = {}  # keys and values [B, K, T, N], 0 where not written
        self._positions, self._first = torch.empty(0), True

    def place(self, starts: Sequence[int], width: int, device: torch.device) -> Tensor:
        """Positions [B, S] of the tokens of the next forward: row b starts at `starts[b]`, and S = `width`."""
        self.end = max(starts) + width
        assert self.end <= self.length, f"a row would hold {self.end} tokens, the cache has room for {self.length}"
        self._positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        self._first = not any(starts)
        self.masks.clear()
        return self._positions

    def mask(self, window: int, slopes: tuple[float, ...], dtype: torch.dtype) -> Tensor | None:
        """Which of the cached positions each token sees, [B, 1, S, E] bool; or what is added to scores, [B, H, S, E].
        None: all rows begin here, without a window or slopes."""
        kind = (window, slopes)
        if kind not in self.masks:
            there, own = torch.arange(self.end, device=self._positions.device), self._positions[..., None]
            seen = ((there <= own) & (there > own - window) if window else there <= own)[:, None]
            if slopes:
                seen = alibi(slopes, own - there).to(dtype).masked_fill_(~seen, -math.inf)
            self.masks[kind] = None if self._first and not window and not slopes else seen
        return self.masks[kind]

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Attention of all layers of a model adds to the cache and attends to it, while the context is open."""
        cores = cores_of(module)
        before = [core.operation for core in cores]
        for core in cores:
            core.operation = partial(self._attend, core)
        try:
            yield
        finally:
            for core, operation in zip(cores, before, strict=True):
                core.operation = operation

    def _attend(
        self, core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """As `AttentionCore.attend` over the whole rows at once, without documents; adds k and v to the cache."""
        if core not in self._held:
            shape = (*k.shape[:2], self.length, k.shape[-1])
            self._held[core] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = self._held[core]
        at = positions[:, None, :, None].expand_as(k)
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        b, heads, s, n = q.shape
        mask = self.mask(core.window, core.own_slopes(heads), q.dtype)
        if mask is not None:
            k, v = keys[:, :, : self.end], values[:, :, : self.end]
        if core.soft_cap:
            return attend_unfused(q, k, v, mask, scale=core.scale, soft_cap=core.soft_cap)
        if mask is None:  # plain causal attention, which has the fast kernels
            return attend(q, k, v, scale=core.scale)
        # The heads of a group look at the same keys: side by side as if they were tokens, they need no copies of them.
        groups, group = k.shape[1], heads // k.shape[1]
        side_by_side = q.reshape(b, groups, group * s, n)
        mask = mask.reshape(b, groups, group * s, -1) if core.slopes else mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(side_by_side, k, v, attn_mask=mask, scale=core.scale)
        return out.reshape(b, heads, s, n)


def cores_of(module: nn.Module) -> list[AttentionCore]:
    """The attention of all layers of a model."""
    return [core for core in module.modules() if isinstance(core, AttentionCore)]
