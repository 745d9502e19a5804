"""Blocks of layers: attention with its linears, a feed-forward, and the two behind norms, each with its `LayerPart`.

A `LayerPart` says of a part what `ModelSpec` wants to know: its operations, from which its parameters follow, and how
tensor parallelism treats its modules.
"""

# B rows, S tokens, D dim, H query heads, K key-value heads, N head_dim, R rotated features of a head, F ffn_dim.
# Under tensor parallelism H, K and F are a rank's own share: no forward reads them from a config.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts.base import cost
from titan.contracts.base.spec import TensorStyle
from titan.layers.attention import AttentionCore, attention_cost
from titan.layers.philox import Dropout, dropout_cost
from titan.layers.rotary import rotate


class LayerPart(NamedTuple):
    """A part of a layer as data; modules are named from the layer, as in `attn.wq`.

    operations: in forward order; what two operations save is stated at the first of them.
    tensor: module -> `TensorStyle`.  draws: modules that draw random numbers.
    """

    operations: tuple[cost.Operation, ...]
    tensor: Mapping[str, TensorStyle]
    draws: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes and options of `SelfAttention`.

    dim: features of a hidden state.  n_heads, n_kv_heads: query heads, and key-value heads, which divide them.
    head_dim: features per head; n_heads * head_dim need not be dim.
    bias: the four linears have biases.
    rotary: queries and keys are rotated by a `rope_table`.  rotary_share: of each head's features, those rotated.
    norm_eps: queries and keys of each head pass through an RMSNorm of this eps (arXiv 2302.05442); None: no norm.
    wide_norm: this norm is over the features of all heads together (arXiv 2501.00656).
    window, scale, soft_cap, slopes: as in `AttentionCore`.
    unfused: attention that writes its S x S scores.
    """

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False
    rotary: bool = False
    rotary_share: float = 1.0
    norm_eps: float | None = None
    wide_norm: bool = False
    window: int = 0
    scale: float | None = None
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    unfused: bool = False

    def part(self) -> LayerPart:
        """`SelfAttention` as data, under the name `attn`."""
        d, n, n_heads, n_kv_heads, bias = self.dim, self.head_dim, self.n_heads, self.n_kv_heads, self.bias
        q, kv = n_heads * n, n_kv_heads * n
        core = attention_cost(n_heads, n_kv_heads, n, scores_written=self.unfused, soft_cap=self.soft_cap > 0)
        norms = {"attn.q_norm": q, "attn.k_norm": kv} if self.norm_eps is not None else {}
        wide = self.wide_norm
        # What stays is copied beside what is rotated.
        moved = (8 * self.rotary_share + 2 * (self.rotary_share < 1)) * (q + kv)
        operations = (
            cost.shared(d, 3),
            cost.linear("attn.wq", d, q, saved=d, bias=bias),
            *(cost.linear(f"attn.{name}", d, kv, bias=bias) for name in ("wk", "wv")),
            *(_norm_of_heads(name, numel, numel if wide else n) for name, numel in norms.items()),
            *((cost.Elementwise(region="tp_sharded", forward=moved, backward=moved),) if self.rotary else ()),
            replace(core, window=self.window, biased=bool(self.slopes)),
            cost.linear("attn.wo", q, d, bias=bias),
        )
        columns: dict[str, TensorStyle] = dict.fromkeys(("attn.wq", "attn.wk", "attn.wv"), "column")
        styles: dict[str, TensorStyle] = dict.fromkeys(norms, "wide_norm" if wide else "qk_norm")
        return LayerPart(operations, {"attn": "gather", **columns, "attn.wo": "row", **styles})


def _norm_of_heads(module: str, numel: int, width: int) -> cost.Elementwise:
    """An RMSNorm of a rank's own heads of `numel` features in all, `width` at a time: as that of hidden states."""
    statistics = cost.SavedTensor(numel=numel / width, region="tp_sharded" if width < numel else "seq_full", itemsize=4)
    saved = cost.saved_by_rms_norm(numel, statistics, "tp_sharded")
    return cost.Elementwise(
        module=module, region="tp_sharded", forward=2 * numel, backward=3 * numel, params=1, width=width, saved=saved
    )


