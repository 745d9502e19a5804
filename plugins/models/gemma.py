"""Gemma 2: soft caps, windows in every other layer, norms before and after each block, scaled embedding (2408.00118).

A layer is `h = x + n2(attn(n1(x)))`, `y = h + n4(ffn(n3(h)))`, with `ffn(x) = w2(gelu(w1 x) * w3 x)` and GELU in its
tanh approximation. Norms are RMSNorms whose factor is `1 + weight`, computed in float32. The embedding is multiplied by
sqrt(dim), rounded to the compute dtype. Scores are scaled by `1 / sqrt(query_scale)` and become
`attention_cap * tanh(score / attention_cap)`; logits x become `logit_cap * tanh(x / logit_cap)`. Layers 0, 2, 4, ...
attend to the last `sliding_window` positions, the others to all. Rotary positions are those of
`titan.layers.rotary`; the head is tied to the embedding.

With dim D, H query heads and K key-value heads of N features, ffn_dim F and sequence length S, a layer costs
2 D (H + K) N + 3 D F + 4 D parameters; 2 FLOPs per token forward for each in a matmul, and for attention 4 H N times S
or the window. It saves 6 D + 3 H N + 3 K N + 4 F numbers per token for backward, and 2 H S for the scores.

Limits: no fused kernel knows soft caps, so attention writes its S x S scores; with `attention_cap = 0` it does not.
Context parallelism by ring or gather has no soft caps: use its method "ulysses". A sequence is at most `max_seq_len`
long. Norms save their inputs in float32.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.cost import Attention, Elementwise, Operation, norm, residual
from titan.contracts.base.spec import ZEROS, nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import Heads, LayerPart, SelfAttention, SwiGLU, swiglu
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Sizes of a Gemma 2; the defaults are the preset `nano`."""

    head_dim: int | None = option(None, "features per head; unset: dim / n_heads", at_least=1, at_most=2**16)
    ffn_dim: int = option(384, "hidden size of the feed-forward layer", at_least=1, at_most=2**24)
    tied: bool = option(True, "tie the output projection to the embedding table")
    norm_eps: float = option(1e-6, "added to the mean square in norms", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=1)
    sliding_window: int = option(
        64,
        "positions that a token attends to in layers 0, 2, 4, ..., its own included",
        unit="tokens",
        at_least=1,
        at_most=2**30,
    )
    query_scale: int | None = option(None, "scores are divided by its square root; unset: head_dim", at_least=1)
    attention_cap: float = option(50.0, "soft cap on the scores of attention; 0: none", at_least=0)
    logit_cap: float = option(30.0, "soft cap on the logits; 0: none", at_least=0)

    @property
    def head_width(self) -> int:
        """Features per head; dim / n_heads unless the TOML sets head_dim."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def heads(self) -> Heads:
        """The attention of a layer without a window."""
        usual = self.query_scale in (None, self.head_width)
        scale = None if usual or self.query_scale is None else 1 / math.sqrt(self.query_scale)
        return self.heads_with(self.head_width, rotary=True, scale=scale, soft_cap=self.attention_cap)

    def heads_of(self, layer: int) -> Heads:
        """The attention of a layer, by its number."""
        return self.heads if layer % 2 else replace(self.heads, window=self.sliding_window)


class Norm(nn.Module):
    """RMSNorm with the factor `1 + weight`, in float32, [B, S, D] to [B, S, D]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D] in x's dtype."""
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).type_as(x)


class GeGLU(SwiGLU):
    """The gated feed-forward w2(gelu(w1 x) * w3 x), [B, S, D] to [B, S, D] (arXiv 2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer with norms before and after attention and feed-forward."""

    def __init__(self, config: GemmaConfig, number: int) -> None:
        super().__init__()
        made = partial(Norm, config.dim, config.norm_eps)
        self.attn_norm, self.attn, self.attn_out_norm = made(), SelfAttention(config.heads_of(number)), made()
        self.ffn_norm, self.ffn, self.ffn_out_norm = made(), GeGLU(config.dim, config.ffn_dim), made()

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, rope: Tensor | None = None) -> Tensor:
        """x [B, S, D]; the others as `SelfAttention.forward` takes them. Returns [B, S, D]."""
        h = x + self.attn_out_norm(self.attn(self.attn_norm(x), positions, documents, rope))
        return h + self.ffn_out_norm(self.ffn(self.ffn_norm(h)))  # type: ignore[no-any-return]


def _wide(op: Elementwise) -> Elementwise:
    """A norm that saves its input in float32."""
    return replace(op, saved=(replace(op.saved[0], itemsize=4), *op.saved[1:]))


_NORMS = ("attn_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm")


