"""Qwen3, dense: grouped-query attention with norms of queries and keys, rotary positions, SwiGLU (arXiv 2505.09388).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = w2(silu(w1 x) * w3 x)`. In attention each
head's queries and keys pass through an RMSNorm over their features before they are rotated; all heads share one weight
vector for queries and one for keys. There are no biases. `head_dim` is an option of its own: heads * head_dim need not
be dim. Rotary positions are those of `titan.layers.rotary`.

With dim D, H query heads and K key-value heads of N features, ffn_dim F and sequence length S, a layer costs
2 D (H + K) N + 3 D F + 2 D + 2 N parameters; 2 FLOPs per token forward for each in a matmul, and 4 S H N for attention.
It saves 4 D + 3 H N + 3 K N + 4 F numbers per token for backward if RMSNorm is one kernel (CUDA, compiled).

Limits: a sequence is at most `max_seq_len` long; YaRN, which the published models need beyond 32,768 tokens, is not
implemented, nor are the mixtures of experts of the family.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.spec import nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import Heads
from titan.layers.decoder import DecoderConfig, gated_decoder, gated_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a Qwen3; the defaults are the preset `nano`."""

    head_dim: int | None = option(None, "features per head; unset: dim / n_heads", at_least=1, at_most=2**16)
    ffn_dim: int = option(384, "hidden size of the feed-forward layer", at_least=1, at_most=2**24)
    norm_eps: float = option(1e-6, "added to the mean square in norms, those of queries and keys too", above=0)
    rope_theta: float = option(1e6, "base of the rotary frequencies", above=1)

    @property
    def heads(self) -> Heads:
        """The attention of a layer."""
        return self.heads_with(self.head_dim, norm_eps=self.norm_eps, rotary=True)

    @property
    def rotary(self) -> Rotary:
        """The rotary positions."""
        return Rotary(head_dim=self.heads.head_dim, theta=self.rope_theta)


def _sizes(n_layers: int, dim: int, n_heads: int, ffn_dim: int, tied: bool = False) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "n_kv_heads": 8, "head_dim": 128}
    # 32,768 is the length of the base models; the config.json of the others says 40,960.
    return {**sizes, "ffn_dim": ffn_dim, "vocab_size": 151936, "max_seq_len": 32768, "tied": tied}


@register
class Qwen3(Model):
    """Qwen3, dense: RMSNorm of queries and keys, rotary positions, grouped-query attention, SwiGLU."""

    name = "qwen3"
    Config = Qwen3Config
    config: Qwen3Config
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "0.6b": _sizes(28, 1024, 16, 3072, tied=True),
        "1.7b": _sizes(28, 2048, 16, 6144, tied=True),
        "4b": _sizes(36, 2560, 32, 9728, tied=True),
        "8b": _sizes(36, 4096, 32, 12288),
        "14b": _sizes(40, 5120, 40, 17408),
        "32b": _sizes(64, 5120, 64, 25600),
        "nano": dict(n_layers=4, dim=128, n_heads=4, ffn_dim=384, vocab_size=4097, max_seq_len=128),
        "tiny": dict(
            n_layers=4, dim=64, n_heads=8, n_kv_heads=4, head_dim=16, ffn_dim=128, vocab_size=257, max_seq_len=64
        ),
    }

    def check(self) -> Iterable[str]:
        c = self.config
        if c.head_dim is None and c.dim % (2 * c.n_heads):
            dims = nearest(c.dim, step=2 * c.n_heads)
            yield (
                f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; nearest: dim {dims}, "
                "or set head_dim"
            )
        elif c.heads.head_dim % 2:
            yield f"head_dim {c.head_dim} must be even; nearest: {nearest(c.heads.head_dim, step=2)}"
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        return gated_spec(self.config, self.config.heads, self.config.ffn_dim)

    def build(self) -> nn.Module:
        c = self.config
        return gated_decoder(c, c.heads, c.ffn_dim, c.rotary)

    def hf_config(self) -> Mapping[str, Any]:
        """A Qwen3ForCausalLM. The rotary keys are those that transformers 4 and 5 both read."""
        c = self.config
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.heads.head_dim,
            "initializer_range": c.init_std,
            "rope_theta": c.rope_theta,
            "rope_scaling": None,
            "sliding_window": None,
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        norms = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
        return huggingface.decoder_tensors(self.config.n_layers, huggingface.LAYER | norms, tied=self.config.tied)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if config.get("model_type") != "qwen3":
            return None
        config = huggingface.with_defaults(config, _HF_DEFAULTS)
        theta, _, wrong = huggingface.read_rope(config, {"default": ()})
        issues = [
            *huggingface.size_issues(config, (*huggingface.SIZES, "head_dim")),
            *huggingface.fixed_issues(config, _HF_FIXED),
            *wrong,
        ]
        if issues:
            raise ConfigError(issues)
        return {
            **{ours: config[theirs] for theirs, ours in _HF_KEYS.items()},
            "n_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
            "head_dim": config["head_dim"],
            "rope_theta": theta,
        }


_HF_KEYS = {**huggingface.SIZES, "tie_word_embeddings": "tied", "rms_norm_eps": "norm_eps"}
_HF_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_HF_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
