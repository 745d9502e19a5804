"""A decoder whose feed-forward squares its ReLU: ffn(x) = down(relu(up x) ** 2) (arXiv 2109.08668).

The feed-forward is its own; attention, norms, embeddings and head are those that models share.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from titan.contracts import Model, ModelSpec, option, register
from titan.contracts.base.cost import Elementwise, SavedTensor, linear
from titan.layers.blocks import Heads, LayerPart, PreNormLayer, SelfAttention, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """n_layers, dim, n_heads, n_kv_heads, vocab_size, max_seq_len, tied, norm_eps, and:"""

    ffn_dim: int = option(512, "hidden size of the feed-forward layer", at_least=1)

    @property
    def heads(self) -> Heads:
        """Sizes of attention."""
        size = self.dim // self.n_heads
        return Heads(dim=self.dim, n_heads=self.n_heads, n_kv_heads=self.kv_heads, head_dim=size, rotary=True)


class FeedForward(nn.Module):
    """ffn(x) = down(relu(up x) ** 2)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, S, D], before and after."""
        out: Tensor = self.down(self.up(x).relu().square())
        return out


def feed_forward(dim: int, ffn_dim: int) -> LayerPart:
    """The same as data: what it computes and saves, and how tensor parallelism splits it."""
    relu = SavedTensor(numel=ffn_dim, region="tp_sharded")
    operations = (
        linear("ffn.up", dim, ffn_dim, saved=dim),
        Elementwise(region="tp_sharded", forward=4 * ffn_dim, backward=6 * ffn_dim, saved=(relu,)),
        linear("ffn.down", ffn_dim, dim, saved=ffn_dim, region="tp_sharded"),
    )
    return LayerPart(operations, {"ffn": "gather", "ffn.up": "column", "ffn.down": "row"})


@register
class Example(Model):
    """Pre-norm decoder with a squared ReLU."""

    name = "example"
    Config = Config

    def check(self) -> Iterable[str]:
        """What the spec and the module rely on."""
        c = self.config
        yield from c.grouping()
        if c.dim % (2 * c.n_heads):
            yield f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; change one of them"

    def build(self) -> nn.Module:
        """On the meta device: initial values are in the spec."""
        c = self.config
        norm = partial(nn.RMSNorm, c.dim, eps=c.norm_eps)
        layers = [
            PreNormLayer(norm(), SelfAttention(c.heads), norm(), FeedForward(c.dim, c.ffn_dim))
            for _ in range(c.n_layers)
        ]
        return Decoder(c, layers, norm(), rotary=Rotary(head_dim=c.heads.head_dim, theta=10000.0))

    def spec(self) -> ModelSpec:
        """Everything else that titan knows of the model."""
        c = self.config
        layer = pre_norm(c.dim, c.heads.part(), feed_forward(c.dim, c.ffn_dim), vectors=1)
        return decoder_spec(c, layer, ffn_dim=c.ffn_dim, vectors=1)
