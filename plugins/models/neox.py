"""GPT-NeoX and Pythia: attention and feed-forward in parallel, partial rotary positions (arXiv 2204.06745, 2304.01373).

A layer is `y = x + attn(norm(x)) + ffn(norm'(x))` with two LayerNorms of the same input. The feed-forward is
`ffn(x) = down(gelu(up x))` with GELU itself as in Pythia, or as in NeoX-20B its tanh approximation
(`gelu_approximate`). Without `parallel_residual` the feed-forward follows attention, as in GPT-2. Linears have biases,
but for the head. Of each head's N features the first `rotary_pct` N are rotated (`titan.layers.rotary`).
There is no dropout.

With dim D, H heads of N features, ffn_dim F = 4 D and sequence length S, a layer costs 12 D^2 + 13 D parameters;
2 FLOPs per token forward for each in a matmul, and 4 S H N for attention. It saves 3 D + 4 H N + 2 F numbers per token
for backward: both norms read one tensor. Tensor parallelism sums each branch over ranks on its own.

Limits: a sequence is at most `max_seq_len` long. Document masking costs a mask of B S^2 numbers. transformers has
no grouped heads for this architecture, so a model with `n_kv_heads` is not exported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.cost import norm, residual
from titan.contracts.base.spec import nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import FeedForward, Heads, LayerPart, PreNormLayer, SelfAttention, feed_forward, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class NeoxConfig(DecoderConfig):
    """Sizes of a GPT-NeoX; the defaults are the preset `nano`."""

    ffn_dim: int | None = option(None, "hidden size of the feed-forward layer; unset: 4 dim", at_least=1, at_most=2**24)
    parallel_residual: bool = option(True, "attention and feed-forward read the same hidden states; else in turn")
    rotary_pct: float = option(0.25, "share of each head's features that are rotated, the first", above=0, at_most=1)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=1)
    gelu_approximate: Literal["none", "tanh"] = option("none", "approximation of GELU; NeoX-20B has tanh, Pythia none")

    @property
    def ffn_width(self) -> int:
        """Hidden size of the feed-forward layer; 4 dim unless the TOML sets ffn_dim."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def heads(self) -> Heads:
        """The attention of a layer; a head has dim / n_heads features."""
        return self.heads_with(bias=True, rotary=True, rotary_share=self.rotary_pct)

    @property
    def rotary(self) -> Rotary:
        """The rotary positions of the first features of a head."""
        n = self.heads.head_dim
        return Rotary(head_dim=n, theta=self.rope_theta, features=int(n * self.rotary_pct))


def _sizes(n_layers: int, dim: int, n_heads: int, vocab_size: int = 50304) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads}
    return {**sizes, "vocab_size": vocab_size, "max_seq_len": 2048}


class ParallelLayer(nn.Module):
    """A layer `y = x + attn(attn_norm(x)) + ffn(ffn_norm(x))`."""

    def __init__(self, attn_norm: nn.Module, attn: nn.Module, ffn_norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.ffn_norm, self.ffn = attn_norm, attn, ffn_norm, ffn

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, rope: Tensor | None = None) -> Tensor:
        """x [B, S, D]; the others as `SelfAttention.forward` takes them. Returns [B, S, D]."""
        return x + self.attn(self.attn_norm(x), positions, documents, rope) + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


def _parallel(dim: int, attn: LayerPart, ffn: LayerPart) -> LayerPart:
    """`ParallelLayer` as data. Both norms save the same input, which is stated at the first."""
    first, second = norm("attn_norm", dim, 2, 2), norm("ffn_norm", dim, 2, 2)
    second = replace(second, saved=second.saved[1:])
    operations = (first, *attn.operations, second, *ffn.operations, residual(dim), residual(dim))
    return LayerPart(operations, {"attn_norm": "norm", "ffn_norm": "norm", **attn.tensor, **ffn.tensor})


