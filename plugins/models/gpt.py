"""GPT: learned positions, LayerNorm, GELU, biases everywhere, the head tied to the embedding (GPT-2, arXiv 2005.14165).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = down(gelu(up x))` and GELU in its tanh
approximation, as GPT-2 has it. Every layer attends to the whole sequence: GPT-3's sparse attention layers are not
implemented. There is no dropout.

Cost of a layer: 12 D^2 + 13 D parameters where F = 4 D and K = H; 2 FLOPs per token forward for each in a matmul, and
4 S H N for attention. It saves 4 D + 2 H N + 2 K N + 2 F numbers per token for backward.

Limits: a sequence is at most `max_seq_len` long, and positions count from the start of the sequence, also for
packed documents. Document masking costs a mask of B S^2 bytes.
"""

# B batch, S sequence, D dim, H query heads, K key-value heads, N head_dim, F ffn_dim, V vocabulary.
# Under tensor parallelism H, K and F are a rank's own share; nothing here reads them from the config.

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.contracts import AttentionCore, Cache, HfTensor, KeyValues, Model, ModelSpec, document_mask, option, register
from titan.contracts.base.attention import attention_cost
from titan.contracts.base.cost import Elementwise, EmbeddingOp, Operation, SavedTensor, linear, norm, residual, shared
from titan.contracts.base.spec import ONES, ZEROS, Init, TensorStyle, nearest, normal
from titan.errors import ConfigError, ConfigIssue


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes of a GPT; the defaults are the preset `nano`."""

    n_layers: int = option(4, "layers", at_least=1, at_most=1024)
    dim: int = option(128, "hidden size", at_least=1, at_most=2**20)
    n_heads: int = option(4, "query heads", at_least=1, at_most=2**20)
    n_kv_heads: int | None = option(None, "key-value heads, one per group of query heads; unset: n_heads", at_least=1)
    ffn_dim: int | None = option(None, "hidden size of the feed-forward layer; unset: 4 dim", at_least=1, at_most=2**24)
    vocab_size: int = option(4097, "token ids", at_least=1, at_most=2**27)
    max_seq_len: int = option(
        128, "longest sequence; number of learned positions", unit="tokens", at_least=1, at_most=2**30
    )
    tied: bool = option(True, "tie the output projection to the embedding table")
    attention: Literal["sdpa", "unfused"] = option(
        "sdpa", 'kernel of attention: PyTorch\'s choice for the device, or "unfused", which writes its S x S scores'
    )
    norm_eps: float = option(1e-5, "added to the variance in LayerNorm", above=0)
    init_std: float = option(
        0.02, "standard deviation of initial weights; divided by sqrt(2 n_layers) for wo and down", above=0
    )

    @property
    def head_dim(self) -> int:
        """Features per attention head, dim / n_heads."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; n_heads unless the TOML sets n_kv_heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden size of the feed-forward layer; 4 dim unless the TOML sets ffn_dim."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim


def _sizes(n_layers: int, dim: int, n_heads: int, vocab_size: int, max_seq_len: int = 2048) -> dict[str, Any]:
    sizes = {"n_layers": n_layers, "dim": dim, "n_heads": n_heads}
    return {**sizes, "vocab_size": vocab_size, "max_seq_len": max_seq_len}


