"""A model from outside: every position sees the mean of what came before it, then a feed-forward."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import Model, ModelSpec, option, register
from titan.contracts.base.cost import EmbeddingOp, linear, norm
from titan.contracts.base.spec import ONES, normal


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes."""

    n_layers: int = option(3, "layers", at_least=1)
    dim: int = option(24, "width", at_least=1)
    vocab_size: int = option(257, "token ids", at_least=1)
    max_seq_len: int = option(32, "longest sequence", unit="tokens", at_least=1)


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        counts = torch.arange(1, x_BSD.shape[1] + 1, device=x_BSD.device, dtype=x_BSD.dtype)
        mean_BSD = self.norm(x_BSD).cumsum(1) / counts[:, None]
        return x_BSD + self.down(F.gelu(self.up(mean_BSD)))


class _Averager(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): _Block(config.dim) for i in range(config.n_layers)})
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(x)


@register
class Averager(Model):
    """Causal means and feed-forwards."""

    name = "averager"
    Config = Config

    def spec(self) -> ModelSpec:
        c = self.config
        layer = 4 * c.dim * c.dim
        return ModelSpec(
            n_layers=c.n_layers,
            dim=c.dim,
            n_heads=1,
            n_kv_heads=1,
            head_dim=c.dim,
            vocab_size=c.vocab_size,
            max_seq_len=c.max_seq_len,
            embeddings=("embed",),
            head=("output",),
            tensor={},
            init={"*.weight": normal(0.1), "layers.*.norm.weight": ONES, "layers.*.*.weight": normal(0.1)},
            layer_params=layer + c.dim,
            embedding_params=c.vocab_size * c.dim,
            head_params=c.vocab_size * c.dim,
            matmul_params_per_layer=layer,
            head_matmul_params=c.vocab_size * c.dim,
            embedding_ops=(EmbeddingOp(module="embed", rows=c.vocab_size, width=c.dim),),
            layer_ops=(
                norm("norm", c.dim),
                linear("up", c.dim, 2 * c.dim, saved=c.dim),
                linear("down", 2 * c.dim, c.dim, saved=4 * c.dim, region="tp_sharded"),
            ),
            head_ops=(linear("output", c.dim, c.vocab_size, saved=c.dim),),
        )

    def build(self) -> nn.Module:
        return _Averager(self.config)
