"""A model from outside with what the built-in ones lack: norms of queries and keys, and buffers.

Pre-norm attention with learned and rotary positions, biases everywhere, and a GELU feed-forward; what a sublayer adds
is scaled by a persistent buffer. `fault` makes it break the contract.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import Model, ModelSpec, option, register
from titan.contracts.base.spec import ONES, ZEROS, Init, computed, normal

HEAD_DIM = 8
ADDED = Init("constant", value=0.5)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes."""

    n_layers: int = option(4, "layers", at_least=1)
    dim: int = option(32, "width", at_least=8)
    n_heads: int = option(4, "heads", at_least=1)
    ffn_dim: int = option(48, "width of the feed-forward", at_least=1)
    vocab_size: int = option(257, "token ids", at_least=1)
    max_seq_len: int = option(32, "longest sequence", unit="tokens", at_least=1)
    fault: Literal["", "dropout", "writes", "no value", "norm"] = option("", "what the model does wrong")


def angles(positions: int, device: torch.device) -> Tensor:
    """Cosine and sine of each position's angles: [2, S, N/2]."""
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    turned = torch.arange(positions, device=device)[:, None] * frequencies
    return torch.stack((turned.cos(), turned.sin()))


class _Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.n_heads * HEAD_DIM
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, inner) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.wo = nn.Linear(inner, config.dim)
        self.register_buffer("rope", angles(config.max_seq_len, self.wq.weight.device), persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        b, s, _ = x_BSD.shape
        q, k, v = (w(x_BSD).view(b, s, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        q, k = (self._turned(norm(t)) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def _turned(self, x_BSHN: Tensor) -> Tensor:
        cos, sin = self.rope[:, : x_BSHN.shape[1], None]
        first, second = x_BSHN.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHN.dtype)


class _Scaled(nn.Linear):
    """A linear with a buffer of its own, which becomes a DTensor where the linear is sliced."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.full((inputs,), ADDED.value))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.clone())


class _FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.down = _Scaled(config.dim, config.ffn_dim), nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD)))


class _Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fault = config.fault
        self.attn_norm, self.ffn_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attn, self.ffn = _Attention(config), _FeedForward(config)
        self.register_buffer("added", torch.tensor(ADDED.value))

    def forward(self, x_BSD: Tensor) -> Tensor:
        added = self.added.clone()
        x_BSD = x_BSD + added * self.attn(self.attn_norm(x_BSD))
        if self.fault == "dropout":
            x_BSD = F.dropout(x_BSD, 0.1, self.training)
        if self.fault == "writes":
            self.added *= 0.9
        return x_BSD + added * self.ffn(self.ffn_norm(x_BSD))


class _Frills(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_seq_len, config.dim)
        self.layers = nn.ModuleDict({str(i): _Block(config) for i in range(config.n_layers)})
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        if not x.is_floating_point():
            x = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


@register
class Frills(Model):
    """Norms of queries and keys, biases, buffers."""

    name = "frills"
    Config = Config

    def spec(self) -> ModelSpec:
        c = self.config
        matmuls = 4 * c.dim * c.n_heads * HEAD_DIM + 2 * c.dim * c.ffn_dim
        small = 3 * c.n_heads * HEAD_DIM + c.ffn_dim + 6 * c.dim + 3 * HEAD_DIM
        tensor = {"embed": "embedding", "positions": "positions", "norm": "norm", "output": "head"}
        tensor |= {f"layers.*.{name}": style for name, style in _STYLES.items()}
        if c.fault == "norm":
            tensor |= {"layers.*.attn.q_norm": "norm", "layers.*.attn.k_norm": "norm"}
        rope = computed(lambda device: angles(c.max_seq_len, device))
        buffers = {"layers.*.added": ADDED, "layers.*.ffn.up.scale": ADDED, "layers.*.attn.rope": rope}
        if c.fault == "no value":
            del buffers["layers.*.attn.rope"]
        return ModelSpec(
            n_layers=c.n_layers,
            dim=c.dim,
            n_heads=c.n_heads,
            n_kv_heads=c.n_heads,
            head_dim=HEAD_DIM,
            ffn_dim=c.ffn_dim,
            vocab_size=c.vocab_size,
            max_seq_len=c.max_seq_len,
            embeddings=("embed", "positions"),
            head=("norm", "output"),
            tensor=tensor,
            buffers=buffers,
            init={
                "norm.weight": ONES,
                "layers.*.*_norm.weight": ONES,
                "layers.*.attn.*_norm.weight": ONES,
                "*.bias": ZEROS,
                "layers.*.*.bias": ZEROS,
                "layers.*.*.*.bias": ZEROS,
                "*.weight": normal(0.1),
                "layers.*.*.*.weight": normal(0.1),
            },
            layer_params=matmuls + small,
            embedding_params=(c.vocab_size + c.max_seq_len) * c.dim,
            head_params=(c.vocab_size + 2) * c.dim,
            matmul_params_per_layer=matmuls,
            head_matmul_params=c.vocab_size * c.dim,
        )

    def build(self) -> nn.Module:
        return _Frills(self.config)


_STYLES = {"attn_norm": "norm", "attn": "gather", "attn.wq": "column", "attn.wk": "column", "attn.wv": "column"}
_STYLES |= {"attn.q_norm": "qk_norm", "attn.k_norm": "qk_norm", "attn.wo": "row"}
_STYLES |= {"ffn_norm": "norm", "ffn": "gather", "ffn.up": "column", "ffn.down": "row"}