class Attention(nn.Module):
    """Causal self-attention of one layer, [B, S, D] to [B, S, D]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        d, n = config.dim, config.head_dim
        self.head_dim = n
        self.wq = nn.Linear(d, config.n_heads * n)
        self.wk = nn.Linear(d, config.kv_heads * n)
        self.wv = nn.Linear(d, config.kv_heads * n)
        self.wo = nn.Linear(config.n_heads * n, d)
        self.core = AttentionCore(writes_scores=config.attention == "unfused")

    def forward(self, x: Tensor, mask: Tensor | None, cache: KeyValues | None = None) -> Tensor:
        """x [B, S, D], mask [B, 1, S, S] or None for plain causal -> [B, S, D]."""
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))  # B H S N
        out = self.core(q, k, v, mask) if cache is None else cache.attend(q, k, v)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to what came in."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KeyValues | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h = x + self.attn(self.attn_norm(x), mask, cache)
        return h + self.ffn(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The whole model, or what a stage holds of it: absent modules are None, absent layers are not in `layers`.

    Integer x is tokens and goes through the embedding; floating x is hidden states of an earlier stage, also where
    an embedding is present because the head is tied to it.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.positions: nn.Embedding | None = nn.Embedding(config.max_seq_len, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.embed.weight

    def forward(self, x: Tensor, documents: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Tokens [B, S] or hidden states [B, S, D] -> logits [B, S, V], or hidden states without the head."""
        mask = None if documents is None else document_mask(documents)
        if not x.is_floating_point():
            x = self._embedded(x, cache)
        for name, layer in self.layers.items():
            x = layer(x, mask, None if cache is None else cache.layer(name))
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x)

    def _embedded(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        assert self.embed is not None and self.positions is not None, "tokens reached a stage without the embeddings"
        # [1 or B, S], so that both terms split on the same dimension where sequences are split.
        at = torch.arange(tokens.shape[1], device=tokens.device)[None] if cache is None else cache.positions
        return self.embed(tokens) + self.positions(at)  # type: ignore[no-any-return]


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
        """Heads must divide the width, and fall into equal groups."""
        c = self.config
        if c.dim % c.n_heads:
            heads = nearest(c.n_heads, lambda h: c.dim % h == 0, most=c.dim)
            dims = nearest(c.dim, step=c.n_heads)
            yield f"dim {c.dim} must be divisible by n_heads {c.n_heads}; nearest: n_heads {heads}, or dim {dims}"
        if c.n_heads % c.kv_heads:
            kv = nearest(c.kv_heads, lambda k: c.n_heads % k == 0, most=c.n_heads)
            yield f"n_heads {c.n_heads} must be divisible by n_kv_heads {c.kv_heads}; nearest: {kv}"

    def spec(self) -> ModelSpec:
        """Sizes, names and costs of this GPT."""
        c = self.config
        table = c.vocab_size * c.dim
        projected = (c.n_heads + 2 * c.kv_heads) * c.head_dim
        matmuls = c.dim * (projected + c.n_heads * c.head_dim) + 2 * c.dim * c.ffn_width
        return ModelSpec(
            n_layers=c.n_layers, dim=c.dim, n_heads=c.n_heads, n_kv_heads=c.kv_heads, head_dim=c.head_dim,
            ffn_dim=c.ffn_width, vocab_size=c.vocab_size, max_seq_len=c.max_seq_len,
            embeddings=("embed", "positions"), head=("norm", "output"),
            tied=(("output.weight", "embed.weight"),) if c.tied else (),
            tensor=_TENSOR, init=_init(c),
            no_decay=("embed.weight", "positions.weight", "norm.*", "layers.*.*_norm.*", "layers.*.*.*.bias"),
            layer_params=matmuls + projected + c.ffn_width + 6 * c.dim,
            embedding_params=table + c.max_seq_len * c.dim,
            head_params=2 * c.dim + (0 if c.tied else table),
            matmul_params_per_layer=matmuls,
            head_matmul_params=table,
            embedding_ops=(
                EmbeddingOp(module="embed", rows=c.vocab_size, width=c.dim),
                EmbeddingOp(module="positions", rows=c.max_seq_len, width=c.dim),
            ),
            layer_ops=_operations(c),
            head_ops=(
                norm("norm", c.dim, 2, 2),
                linear("output", c.dim, c.vocab_size, saved=c.dim),
            ),
        )  # fmt: skip

    def build(self) -> nn.Module:
        """The whole model as an nn.Module; called on the meta device, so nothing is allocated."""
        return Transformer(self.config)

    hf_ignored = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")

    def hf_config(self) -> Mapping[str, Any] | None:
        """A GPT2LMHeadModel, which knows no grouped heads."""
        c = self.config
        if c.kv_heads != c.n_heads:
            return None
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "n_layer": c.n_layers, "n_embd": c.dim, "n_head": c.n_heads, "n_inner": c.ffn_width,
            "vocab_size": c.vocab_size, "n_positions": c.max_seq_len, "tie_word_embeddings": c.tied,
            "layer_norm_epsilon": c.norm_eps, "initializer_range": c.init_std,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        } | _HF_FIXED  # fmt: skip

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of a GPT2LMHeadModel. Its matrices are [in, out], with q, k and v side by side."""
        embeddings = [HfTensor("transformer.wte.weight", ("embed.weight",))]
        embeddings += [HfTensor("transformer.wpe.weight", ("positions.weight",))]
        layers = [
            HfTensor(
                f"transformer.h.{i}.{theirs}.{kind}",
                tuple(f"layers.{i}.{name}.{kind}" for name in ours),
                transposed=kind == "weight" and not ours[0].endswith("norm"),
            )
            for i in range(self.config.n_layers)
            for theirs, ours in _HF_LAYER.items()
            for kind in ("weight", "bias")
        ]
        norm = [HfTensor(f"transformer.ln_f.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias")]
        head = ("embed.weight",) if self.config.tied else ("output.weight",)
        return [*embeddings, *layers, *norm, HfTensor("lm_head.weight", head, copy=self.config.tied)]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sizes of a GPT2LMHeadModel, whose defaults stand for what config.json leaves out; dropout is left out."""
        if config.get("model_type") != "gpt2":
            return None
        faults = [
            ConfigIssue("config.json", f"{key} = {config.get(key)!r}: must be an integer of at least 1")
            for key in _HF_SIZES
            if not isinstance(config.get(key), int) or config[key] < 1
        ]
        for key, value in {**_HF_FIXED, "quantization_config": None}.items():
            if config.get(key, value) not in (value, None):
                faults.append(ConfigIssue("config.json", f"{key} = {config[key]!r}: this model has {value!r} only"))
        if faults:
            raise ConfigError(faults)
        return {
            **{ours: config[theirs] for theirs, ours in _HF_SIZES.items()},
            "ffn_dim": config.get("n_inner") or 4 * config["n_embd"],
            "tied": config.get("tie_word_embeddings", True),
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        }