@register
class Neox(Model):
    """GPT-NeoX and Pythia: parallel attention and feed-forward, LayerNorm, biases, partial rotary positions."""

    name = "neox"
    Config = NeoxConfig
    config: NeoxConfig
    # The vocabularies are padded as the published weights are: to a multiple of 128 times the tensor parallelism.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "pythia-70m": _sizes(6, 512, 8),
        "pythia-160m": _sizes(12, 768, 12),
        "pythia-410m": _sizes(24, 1024, 16),
        "pythia-1b": _sizes(16, 2048, 8),
        "pythia-1.4b": _sizes(24, 2048, 16),
        "pythia-2.8b": _sizes(32, 2560, 32),
        "pythia-6.9b": _sizes(32, 4096, 32, 50432),
        "pythia-12b": _sizes(36, 5120, 40, 50688),
        "neox-20b": {**_sizes(44, 6144, 64, 50432), "gelu_approximate": "tanh"},
        "nano": {"n_layers": 4, "dim": 128, "n_heads": 4, "vocab_size": 4097, "max_seq_len": 128},
        "tiny": {"n_layers": 4, "dim": 64, "n_heads": 8, "vocab_size": 257, "max_seq_len": 64},
    }

    def check(self) -> Iterable[str]:
        c = self.config
        if c.dim % c.n_heads:
            heads = nearest(c.n_heads, lambda h: c.dim % h == 0, most=c.dim)
            dims = nearest(c.dim, step=c.n_heads)
            yield f"dim {c.dim} must be divisible by n_heads {c.n_heads}; nearest: n_heads {heads}, or dim {dims}"
        elif not c.rotary.features or c.rotary.features % 2:
            n, turned = c.heads.head_dim, int(c.heads.head_dim * c.rotary_pct)
            yield (
                f"rotary_pct {c.rotary_pct} of dim / n_heads = {n} features rotates {turned}; change rotary_pct to "
                f"rotate an even number; nearest: {nearest(turned, step=2, most=n)} features"
            )
        yield from c.grouping()

    def spec(self) -> ModelSpec:
        c = self.config
        attn, ffn = c.heads.part(), feed_forward(c.dim, c.ffn_width)
        layer = _parallel(c.dim, attn, ffn) if c.parallel_residual else pre_norm(c.dim, attn, ffn, vectors=2)
        return decoder_spec(c, layer, ffn_dim=c.ffn_width, vectors=2)

    def build(self) -> nn.Module:
        c = self.config
        layer = ParallelLayer if c.parallel_residual else PreNormLayer
        norm = partial(nn.LayerNorm, c.dim, eps=c.norm_eps)
        feed = partial(FeedForward, c.dim, c.ffn_width, approximate=c.gelu_approximate)
        layers = (layer(norm(), SelfAttention(c.heads), norm(), feed()) for _ in range(c.n_layers))
        return Decoder(c, layers, norm(), rotary=c.rotary)

    hf_ignored = (
        "gpt_neox.layers.*.attention.bias",
        "gpt_neox.layers.*.attention.masked_bias",
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    )

    def hf_config(self) -> Mapping[str, Any] | None:
        """A GPTNeoXForCausalLM, which knows no grouped heads. transformers 4 and 5 read these rotary keys."""
        c = self.config
        if c.kv_heads != c.n_heads:
            return None
        return {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "intermediate_size": c.ffn_width,
            "initializer_range": c.init_std,
            "rotary_pct": c.rotary_pct,
            "rotary_emb_base": c.rope_theta,
            "rope_scaling": None,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "hidden_act": "gelu_fast" if c.gelu_approximate == "tanh" else "gelu",  # as the published files name it
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of a GPTNeoXForCausalLM, whose queries, keys and values are interleaved by head."""
        c = self.config
        layers = huggingface.biased_tensors("gpt_neox.layers", c.n_layers, _HF_LAYER, groups=c.n_heads)
        return [
            HfTensor("gpt_neox.embed_in.weight", ("embed.weight",)),
            *layers,
            *(HfTensor(f"gpt_neox.final_layer_norm.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias")),
            HfTensor("embed_out.weight", ("embed.weight" if c.tied else "output.weight",), copy=c.tied),
        ]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if config.get("model_type") != "gpt_neox":
            return None
        config = huggingface.with_defaults(config, _HF_DEFAULTS)
        config["rope_theta"] = config["rotary_emb_base"]
        theta, _, wrong = huggingface.read_rope(config, {"default": ()}, partial=True)
        issues = huggingface.size_issues(config, huggingface.SIZES) or huggingface.head_issues(config)
        gelu, odd = huggingface.read_gelu(config, "hidden_act")
        issues += [*huggingface.fixed_issues(config, _HF_FIXED), *odd, *wrong]
        if issues:
            raise ConfigError(issues)
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        return {
            **{ours: config[theirs] for theirs, ours in _HF_KEYS.items()},
            "rotary_pct": rope.get("partial_rotary_factor", config["rotary_pct"]),
            "rope_theta": theta,
            "gelu_approximate": gelu,
        }


_HF_KEYS = {
    **huggingface.SIZES,
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "use_parallel_residual": "parallel_residual",
}
_HF_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 44,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 1e4,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}
_HF_FIXED: Mapping[str, Any] = {"attention_bias": True}
_HF_LAYER = {
    "input_layernorm": ("attn_norm",),
    "attention.query_key_value": ("attn.wq", "attn.wk", "attn.wv"),
    "attention.dense": ("attn.wo",),
    "post_attention_layernorm": ("ffn_norm",),
    "mlp.dense_h_to_4h": ("ffn.up",),
    "mlp.dense_4h_to_h": ("ffn.down",),
}
