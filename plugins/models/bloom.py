"""BLOOM: ALiBi, LayerNorm, also after the embedding, GELU, biases, tied head (arXiv 2211.05100).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = down(gelu(up x))` and GELU in its tanh
approximation. The embedding passes through a LayerNorm before the first layer. There are no positions but those of
ALiBi (arXiv 2108.12409): head i adds `-m_i * (query position - key position)` to its scores, with
`m_i = 2 ** (-8 i / H)`, i from 1 to H, where H is a power of two. Otherwise, with P the largest power of two below H,
the first P slopes are those of P heads, and the others every second of those of 2 P heads, from the first on. There is
no dropout.

With dim D, H heads of N features, ffn_dim F = 4 D and sequence length S, a layer costs 12 D^2 + 13 D parameters;
2 FLOPs per token forward for each in a matmul, and 4 S H N for attention. It saves 4 D + 4 H N + 2 F numbers per token
for backward.

Limits: ALiBi needs a mask of H S^2 numbers in the compute dtype, one for all layers of a rank; with packed documents
one of B H S^2. No fused kernel skips its masked positions. transformers has no grouped heads for this architecture, nor
another ffn_dim than 4 dim, so such models are not exported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.spec import nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import FeedForward, Heads, PreNormLayer, SelfAttention, feed_forward, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec


@dataclass(frozen=True, kw_only=True)
class BloomConfig(DecoderConfig):
    """Sizes of a BLOOM; the defaults are the preset `nano`."""

    ffn_dim: int | None = option(None, "hidden size of the feed-forward layer; unset: 4 dim", at_least=1, at_most=2**24)
    tied: bool = option(True, "tie the output projection to the embedding table")

    @property
    def ffn_width(self) -> int:
        """Hidden size of the feed-forward layer; 4 dim unless the TOML sets ffn_dim."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def heads(self) -> Heads:
        """The attention of a layer; a head has dim / n_heads features."""
        return self.heads_with(bias=True, slopes=slopes(self.n_heads))


def slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi for a number of heads, as its authors published them."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return (*first, *between)


def _sizes(n_layers: int, dim: int, n_heads: int) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads}
    return {**sizes, "vocab_size": 250880, "max_seq_len": 2048}


@register
class Bloom(Model):
    """BLOOM: ALiBi, LayerNorm after the embedding and in layers, GELU, biases, tied head."""

    name = "bloom"
    Config = BloomConfig
    config: BloomConfig
    # Table 3 of arXiv 2211.05100. Of the vocabulary's 250,880 rows 200 are padding.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "bloom-560m": _sizes(24, 1024, 16),
        "bloom-1b1": _sizes(24, 1536, 16),
        "bloom-1b7": _sizes(24, 2048, 16),
        "bloom-3b": _sizes(30, 2560, 32),
        "bloom-7b1": _sizes(30, 4096, 32),
        "bloom-176b": _sizes(70, 14336, 112),
        "nano": {"n_layers": 4, "dim": 128, "n_heads": 4, "vocab_size": 4097, "max_seq_len": 128},
        "tiny": {"n_layers": 4, "dim": 64, "n_heads": 8, "vocab_size": 257, "max_seq_len": 64},
    }

    def check(self) -> Iterable[str]:
        c = self.config
        if c.dim % c.n_heads:
            heads = nearest(c.n_heads, lambda h: c.dim % h == 0, most=c.dim)
            dims = nearest(c.dim, step=c.n_heads)
            yield f"dim {c.dim} must be divisible by n_heads {c.n_heads}; nearest: n_heads {heads}, or dim {dims}"
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        c = self.config
        layer = pre_norm(c.dim, c.heads.part(), feed_forward(c.dim, c.ffn_width), vectors=2)
        return decoder_spec(c, layer, ffn_dim=c.ffn_width, vectors=2, embed_norm=True)

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.LayerNorm, c.dim, eps=c.norm_eps)
        layers = (
            PreNormLayer(norm(), SelfAttention(c.heads), norm(), FeedForward(c.dim, c.ffn_width, approximate="tanh"))
            for _ in range(c.n_layers)
        )
        return Decoder(c, layers, norm(), embed_norm=norm())

    def hf_config(self) -> Mapping[str, Any] | None:
        """A BloomForCausalLM, which knows no grouped heads and no other feed-forward width than 4 dim."""
        c = self.config
        if c.kv_heads != c.n_heads or c.ffn_width != 4 * c.dim:
            return None
        return {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "initializer_range": c.init_std,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of a BloomForCausalLM, whose queries, keys and values are interleaved by head."""
        c = self.config
        layers = huggingface.biased_tensors("transformer.h", c.n_layers, _HF_LAYER, groups=c.n_heads)
        norms = [
            HfTensor(f"transformer.{theirs}.{kind}", (f"{ours}.{kind}",))
            for theirs, ours in {"word_embeddings_layernorm": "embed_norm", "ln_f": "norm"}.items()
            for kind in ("weight", "bias")
        ]
        head = ("embed.weight",) if c.tied else ("output.weight",)
        return [
            HfTensor("transformer.word_embeddings.weight", ("embed.weight",)),
            *layers,
            *norms,
            HfTensor("lm_head.weight", head, copy=c.tied),
        ]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sizes of a BloomForCausalLM, whose defaults stand for what config.json leaves out; dropout is left out.

        Published files name sizes `n_embed` and `num_attention_heads`; transformers reads these too.
        """
        if config.get("model_type") != "bloom":
            return None
        also = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
        config = huggingface.with_defaults(config, _HF_DEFAULTS, **also)
        issues = [*huggingface.size_issues(config, _HF_SIZES), *huggingface.fixed_issues(config, _HF_FIXED)]
        if issues:
            raise ConfigError(issues)
        return {ours: config[theirs] for theirs, ours in _HF_KEYS.items()}


_HF_SIZES = {
    "n_layer": "n_layers",
    "hidden_size": "dim",
    "n_head": "n_heads",
    "vocab_size": "vocab_size",
    "seq_length": "max_seq_len",
}
_HF_KEYS = _HF_SIZES | {"tie_word_embeddings": "tied", "layer_norm_epsilon": "norm_eps"}
_HF_DEFAULTS: Mapping[str, Any] = {
    "n_layer": 2,
    "hidden_size": 64,
    "n_head": 8,
    "vocab_size": 250880,
    "seq_length": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_HF_FIXED: Mapping[str, Any] = {"apply_residual_connection_post_layernorm": False}
_HF_LAYER = {
    "input_layernorm": ("attn_norm",),
    "self_attention.query_key_value": ("attn.wq", "attn.wk", "attn.wv"),
    "self_attention.dense": ("attn.wo",),
    "post_attention_layernorm": ("ffn_norm",),
    "mlp.dense_h_to_4h": ("ffn.up",),
    "mlp.dense_4h_to_h": ("ffn.down",),
}