class SelfAttention(nn.Module):
    """Causal self-attention with its linears, [B, S, D] to [B, S, D]; groups of query heads may share keys and values.

    The attention itself is `core`, which a spec names in `ModelSpec.attention`.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        d, n, eps, cap = heads.dim, heads.head_dim, heads.norm_eps, heads.soft_cap
        q, kv = heads.n_heads * n, heads.n_kv_heads * n
        self.head_dim, self.wide_norm = n, heads.wide_norm
        self.wq = nn.Linear(d, q, bias=heads.bias)
        self.wk, self.wv = (nn.Linear(d, kv, bias=heads.bias) for _ in range(2))
        self.q_norm = None if eps is None else nn.RMSNorm(q if heads.wide_norm else n, eps=eps)
        self.k_norm = None if eps is None else nn.RMSNorm(kv if heads.wide_norm else n, eps=eps)
        self.wo = nn.Linear(q, d, bias=heads.bias)
        self.core = AttentionCore(
            window=heads.window, scale=heads.scale, soft_cap=cap, slopes=heads.slopes, writes_scores=heads.unfused
        )

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, rope: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [B, S], documents [B, T], rope [2, B, S, R/2] -> [B, S, D]."""
        # S is read from x here and nowhere earlier: the layer's input may be a slice of the sequence, x is whole.
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.wide_norm:
            q, k = self._normed(q, k)
        q, k, v = (t.view(b, s, -1, self.head_dim) for t in (q, k, v))
        if not self.wide_norm:
            q, k = self._normed(q, k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B S H N -> B H S N
        return self.wo(self.core(q, k, v, positions, documents).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class SwiGLU(nn.Module):
    """The gated feed-forward w2(silu(w1 x) * w3 x), [B, S, D] to [B, S, D] (arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def swiglu(dim: int, ffn_dim: int) -> LayerPart:
    """`SwiGLU` as data, under the name `ffn`."""
    d, f = dim, ffn_dim
    operations = (
        cost.shared(d, 2),
        cost.linear("ffn.w1", d, f, saved=d),
        cost.linear("ffn.w3", d, f),
        cost.Elementwise(region="tp_sharded", forward=5 * f, backward=8 * f, saved=cost.saved_by_gate(f)),
        cost.linear("ffn.w2", f, d, saved=f, region="tp_sharded"),
    )
    return LayerPart(operations, {"ffn": "gather", "ffn.w1": "column", "ffn.w3": "column", "ffn.w2": "row"})


class FeedForward(nn.Module):
    """The feed-forward down(gelu(up x)) with biases, [B, S, D] to [B, S, D].

    approximate: "tanh" for GELU's tanh approximation, as in GPT-2; "none" for GELU itself (arXiv 1606.08415).
    """

    def __init__(self, dim: int, ffn_dim: int, *, approximate: Literal["tanh", "none"]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down(F.gelu(self.up(x), approximate=self.approximate))  # type: ignore[no-any-return]


def feed_forward(dim: int, ffn_dim: int) -> LayerPart:
    """`FeedForward` as data, under the name `ffn`."""
    d, f = dim, ffn_dim
    saved = (cost.SavedTensor(numel=f, region="tp_sharded"),)
    operations = (
        cost.linear("ffn.up", d, f, saved=d, bias=True),
        cost.Elementwise(region="tp_sharded", forward=2 * f, backward=3 * f, saved=saved),
        cost.linear("ffn.down", f, d, saved=f, region="tp_sharded", bias=True),
    )
    return LayerPart(operations, {"ffn": "gather", "ffn.up": "column", "ffn.down": "row"})


class PreNormLayer(nn.Module):
    """A layer `h = x + attn(attn_norm(x))`, `y = h + ffn(ffn_norm(h))`, maybe with dropout of what is added to x and h.

    attn_dropout, ffn_dropout: called on the output of `attn` and of `ffn`; None: no dropout.
    ffn_by_token: `ffn` draws random numbers by position, or counts tokens: it is called as (x, seeds, positions, real).
    """

    def __init__(
        self,
        attn_norm: nn.Module,
        attn: nn.Module,
        ffn_norm: nn.Module,
        ffn: nn.Module,
        attn_dropout: Dropout | None = None,
        ffn_dropout: Dropout | None = None,
        *,
        ffn_by_token: bool = False,
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.ffn_norm, self.ffn = attn_norm, attn, ffn_norm, ffn
        self.attn_dropout, self.ffn_dropout, self.ffn_by_token = attn_dropout, ffn_dropout, ffn_by_token

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        rope: Tensor | None = None,
        seeds: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D], seeds [B], real [B, S] false at padding; the others as of `SelfAttention`. Returns [B, S, D]."""
        added = self.attn(self.attn_norm(x), positions, documents, rope)
        h = x + (added if self.attn_dropout is None else self.attn_dropout(added, seeds, positions))
        added = self.ffn(self.ffn_norm(h), *((seeds, positions, real) if self.ffn_by_token else ()))
        return h + (added if self.ffn_dropout is None else self.ffn_dropout(added, seeds, positions))  # type: ignore[no-any-return]


def pre_norm(dim: int, attn: LayerPart, ffn: LayerPart, *, vectors: int, dropout: bool = False) -> LayerPart:
    """`PreNormLayer` as data. vectors: of a norm, 1 for RMSNorm and 2 for LayerNorm.  dropout: both are there."""
    added = (*((dropout_cost(dim),) if dropout else ()), cost.residual(dim))
    attn_norm, ffn_norm = (cost.norm(name, dim, vectors, vectors) for name in ("attn_norm", "ffn_norm"))
    operations = (attn_norm, *attn.operations, *added, ffn_norm, *ffn.operations, *added)
    tensor: dict[str, TensorStyle] = {"attn_norm": "norm", "ffn_norm": "norm", **attn.tensor, **ffn.tensor}
    drawn = ("attn_dropout", "ffn_dropout") if dropout else ()
    return LayerPart(operations, tensor, (*attn.draws, *ffn.draws, *drawn))
