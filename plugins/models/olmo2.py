"""OLMo 2: norms after attention and feed-forward, norms over all heads of queries and keys (arXiv 2501.00656).

A layer is `h = x + norm(attn(x))`, `y = h + norm(ffn(h))`, with `ffn(x) = w2(silu(w1 x) * w3 x)`: hidden states enter
attention and feed-forward without a norm. In attention, the queries of all heads together pass through one RMSNorm over
H N features before they are rotated, and the keys through another over K N. There are no biases. Rotary positions are
those of `titan.layers.rotary`.

With dim D, H query heads and K key-value heads of N features, ffn_dim F and sequence length S, a layer costs
2 D (H + K) N + 3 D F + 2 D + (H + K) N parameters; 2 FLOPs per token forward for each in a matmul, and 4 S H N for
attention. It saves 4 D + 3 H N + 3 K N + 4 F numbers per token for backward if RMSNorm is one kernel (CUDA, compiled).
Under tensor parallelism the ranks sum the squares of queries and keys: one number each per token, both ways.

Limits: a sequence is at most `max_seq_len` long; the scaled rotary positions of longer variants are not implemented.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.cost import norm, residual
from titan.contracts.base.spec import nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import Heads, LayerPart, SelfAttention, SwiGLU, swiglu
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """Sizes of an OLMo 2; the defaults are the preset `nano`."""

    ffn_dim: int = option(384, "hidden size of the feed-forward layer", at_least=1, at_most=2**24)
    norm_eps: float = option(1e-6, "added to the mean square in norms, those of queries and keys too", above=0)
    rope_theta: float = option(500000.0, "base of the rotary frequencies", above=1)

    @property
    def heads(self) -> Heads:
        """The attention of a layer; a head has dim / n_heads features."""
        return self.heads_with(norm_eps=self.norm_eps, wide_norm=True, rotary=True)

    @property
    def rotary(self) -> Rotary:
        """The rotary positions."""
        return Rotary(head_dim=self.heads.head_dim, theta=self.rope_theta)


def _sizes(n_layers: int, dim: int, n_heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "ffn_dim": ffn_dim}
    return {**sizes, "vocab_size": 100352, "max_seq_len": 4096, **more}


class PostNormLayer(nn.Module):
    """A layer `h = x + attn_norm(attn(x))`, `y = h + ffn_norm(ffn(h))`."""

    def __init__(self, attn: nn.Module, attn_norm: nn.Module, ffn: nn.Module, ffn_norm: nn.Module) -> None:
        super().__init__()
        self.attn, self.attn_norm, self.ffn, self.ffn_norm = attn, attn_norm, ffn, ffn_norm

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, rope: Tensor | None = None) -> Tensor:
        """x [B, S, D]; the others as `SelfAttention.forward` takes them. Returns [B, S, D]."""
        h = x + self.attn_norm(self.attn(x, positions, documents, rope))
        return h + self.ffn_norm(self.ffn(h))  # type: ignore[no-any-return]


def _post_norm(dim: int, attn: LayerPart, ffn: LayerPart) -> LayerPart:
    """`PostNormLayer` as data."""
    operations = (
        *attn.operations,
        norm("attn_norm", dim),
        residual(dim),
        *ffn.operations,
        norm("ffn_norm", dim),
        residual(dim),
    )
    return LayerPart(operations, {"attn_norm": "norm", "ffn_norm": "norm", **attn.tensor, **ffn.tensor})


@register
class Olmo2(Model):
    """OLMo 2: norms after attention and feed-forward and of queries and keys, rotary positions, SwiGLU."""

    name = "olmo2"
    Config = Olmo2Config
    config: Olmo2Config
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "olmo2-1b": _sizes(16, 2048, 16, 8192),
        "olmo2-7b": _sizes(32, 4096, 32, 11008),
        "olmo2-13b": _sizes(40, 5120, 40, 13824),
        "olmo2-32b": _sizes(64, 5120, 40, 27648, n_kv_heads=8),
        "nano": dict(n_layers=4, dim=128, n_heads=4, ffn_dim=384, vocab_size=4097, max_seq_len=128),
        "tiny": dict(n_layers=4, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=257, max_seq_len=64),
    }

    def check(self) -> Iterable[str]:
        c = self.config
        if c.dim % (2 * c.n_heads):
            heads = nearest(c.n_heads, lambda h: c.dim % (2 * h) == 0, most=c.dim // 2)
            dims = nearest(c.dim, step=2 * c.n_heads)
            fits = f"n_heads {heads}, or dim {dims}" if heads else f"dim {dims}"
            yield f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; nearest: {fits}"
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        c = self.config
        layer = _post_norm(c.dim, c.heads.part(), swiglu(c.dim, c.ffn_dim))
        return decoder_spec(c, layer, ffn_dim=c.ffn_dim, vectors=1)

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.RMSNorm, c.dim, eps=c.norm_eps)
        layers = (
            PostNormLayer(SelfAttention(c.heads), norm(), SwiGLU(c.dim, c.ffn_dim), norm()) for _ in range(c.n_layers)
        )
        return Decoder(c, layers, norm(), rotary=c.rotary)

    def hf_config(self) -> Mapping[str, Any]:
        """An Olmo2ForCausalLM. The rotary keys are those that transformers 4 and 5 both read."""
        c = self.config
        return {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "num_key_value_heads": c.kv_heads,
            "initializer_range": c.init_std,
            "rope_theta": c.rope_theta,
            "rope_scaling": None,
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        return huggingface.decoder_tensors(self.config.n_layers, _HF_LAYER, tied=self.config.tied)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if config.get("model_type") != "olmo2":
            return None
        config = huggingface.with_defaults(config, _HF_DEFAULTS)
        issues = huggingface.size_issues(config, huggingface.SIZES) or huggingface.head_issues(config)
        theta, _, wrong = huggingface.read_rope(config, {"default": ()})
        issues += [*huggingface.fixed_issues(config, _HF_FIXED), *wrong]
        if issues:
            raise ConfigError(issues)
        return {
            **{ours: config[theirs] for theirs, ours in _HF_KEYS.items()},
            "n_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
            "rope_theta": theta,
        }


_HF_KEYS = {**huggingface.SIZES, "tie_word_embeddings": "tied", "rms_norm_eps": "norm_eps"}
_HF_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "intermediate_size": 11008,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_HF_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False}
_HF_LAYER = {theirs: ours for theirs, ours in huggingface.LAYER.items() if not theirs.endswith("layernorm")} | {
    "post_attention_layernorm": "attn_norm",
    "post_feedforward_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
}
