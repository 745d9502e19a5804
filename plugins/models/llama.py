"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases (arXiv 2302.13971, 2407.21783).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = w2(silu(w1 x) * w3 x)`.

Rotary positions are those of `titan.layers.rotary`. `rope_scaling_factor` above 1 scales the low frequencies
as Llama 3.1 does. With `sliding_window` W, a token attends to the W positions that end with its own, as in Mistral 7B
(arXiv 2310.06825). Llama's config.json has no window: a windowed model is a MistralForCausalLM of transformers, which
is the same function, and one without a window is a LlamaForCausalLM.

With dim D, H query heads and K key-value heads of N features, ffn_dim F, sequence length S and batch B, a layer costs
2 D^2 + 2 D K N + 3 D F + 2 D parameters; 2 FLOPs per token forward for each in a matmul, and 4 S H N for attention. It
saves 4 D + 2 H N + 2 K N + 4 F numbers per token for backward if RMSNorm is one kernel (CUDA, compiled); the eager
RMSNorm of a CPU saves 2 D more in float32, 6 D more in bfloat16. The rotary table is N B S floats per forward.

Limits: a sequence is at most `max_seq_len` long. A run from random weights whose window is longer than its sequences is
refused: it would train a model without one. Document masking costs a mask of B S^2 numbers, a window one
of S^2, and both repeat grouped K and V for every query head. CUDA has no fused kernel for grouped heads in float32.
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
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama; the defaults are the preset `nano`."""

    ffn_dim: int = option(384, "hidden size of the feed-forward layer", at_least=1, at_most=2**24)
    sliding_window: int | None = option(
        None, "positions that a token attends to, its own included; unset: all before it", unit="tokens", at_least=1
    )
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=1)
    rope_scaling_factor: float = option(1.0, "factor that divides low rotary frequencies; 1: no scaling", at_least=1)
    rope_scaling_low: float = option(
        1.0, "low frequencies: fewer turns than this within rope_scaling_original_max", above=0
    )
    rope_scaling_high: float = option(
        4.0, "high frequencies, unscaled: more turns than this; interpolated in between", above=0
    )
    rope_scaling_original_max: int = option(
        8192, "longest sequence that the unscaled model was trained on", unit="tokens", at_least=1, at_most=2**30
    )

    @property
    def heads(self) -> Heads:
        """The attention of a layer; a head has dim / n_heads features."""
        return self.heads_with(rotary=True, window=self.sliding_window or 0)

    @property
    def rotary(self) -> Rotary:
        """The rotary positions, scaled or not."""
        return Rotary(
            head_dim=self.heads.head_dim,
            theta=self.rope_theta,
            scaling_factor=self.rope_scaling_factor,
            scaling_low=self.rope_scaling_low,
            scaling_high=self.rope_scaling_high,
            scaling_original_max=self.rope_scaling_original_max,
        )


def _sizes(n_layers: int, dim: int, n_heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    return {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "ffn_dim": ffn_dim, **more}


_LLAMA1 = {"vocab_size": 32000, "max_seq_len": 2048, "norm_eps": 1e-6}
# 8,192 is the length of most of Llama 3.1's pretraining; its scaled frequencies serve a max_seq_len of up to 131,072.
_LLAMA3 = {
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "max_seq_len": 8192,
    "rope_theta": 500000.0,
    "rope_scaling_factor": 8.0,
}


@register
class Llama(Model):
    """Llama 1 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    name = "llama"
    Config = LlamaConfig
    config: LlamaConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "7b": _sizes(32, 4096, 32, 11008, **_LLAMA1),
        "13b": _sizes(40, 5120, 40, 13824, **_LLAMA1),
        "33b": _sizes(60, 6656, 52, 17920, **_LLAMA1),
        "65b": _sizes(80, 8192, 64, 22016, **(_LLAMA1 | {"norm_eps": 1e-5})),
        "llama3-1b": _sizes(16, 2048, 32, 8192, **(_LLAMA3 | {"tied": True, "rope_scaling_factor": 32.0})),
        "llama3-3b": _sizes(28, 3072, 24, 8192, **(_LLAMA3 | {"tied": True, "rope_scaling_factor": 32.0})),
        "llama3-8b": _sizes(32, 4096, 32, 14336, **_LLAMA3),
        "llama3-70b": _sizes(80, 8192, 64, 28672, **_LLAMA3),
        "llama3-405b": _sizes(126, 16384, 128, 53248, **_LLAMA3),
        "mistral-7b": _sizes(
            32, 4096, 32, 14336, n_kv_heads=8, vocab_size=32000, max_seq_len=32768, sliding_window=4096
        ),
        "nano": _sizes(4, 128, 4, 384, vocab_size=4097, max_seq_len=128),
        "tiny": _sizes(4, 64, 8, 128, n_kv_heads=4, vocab_size=257, max_seq_len=64),
        "mini": _sizes(8, 256, 8, 768, vocab_size=2048, max_seq_len=512),
    }

    def check(self) -> Iterable[str]:
        c = self.config
        if c.dim % (2 * c.n_heads):
            heads = nearest(c.n_heads, lambda h: c.dim % (2 * h) == 0, most=c.dim // 2)
            dims = nearest(c.dim, step=2 * c.n_heads)
            fits = f"n_heads {heads}, or dim {dims}" if heads else f"dim {dims}"
            yield f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; nearest: {fits}"
        yield from c.grouping()
        if c.rope_scaling_low >= c.rope_scaling_high:
            yield f"rope_scaling_low {c.rope_scaling_low:g} must be below rope_scaling_high {c.rope_scaling_high:g}"
        if c.sliding_window is not None and c.sliding_window > c.max_seq_len:
            most = f"set it to at most {c.max_seq_len}, or leave it out"
            yield f"sliding_window {c.sliding_window} is longer than max_seq_len {c.max_seq_len}; {most}"

    def spec(self) -> ModelSpec:
        return gated_spec(self.config, self.config.heads, self.config.ffn_dim)

    def build(self) -> nn.Module:
        c = self.config
        return gated_decoder(c, c.heads, c.ffn_dim, c.rotary)

    hf_ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

    def hf_config(self) -> Mapping[str, Any]:
        """A LlamaForCausalLM, with a window a MistralForCausalLM; its rotary keys are read by transformers 4 and 5."""
        c = self.config
        kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_HF_FIXED}
        if c.sliding_window is not None:
            kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
            kind["sliding_window"] = c.sliding_window
        scaling = {
            "rope_type": "llama3",
            "factor": c.rope_scaling_factor,
            "low_freq_factor": c.rope_scaling_low,
            "high_freq_factor": c.rope_scaling_high,
            "original_max_position_embeddings": c.rope_scaling_original_max,
        }
        return {
            **kind,
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.heads.head_dim,
            "initializer_range": c.init_std,
            "rope_theta": c.rope_theta,
            "rope_scaling": None if c.rope_scaling_factor == 1 else scaling,
        }

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of both; their rotary features fall into halves as ours do, so nothing is permuted."""
        return huggingface.decoder_tensors(self.config.n_layers, huggingface.LAYER, tied=self.config.tied)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sizes of a LlamaForCausalLM or MistralForCausalLM of transformers 4 or 5.

        The defaults of transformers stand for what config.json leaves out. A window that no sequence fills is none.
        """
        if config.get("model_type") == "mistral":
            config = huggingface.with_defaults(config, _HF_DEFAULTS | _HF_MISTRAL)
        elif config.get("model_type") == "llama":
            # a window is a key that it may have, but that LlamaForCausalLM ignores
            config = {**huggingface.with_defaults(config, _HF_DEFAULTS), "sliding_window": None}
        else:
            return None
        window = ["sliding_window"] if config["sliding_window"] is not None else []
        issues = huggingface.size_issues(config, [*huggingface.SIZES, *window]) or huggingface.head_issues(config)
        theta, scaling, wrong = huggingface.read_rope(config, {"default": (), "llama3": tuple(_HF_SCALING)})
        layers = "sliding_attention" if window else "full_attention"
        issues += [*huggingface.fixed_issues(config, _HF_FIXED, (layers,)), *wrong]
        if issues:
            raise ConfigError(issues)
        values = {ours: config[theirs] for theirs, ours in _HF_KEYS.items()}
        values |= {key: config[key] for key in window if config[key] < config["max_position_embeddings"]}
        values |= {ours: scaling[theirs] for theirs, ours in _HF_SCALING.items() if scaling}
        if scaling:
            key = "original_max_position_embeddings"
            values["rope_scaling_original_max"] = {key: config["max_position_embeddings"], **scaling, **config}[key]
        return values | {
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
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_HF_MISTRAL: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_HF_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_HF_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low",
    "high_freq_factor": "rope_scaling_high",
}