_HF_SIZES = {
    "n_layer": "n_layers", "n_embd": "dim", "n_head": "n_heads", "vocab_size": "vocab_size",
    "n_positions": "max_seq_len",
}  # fmt: skip
_HF_FIXED: Mapping[str, Any] = {
    "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # fmt: skip
_HF_LAYER = {
    "ln_1": ("attn_norm",), "attn.c_attn": ("attn.wq", "attn.wk", "attn.wv"), "attn.c_proj": ("attn.wo",),
    "ln_2": ("ffn_norm",), "mlp.c_fc": ("ffn.up",), "mlp.c_proj": ("ffn.down",),
}  # fmt: skip


def _operations(c: GptConfig) -> tuple[Operation, ...]:
    """A layer, in order. What two operations keep is stated at the first of them."""
    d, f, q, kv = c.dim, c.ffn_width, c.n_heads * c.head_dim, c.kv_heads * c.head_dim
    return (
        norm("attn_norm", d, 2, 2), shared(d, 3),
        linear("attn.wq", d, q, saved=d, bias=True),
        linear("attn.wk", d, kv, bias=True), linear("attn.wv", d, kv, bias=True),
        attention_cost(c.n_heads, c.kv_heads, c.head_dim, scores_written=c.attention == "unfused"),
        linear("attn.wo", q, d, bias=True),
        residual(d),
        norm("ffn_norm", d, 2, 2),
        linear("ffn.up", d, f, saved=d, bias=True),
        Elementwise(
            region="tp_sharded", forward=2 * f, backward=3 * f, saved=(SavedTensor(numel=f, region="tp_sharded"),)
        ),
        linear("ffn.down", f, d, saved=f, region="tp_sharded", bias=True),
        residual(d),
    )  # fmt: skip


_TENSOR: Mapping[str, TensorStyle] = {
    "embed": "embedding",
    "positions": "positions",
    "layers.*.attn_norm": "norm",
    "layers.*.attn": "gather",
    "layers.*.attn.wq": "column",
    "layers.*.attn.wk": "column",
    "layers.*.attn.wv": "column",
    "layers.*.attn.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.ffn": "gather",
    "layers.*.ffn.up": "column",
    "layers.*.ffn.down": "row",
    "norm": "norm",
    "output": "head",
}


def _init(c: GptConfig) -> dict[str, Init]:
    # What adds to the residual stream is drawn smaller, so that its variance does not grow with depth.
    added = normal(c.init_std / math.sqrt(2 * c.n_layers))
    drawn = {
        "layers.*.*_norm.weight": ONES,
        "layers.*.*.bias": ZEROS,
        "layers.*.*.*.bias": ZEROS,
        "norm.weight": ONES,
        "norm.bias": ZEROS,
        "layers.*.attn.wo.weight": added,
        "layers.*.ffn.down.weight": added,
        "layers.*.*.*.weight": normal(c.init_std),
        "embed.weight": normal(c.init_std),
        "positions.weight": normal(c.init_std),
    }
    return drawn if c.tied else {**drawn, "output.weight": normal(c.init_std)}
