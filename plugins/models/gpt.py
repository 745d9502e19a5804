"""GPT: learned positions, LayerNorm, GELU, biases everywhere, the head tied to the embedding (GPT-2, arXiv 2005.14165).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = down(gelu(up x))` and GELU in its tanh
approximation, as GPT-2 has it, or with `gelu_approximate = "none"` GELU itself. Every layer attends to the whole
sequence: GPT-3's sparse attention layers are not implemented. `dropout` is that of GPT-2 and 3 for the embeddings' sum
and for what attention and the feed-forward add to hidden states; fused attention has no probabilities to drop in
memory, so these are kept.

With dim D, H query heads and K key-value heads of N features, ffn_dim F and sequence length S, a layer costs
12 D^2 + 13 D parameters where F = 4 D and K = H; 2 FLOPs per token forward for each in a matmul, and 4 S H N for
attention. It saves 4 D + 2 H N + 2 K N + 2 F numbers per token for backward, and 2 D bytes with dropout.

Limits: a sequence is at most `max_seq_len` long, and positions count from the start of the sequence, also for
packed documents. Document masking costs a mask of B S^2 numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.spec import nearest
from titan.errors import ConfigError
from titan.layers import huggingface
from titan.layers.blocks import FeedForward, Heads, PreNormLayer, SelfAttention, feed_forward, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.philox import Dropout


@dataclass(frozen=True, kw_only=True)
class GptConfig(DecoderConfig):
    """Sizes of a GPT; the defaults are the preset `nano`."""

    ffn_dim: int | None = option(None, "hidden size of the feed-forward layer; unset: 4 dim", at_least=1, at_most=2**24)
    max_seq_len: int = option(
        128, "longest sequence; number of learned positions", unit="tokens", at_least=1, at_most=2**30
    )
    tied: bool = option(True, "tie the output projection to the embedding table")
    gelu_approximate: Literal["none", "tanh"] = option("tanh", "approximation of GELU; that of GPT-2 is tanh")
    dropout: float = option(
        0.0,
        "probability of dropout after the embeddings, attention and feed-forward, in steps of 2^-16",
        at_least=0,
        below=1,
    )

    @property
    def ffn_width(self) -> int:
        """Hidden size of the feed-forward layer; 4 dim unless the TOML sets ffn_dim."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def heads(self) -> Heads:
        """The attention of a layer; a head has dim / n_heads features."""
        return self.heads_with(bias=True)


def _sizes(n_layers: int, dim: int, n_heads: int, vocab_size: int, max_seq_len: int = 2048) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads}
    return {**sizes, "vocab_size": vocab_size, "max_seq_len": max_seq_len}


@register
class Gpt(Model):
    """GPT-2 and 3: learned positions, LayerNorm, GELU, biases, tied head."""

    name = "gpt"
    Config = GptConfig
    config: GptConfig
    # GPT-3's table 2.1, with 16 heads for 1.3b and width 5120 for 13b, where the printed 24 and 5140 do not divide; the
    # Frontier sizes of arXiv 2312.12705, with the vocabulary as Megatron pads it.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "125m": _sizes(12, 768, 12, 50257),
        "350m": _sizes(24, 1024, 16, 50257),
        "760m": _sizes(24, 1536, 16, 50257),
        "1.3b": _sizes(24, 2048, 16, 50257),
        "2.7b": _sizes(32, 2560, 32, 50257),
        "6.7b": _sizes(32, 4096, 32, 50257),
        "13b": _sizes(40, 5120, 40, 50257),
        "175b": _sizes(96, 12288, 96, 50257),
        "frontier-1.4b": _sizes(24, 2112, 24, 51200),
        "frontier-22b": _sizes(48, 6144, 48, 51200),
        "frontier-175b": _sizes(96, 12288, 96, 51200),
        "frontier-1t": _sizes(128, 25600, 128, 51200),
        "nano": _sizes(4, 128, 4, 4097, max_seq_len=128),
        "tiny": _sizes(4, 64, 8, 257, max_seq_len=64),
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
        dropout = c.dropout > 0
        layer = pre_norm(c.dim, c.heads.part(), feed_forward(c.dim, c.ffn_width), vectors=2, dropout=dropout)
        return decoder_spec(c, layer, ffn_dim=c.ffn_width, vectors=2, learned_positions=True, dropout=dropout)

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.LayerNorm, c.dim, eps=c.norm_eps)
        feed = partial(FeedForward, c.dim, c.ffn_width, approximate=c.gelu_approximate)

        def dropout() -> Dropout | None:
            return Dropout(c.dim, c.dropout) if c.dropout else None

        layers = (
            PreNormLayer(norm(), SelfAttention(c.heads), norm(), feed(), dropout(), dropout())
            for _ in range(c.n_layers)
        )
        return Decoder(c, layers, norm(), learned_positions=True, dropout=dropout())

    hf_ignored = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")

    def hf_config(self) -> Mapping[str, Any] | None:
        """A GPT2LMHeadModel, which knows no grouped heads."""
        c = self.config
        if c.kv_heads != c.n_heads:
            return None
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(c, ours) for theirs, ours in _HF_KEYS.items()},
            "n_inner": c.ffn_width,
            "initializer_range": c.init_std,
            "activation_function": "gelu_new" if c.gelu_approximate == "tanh" else "gelu",
            "resid_pdrop": c.dropout,
            "embd_pdrop": c.dropout,
            "attn_pdrop": 0.0,
        } | _HF_FIXED

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of a GPT2LMHeadModel. Its matrices are [in, out], with q, k and v side by side."""
        embeddings = [HfTensor("transformer.wte.weight", ("embed.weight",))]
        embeddings += [HfTensor("transformer.wpe.weight", ("positions.weight",))]
        layers = huggingface.biased_tensors("transformer.h", self.config.n_layers, _HF_LAYER, transposed=True)
        norm = [HfTensor(f"transformer.ln_f.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias")]
        head = ("embed.weight",) if self.config.tied else ("output.weight",)
        return [*embeddings, *layers, *norm, HfTensor("lm_head.weight", head, copy=self.config.tied)]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sizes of a GPT2LMHeadModel, whose defaults stand for what config.json leaves out; dropout is left out."""
        if config.get("model_type") != "gpt2":
            return None
        also = {
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        }
        config = huggingface.with_defaults(config, _HF_DEFAULTS, **also)
        gelu, odd = huggingface.read_gelu(config, "activation_function")
        issues = [*huggingface.size_issues(config, _HF_SIZES), *huggingface.fixed_issues(config, _HF_FIXED), *odd]
        if issues:
            raise ConfigError(issues)
        return {
            **{ours: config[theirs] for theirs, ours in _HF_KEYS.items()},
            "ffn_dim": config["n_inner"] or 4 * config["n_embd"],
            "gelu_approximate": gelu,
        }


_HF_SIZES = {
    "n_layer": "n_layers",
    "n_embd": "dim",
    "n_head": "n_heads",
    "vocab_size": "vocab_size",
    "n_positions": "max_seq_len",
}
_HF_KEYS = _HF_SIZES | {"tie_word_embeddings": "tied", "layer_norm_epsilon": "norm_eps"}
_HF_DEFAULTS: Mapping[str, Any] = {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_HF_FIXED: Mapping[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_HF_LAYER = {
    "ln_1": ("attn_norm",),
    "attn.c_attn": ("attn.wq", "attn.wk", "attn.wv"),
    "attn.c_proj": ("attn.wo",),
    "ln_2": ("ffn_norm",),
    "mlp.c_fc": ("ffn.up",),
    "mlp.c_proj": ("ffn.down",),
}