def _layer(config: GemmaConfig) -> LayerPart:
    """The mean `Layer` as data: of n layers, (n + 1) // 2 have a window."""
    c, ffn = config, swiglu(config.dim, config.ffn_dim)
    attn, windowed = c.heads.part(), (c.n_layers + 1) // 2 / c.n_layers

    def both(op: Operation) -> Iterable[Operation]:
        if not isinstance(op, Attention):
            return (op,)
        every = replace(op, of_layers=1 - windowed)
        return replace(op, window=c.sliding_window, of_layers=windowed), *((every,) if windowed < 1 else ())

    first, after, second, last = (_wide(norm(name, c.dim)) for name in _NORMS)
    operations = (
        first,
        *(one for op in attn.operations for one in both(op)),
        after,
        residual(c.dim),
        second,
        *ffn.operations,
        last,
        residual(c.dim),
    )
    return LayerPart(operations, {**dict.fromkeys(_NORMS, "norm"), **attn.tensor, **ffn.tensor})


def _sizes(n_layers: int, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, ffn_dim: int) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    return {**sizes, "ffn_dim": ffn_dim, "vocab_size": 256000, "max_seq_len": 8192, "sliding_window": 4096}


@register
class Gemma(Model):
    """Gemma 2: soft caps, alternating windows, RMSNorm before and after blocks, GeGLU, scaled and tied embedding."""

    name = "gemma"
    Config = GemmaConfig
    config: GemmaConfig
    # Table 1 of arXiv 2408.00118, where ffn_dim counts both halves of the gate.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma-2-2b": _sizes(26, 2304, 8, 4, 256, 9216),
        "gemma-2-9b": _sizes(42, 3584, 16, 8, 256, 14336),
        "gemma-2-27b": {**_sizes(46, 4608, 32, 16, 128, 36864), "query_scale": 144},
        "nano": dict(n_layers=4, dim=128, n_heads=4, ffn_dim=384, vocab_size=4097, max_seq_len=128),
        "tiny": dict(
            n_layers=4,
            dim=64,
            n_heads=8,
            n_kv_heads=4,
            head_dim=16,
            ffn_dim=128,
            vocab_size=257,
            max_seq_len=64,
            sliding_window=16,
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
        elif c.head_width % 2:
            yield f"head_dim {c.head_width} must be even; nearest: {nearest(c.head_width, step=2)}"
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        """Sizes, names and costs of this Gemma 2; factors of norms are 1 + weight, so these start at 0."""
        c = self.config
        spec = decoder_spec(c, _layer(c), ffn_dim=c.ffn_dim, vectors=1, embed_scale=True, logit_cap=c.logit_cap > 0)
        norms = ("norm", *(f"layers.*.{name}" for name in _NORMS))
        init = {**spec.init, **{f"{name}.weight": ZEROS for name in norms}}
        return replace(spec, init=init, head_ops=(_wide(norm("norm", c.dim)), *spec.head_ops[1:]))

    def build(self) -> nn.Module:
        c = self.config
        return Decoder(
            c,
            (Layer(c, number) for number in range(c.n_layers)),
            Norm(c.dim, c.norm_eps),
            rotary=Rotary(head_dim=c.head_width, theta=c.rope_theta),
            embed_scale=math.sqrt(c.dim),
            logit_cap=c.logit_cap,
        )

    def hf_config(self) -> Mapping[str, Any]:
        """A Gemma2ForCausalLM. The rotary keys are those that transformers 4 and 5 both read."""
        c = self.config
        return {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_width,
            "initializer_range": c.init_std,
            "rope_theta": c.rope_theta,
            "query_pre_attn_scalar": c.query_scale or c.head_width,
            "attn_logit_softcapping": c.attention_cap or None,
            "final_logit_softcapping": c.logit_cap or None,
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        return huggingface.decoder_tensors(self.config.n_layers, huggingface.LAYER | _HF_NORMS, tied=self.config.tied)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if config.get("model_type") != "gemma2":
            return None
        config = huggingface.with_defaults(config, _HF_DEFAULTS)
        theta, _, wrong = huggingface.read_rope(config, {"default": ()})
        sizes = (*huggingface.SIZES, "num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar")
        issues = [*huggingface.size_issues(config, sizes), *wrong]
        issues += huggingface.fixed_issues(config, _HF_FIXED, _KINDS)
        if not issues and config.get("layer_types") not in (None, _kinds(config["num_hidden_layers"])):
            issues.append(huggingface.issue(f"layer_types: this model has {' and '.join(_KINDS)} in turn"))
        if issues:
            raise ConfigError(issues)
        scale = config["query_pre_attn_scalar"]
        return {
            **{ours: config[theirs] for theirs, ours in _HF_KEYS.items()},
            "n_kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "rope_theta": theta,
            "query_scale": None if scale == config["head_dim"] else scale,
            "attention_cap": config["attn_logit_softcapping"] or 0.0,
            "logit_cap": config["final_logit_softcapping"] or 0.0,
        }


def _kinds(n_layers: int) -> list[str]:
    return [_KINDS[number % 2] for number in range(n_layers)]


_KINDS = ("sliding_attention", "full_attention")
_HF_KEYS = {
    **huggingface.SIZES,
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "sliding_window",
}
_HF_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_HF_FIXED: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "attention_dropout": 0.0,
}
_HF_NORMS = {
    "post_attention_layernorm": "attn_out_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_out_norm",
}
