"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases (arXiv 2302.13971, 2407.21783).

A layer is `h = x + attn(norm(x))`, `y = h + ffn(norm(h))`, with `ffn(x) = w2(silu(w1 x) * w3 x)`.

Rotary positions (arXiv 2104.09864) follow the half-split convention of Hugging Face: feature i of a head is rotated
with feature i + N/2 by the angle `position * rope_theta ** (-2 i / N)`. Weights in Meta's interleaved convention need
their q and k rows permuted first. Tables are built and applied in float32. `rope_scaling_factor` above 1 scales the low
frequencies as Llama 3.1 does.

Cost of a layer: 2 D^2 + 2 D K N + 3 D F + 2 D parameters; 2 FLOPs per token forward for each in a matmul, and 4 S H N
for attention. It saves 4 D + 2 H N + 2 K N + 4 F numbers per token for backward if RMSNorm is one kernel (CUDA,
compiled); the eager RMSNorm of a CPU saves 2 D more in float32, 6 D more in bfloat16. The rotary table is N max_seq_len
floats per forward.

Limits: a sequence is at most `max_seq_len` long. Document masking costs a mask of B S^2 bytes, and repeats
grouped K and V for every query head. CUDA has no fused kernel for grouped heads in float32.
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
from titan.contracts.base.spec import ONES, Init, TensorStyle, nearest, normal
from titan.errors import ConfigError, ConfigIssue

from .rope import rope_table, rotate


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are the preset `nano`."""

    n_layers: int = option(4, "layers", at_least=1, at_most=1024)
    dim: int = option(128, "hidden size", at_least=1, at_most=2**20)
    n_heads: int = option(4, "query heads", at_least=1, at_most=2**20)
    n_kv_heads: int | None = option(None, "key-value heads, one per group of query heads; unset: n_heads", at_least=1)
    ffn_dim: int = option(384, "hidden size of the feed-forward layer", at_least=1, at_most=2**24)
    vocab_size: int = option(4097, "token ids", at_least=1, at_most=2**27)
    max_seq_len: int = option(128, "longest sequence", unit="tokens", at_least=1, at_most=2**30)
    tied: bool = option(False, "tie the output projection to the embedding table")
    attention: Literal["sdpa", "unfused"] = option(
        "sdpa", 'kernel of attention: PyTorch\'s choice for the device, or "unfused", which writes its S x S scores'
    )
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm", above=0)
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
    init_std: float = option(
        0.02, "standard deviation of initial weights; divided by sqrt(2 n_layers) for wo and w2", above=0
    )

    @property
    def head_dim(self) -> int:
        """Features per attention head, dim / n_heads."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; n_heads unless the TOML sets n_kv_heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads


