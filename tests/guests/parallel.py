"""A model from outside, made of shared layers: attention and feed-forward beside each other, behind one norm (GPT-J).

A layer is `y = x + attn(norm(x)) + ffn(norm(x))`, with biases and norms of heads in attention, heads whose features do
not add up to the width, and a window in attention.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from titan.contracts import Model, ModelSpec, option, register
from titan.contracts.base.cost import norm, residual
from titan.layers.blocks import Heads, LayerPart, SelfAttention, SwiGLU, swiglu
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Sizes; the width of the feed-forward is that of the heads."""

    head_dim: int = option(12, "features per head", at_least=2)
    window: int = option(6, "positions that a token attends to", at_least=1)

    @property
    def heads(self) -> Heads:
        return self.heads_with(self.head_dim, bias=True, rotary=True, norm_eps=self.norm_eps, window=self.window)


class Layer(nn.Module):
    """Both halves of a layer read the same norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.both_norm = nn.LayerNorm(c.dim)
        self.attn, self.ffn = SelfAttention(c.heads), SwiGLU(c.dim, c.n_heads * c.head_dim)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, rope: Tensor | None) -> Tensor:
        normed = self.both_norm(x)
        return x + self.attn(normed, positions, documents, rope) + self.ffn(normed)


@register
class Parallel(Model):
    """Attention and feed-forward beside each other."""

    name = "parallel"
    Config = Config
    config: Config

    def build(self) -> nn.Module:
        c = self.config
        rotary = Rotary(head_dim=c.head_dim, theta=1000.0)
        return Decoder(c, (Layer(c) for _ in range(c.n_layers)), nn.LayerNorm(c.dim), rotary=rotary)

    def spec(self) -> ModelSpec:
        c = self.config
        attn, ffn = c.heads.part(), swiglu(c.dim, c.n_heads * c.head_dim)
        added = 2 * (residual(c.dim),)
        operations = (norm("both_norm", c.dim, 2, 2), *attn.operations, *ffn.operations, *added)
        layer = LayerPart(operations, {"both_norm": "norm", **attn.tensor, **ffn.tensor})
        return decoder_spec(c, layer, ffn_dim=c.n_heads * c.head_dim, vectors=2)
