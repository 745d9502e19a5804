"""A decoder without attention: each layer sees the mean of a position and the one before it (as RWKV's token shift).

x_t <- x_t + down(gelu(up((norm(x)_t + norm(x)_(t-1)) / 2))), where the first position of a document has none before it.
Limits: a position sees as many positions back as there are layers; sequences cannot be split over ranks.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import Model, ModelSpec, option, register
from titan.contracts.base.cost import Elementwise, EmbeddingOp, SavedTensor, linear, norm, residual
from titan.contracts.base.spec import ONES, normal


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[model]` with `name = "shift"`."""

    n_layers: int = option(4, "layers", at_least=1)
    dim: int = option(64, "hidden size", at_least=1)
    vocab_size: int = option(4097, "token ids", at_least=1)
    max_seq_len: int = option(128, "longest sequence", unit="tokens", at_least=1)


class _Mix(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:  # [B, S, D]
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        if documents is not None:
            before = before * (documents == F.pad(documents, (1, 0), value=-1)[:, :-1])[..., None]
        return self.down(F.gelu(self.up((x + before) / 2)))


class _Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(dim), _Mix(dim)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        return x + self.mix(self.norm(x), documents)


class _Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(number): _Layer(c.dim) for number in range(c.n_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x if self.embed is None else self.embed(x)  # None: another pipeline stage has the module
        for layer in self.layers.values():
            x = layer(x, documents)
        return x if self.output is None else self.output(self.norm(x))


@register
class Shift(Model):
    """Feed-forwards of pairs of positions."""

    name = "shift"
    Config = Config

    def build(self) -> nn.Module:
        """On the meta device: initial values are in the spec."""
        return _Decoder(self.config)

    def spec(self) -> ModelSpec:
        """Sizes, names, initial values; how tensor parallelism splits it; what it costs."""
        c = self.config
        products, table = 8 * c.dim * c.dim, c.vocab_size * c.dim
        hidden = SavedTensor(numel=4 * c.dim, region="tp_sharded")
        return ModelSpec(
            n_layers=c.n_layers,
            dim=c.dim,
            ffn_dim=4 * c.dim,
            n_heads=c.dim,
            n_kv_heads=c.dim,
            head_dim=0,  # no attention: any degree of tp divides the features
            vocab_size=c.vocab_size,
            max_seq_len=c.max_seq_len,
            embeddings=("embed",),
            head=("norm", "output"),
            whole_sequences="each layer looks one position back; set mesh.cp = 1",
            tensor={
                "embed": "embedding",
                "layers.*.norm": "norm",
                "layers.*.mix": "gather",
                "layers.*.mix.up": "column",
                "layers.*.mix.down": "row",
                "norm": "norm",
                "output": "head",
            },
            init={
                "layers.*.norm.weight": ONES,
                "norm.weight": ONES,
                "*.weight": normal(0.02),
                "layers.*.mix.*.weight": normal(0.02),
            },
            layer_params=products + c.dim,
            embedding_params=table,
            head_params=table + c.dim,
            matmul_params_per_layer=products,
            head_matmul_params=table,
            embedding_ops=(EmbeddingOp(module="embed", rows=c.vocab_size, width=c.dim),),
            layer_ops=(
                norm("norm", c.dim),
                linear("mix.up", c.dim, 4 * c.dim, saved=c.dim),
                Elementwise(region="tp_sharded", forward=8 * c.dim, backward=12 * c.dim, saved=(hidden,)),
                linear("mix.down", 4 * c.dim, c.dim, saved=4 * c.dim, region="tp_sharded"),
                residual(c.dim),
            ),
            head_ops=(norm("norm", c.dim), linear("output", c.dim, c.vocab_size, saved=c.dim)),
        )