def _sizes(n_layers: int, dim: int, n_heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    return {"n_layers": n_layers, "dim": dim, "n_heads": n_heads, "ffn_dim": ffn_dim, **more}


_LLAMA1 = {"vocab_size": 32000, "max_seq_len": 2048, "norm_eps": 1e-6}
# 8,192 is the length of most of Llama 3.1's pretraining; its scaled frequencies serve a max_seq_len of up to 131,072.
_LLAMA3 = {
    "n_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 8192, "rope_theta": 500000.0, "rope_scaling_factor": 8.0
}  # fmt: skip


class Attention(nn.Module):
    """Causal grouped-query self-attention of one layer, [B, S, D] to [B, S, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, n = config.dim, config.head_dim
        self.head_dim = n
        self.wq = nn.Linear(d, config.n_heads * n, bias=False)
        self.wk = nn.Linear(d, config.kv_heads * n, bias=False)
        self.wv = nn.Linear(d, config.kv_heads * n, bias=False)
        self.wo = nn.Linear(config.n_heads * n, d, bias=False)
        self.core = AttentionCore(writes_scores=config.attention == "unfused")

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: KeyValues | None = None) -> Tensor:
        """x [B, S, D], rope [2, >=S, N/2] or by row, mask [B, 1, S, S] or None for plain causal -> [B, S, D]."""
        # S is read from x here and nowhere earlier: the block's input may be a shard of the sequence, x is whole.
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B S H N -> B H S N
        out = self.core(q, k, v, mask) if cache is None else cache.attend(q, k, v)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU feed-forward of one layer, [B, S, D] to [B, S, D] (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: KeyValues | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h = x + self.attn(self.attn_norm(x), rope, mask, cache)
        return h + self.ffn(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The whole model, or what a stage holds of it: absent modules are None, absent layers are not in `layers`.

    Integer x is tokens and goes through the embedding; floating x is hidden states of an earlier stage, also where
    an embedding is present because the head is tied to it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.embed.weight

    def forward(self, x: Tensor, documents: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Tokens [B, S] or hidden states [B, S, D] -> logits [B, S, V], or hidden states without the head."""
        positions = torch.arange(self.config.max_seq_len, device=x.device) if cache is None else cache.positions
        rope = rope_table(self.config, positions)
        mask = None if documents is None else document_mask(documents)
        if not x.is_floating_point():
            assert self.embed is not None, "tokens reached a stage without the embedding"
            x = self.embed(x)
        for name, layer in self.layers.items():
            x = layer(x, rope, mask, None if cache is None else cache.layer(name))
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x)


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
        "nano": _sizes(4, 128, 4, 384, vocab_size=4097, max_seq_len=128),
        "tiny": _sizes(4, 64, 8, 128, n_kv_heads=4, vocab_size=257, max_seq_len=64),
        "mini": _sizes(8, 256, 8, 768, vocab_size=2048, max_seq_len=512),
    }

    def check(self) -> Iterable[str]:
        """Heads must divide the width into an even head_dim, and fall into whole groups."""
        c = self.config
        if c.dim % (2 * c.n_heads):
            heads = nearest(c.n_heads, lambda h: c.dim % (2 * h) == 0, most=c.dim // 2)
            dims = nearest(c.dim, step=2 * c.n_heads)
            fits = f"n_heads {heads}, or dim {dims}" if heads else f"dim {dims}"
            yield f"dim {c.dim} over n_heads {c.n_heads} gives no even number of features per head; nearest: {fits}"
        if c.n_heads % c.kv_heads:
            kv = nearest(c.kv_heads, lambda k: c.n_heads % k == 0, most=c.n_heads)
            yield f"n_heads {c.n_heads} must be divisible by n_kv_heads {c.kv_heads}; nearest: {kv}"
        if c.rope_scaling_low >= c.rope_scaling_high:
            yield f"rope_scaling_low {c.rope_scaling_low:g} must be below rope_scaling_high {c.rope_scaling_high:g}"

    def spec(self) -> ModelSpec:
        """Sizes, names and costs of this Llama."""
        c = self.config
        table = c.vocab_size * c.dim
        matmuls = 2 * c.dim * (c.n_heads + c.kv_heads) * c.head_dim + 3 * c.dim * c.ffn_dim
        return ModelSpec(
            n_layers=c.n_layers, dim=c.dim, n_heads=c.n_heads, n_kv_heads=c.kv_heads, head_dim=c.head_dim,
            ffn_dim=c.ffn_dim, vocab_size=c.vocab_size, max_seq_len=c.max_seq_len,
            embeddings=("embed",), head=("norm", "output"),
            tied=(("output.weight", "embed.weight"),) if c.tied else (),
            tensor=_TENSOR, init=_init(c),
            no_decay=("embed.weight", "layers.*.*_norm.weight", "norm.weight"),
            layer_params=matmuls + 2 * c.dim,
            embedding_params=table,
            head_params=c.dim + (0 if c.tied else table),
            matmul_params_per_layer=matmuls,
            head_matmul_params=table,
            embedding_ops=(EmbeddingOp(module="embed", rows=c.vocab_size, width=c.dim),),
            layer_ops=_operations(c),
            head_ops=(norm("norm", c.dim), linear("output", c.dim, c.vocab_size, saved=c.dim)),
        )  # fmt: skip

    def build(self) -> nn.Module:
        """The whole model as an nn.Module; called on the meta device, so nothing is allocated."""
        return Transformer(self.config)

    hf_ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

    def hf_config(self) -> Mapping[str, Any]:
        """A LlamaForCausalLM. The rotary keys are those that transformers 4 and 5 both read."""
        c = self.config
        scaling = {
            "rope_type": "llama3",
            "factor": c.rope_scaling_factor,
            "low_freq_factor": c.rope_scaling_low,
            "high_freq_factor": c.rope_scaling_high,
            "original_max_position_embeddings": c.rope_scaling_original_max,
        }
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "num_hidden_layers": c.n_layers, "hidden_size": c.dim, "num_attention_heads": c.n_heads,
            "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "intermediate_size": c.ffn_dim,
            "vocab_size": c.vocab_size, "max_position_embeddings": c.max_seq_len, "tie_word_embeddings": c.tied,
            "rms_norm_eps": c.norm_eps, "initializer_range": c.init_std, "rope_theta": c.rope_theta,
            "rope_scaling": None if c.rope_scaling_factor == 1 else scaling,
        } | _HF_FIXED  # fmt: skip

    def hf_tensors(self) -> Sequence[HfTensor]:
        """The names of a LlamaForCausalLM; its rotary features fall into halves as ours do, so nothing is permuted."""
        layers = [
            HfTensor(f"model.layers.{i}.{theirs}.weight", (f"layers.{i}.{ours}.weight",))
            for i in range(self.config.n_layers)
            for theirs, ours in _HF_LAYER.items()
        ]
        embed = HfTensor("model.embed_tokens.weight", ("embed.weight",))
        head = ("embed.weight",) if self.config.tied else ("output.weight",)
        return [
            embed, *layers, HfTensor("model.norm.weight", ("norm.weight",)),
            HfTensor("lm_head.weight", head, copy=self.config.tied),
        ]  # fmt: skip

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sizes of a LlamaForCausalLM of transformers 4 or 5, whose defaults stand for what config.json leaves out."""
        if config.get("model_type") != "llama":
            return None
        faults = [
            ConfigIssue("config.json", f"{key} = {config.get(key)!r}: must be an integer of at least 1")
            for key in _HF_SIZES
            if not isinstance(config.get(key), int) or config[key] < 1
        ]
        fixed = {**_HF_FIXED, "quantization_config": None}
        if not faults:
            fixed["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        for key, value in fixed.items():
            if config.get(key, value) not in (value, None):
                faults.append(ConfigIssue("config.json", f"{key} = {config[key]!r}: this model has {value!r} only"))
        rope = _rope_from_hf(config, faults)
        if faults:
            raise ConfigError(faults)
        return {
            **{ours: config[theirs] for theirs, ours in _HF_SIZES.items()},
            "n_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
            "tied": config.get("tie_word_embeddings", False),
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            **rope,
        }


_HF_SIZES = {
    "num_hidden_layers": "n_layers", "hidden_size": "dim", "num_attention_heads": "n_heads",
    "intermediate_size": "ffn_dim", "vocab_size": "vocab_size", "max_position_embeddings": "max_seq_len",
}  # fmt: skip
_HF_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_HF_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk",
    "self_attn.v_proj": "attn.wv", "self_attn.o_proj": "attn.wo", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn.w1", "mlp.up_proj": "ffn.w3", "mlp.down_proj": "ffn.w2",
}  # fmt: skip


def _rope_from_hf(config: Mapping[str, Any], faults: list[ConfigIssue]) -> dict[str, Any]:
    """Rotary options of a config.json: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        faults.append(ConfigIssue("config.json", f"{key} = {rope!r}: must be an object"))
        return {}
    values = {"rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10000.0}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        faults.append(
            ConfigIssue("config.json", f"{key} rope_type = {kind!r}: this model has 'default' and 'llama3' only")
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        told = f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: this model supports only 1"
        faults.append(ConfigIssue("config.json", f"{key} {told}"))
    if kind != "llama3":
        return values
    original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    absent = [name for name in ("factor", "low_freq_factor", "high_freq_factor") if name not in rope]
    faults += [ConfigIssue("config.json", f"{key} {name}: missing") for name in absent]
    return values if absent else {
        **values, "rope_scaling_factor": rope["factor"], "rope_scaling_low": rope["low_freq_factor"],
        "rope_scaling_high": rope["high_freq_factor"], "rope_scaling_original_max": original,
    }  # fmt: skip


def _operations(c: LlamaConfig) -> tuple[Operation, ...]:
    """A layer, in order. What two operations keep is stated at the first of them."""
    d, f, q, kv = c.dim, c.ffn_dim, c.n_heads * c.head_dim, c.kv_heads * c.head_dim
    return (
        norm("attn_norm", d), shared(d, 3),
        linear("attn.wq", d, q, saved=d), linear("attn.wk", d, kv), linear("attn.wv", d, kv),
        Elementwise(region="tp_sharded", forward=8 * (q + kv), backward=8 * (q + kv)),
        attention_cost(c.n_heads, c.kv_heads, c.head_dim, scores_written=c.attention == "unfused"),
        linear("attn.wo", q, d),
        residual(d),
        norm("ffn_norm", d), shared(d, 2),
        linear("ffn.w1", d, f, saved=d), linear("ffn.w3", d, f),
        Elementwise(
            region="tp_sharded", forward=5 * f, backward=8 * f, saved=(SavedTensor(numel=3 * f, region="tp_sharded"),)
        ),
        linear("ffn.w2", f, d, saved=f, region="tp_sharded"),
        residual(d),
    )  # fmt: skip


_TENSOR: Mapping[str, TensorStyle] = {
    "embed": "embedding",
    "layers.*.attn_norm": "norm",
    "layers.*.attn": "gather",
    "layers.*.attn.wq": "column",
    "layers.*.attn.wk": "column",
    "layers.*.attn.wv": "column",
    "layers.*.attn.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.ffn": "gather",
    "layers.*.ffn.w1": "column",
    "layers.*.ffn.w3": "column",
    "layers.*.ffn.w2": "row",
    "norm": "norm",
    "output": "head",
}


def _init(c: LlamaConfig) -> dict[str, Init]:
    # What adds to the residual stream is drawn smaller, so that its variance does not grow with depth (GPT-2).
    added = normal(c.init_std / math.sqrt(2 * c.n_layers))
    drawn = {
        "layers.*.*_norm.weight": ONES,
        "norm.weight": ONES,
        "layers.*.attn.wo.weight": added,
        "layers.*.ffn.w2.weight": added,
        "layers.*.attn.*.weight": normal(c.init_std),
        "layers.*.ffn.*.weight": normal(c.init_std),
        "embed.weight": normal(c.init_std),
    }
    return drawn if c.tied else {**drawn, "output.weight": normal(c.init_std)}
