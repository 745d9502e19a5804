"""A decoder: embeddings, a stack of layers, a norm, and the projection to logits; its options, and its `ModelSpec`."""

# B rows, S tokens of this stage, T tokens of the whole sequence, D dim, R rotated features of a head, V vocabulary.

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from titan.contracts.base import cost
from titan.contracts.base.spec import ONES, ZEROS, Init, ModelSpec, TensorStyle, nearest, normal
from titan.contracts.plugin.options import option
from titan.layers.blocks import Heads, LayerPart, PreNormLayer, SelfAttention, SwiGLU, pre_norm, swiglu
from titan.layers.philox import Dropout, dropout_cost
from titan.layers.rotary import Rotary, rope_table


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Options that decoders share. A model derives its Config from this class, and may give other defaults."""

    n_layers: int = option(4, "layers", at_least=1, at_most=1024)
    dim: int = option(128, "hidden size", at_least=1, at_most=2**20)
    n_heads: int = option(4, "query heads", at_least=1, at_most=2**20)
    n_kv_heads: int | None = option(None, "key-value heads, one per group of query heads; unset: n_heads", at_least=1)
    vocab_size: int = option(4097, "token ids", at_least=1, at_most=2**27)
    max_seq_len: int = option(128, "longest sequence", unit="tokens", at_least=1, at_most=2**30)
    tied: bool = option(False, "tie the output projection to the embedding table")
    attention: Literal["sdpa", "unfused"] = option(
        "sdpa", 'kernel of attention: PyTorch\'s choice for the device, or "unfused", which writes its S x S scores'
    )
    norm_eps: float = option(1e-5, "added to the mean square, or to the variance, in norms", above=0)
    init_std: float = option(
        0.02,
        "standard deviation of initial weights; divided by sqrt(2 n_layers) where a layer adds to hidden states",
        above=0,
    )

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; n_heads unless n_kv_heads is set."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def heads_with(self, head_dim: int | None = None, **options: Any) -> Heads:
        """The attention of a layer, with options of `Heads`.  head_dim: features per head; None: dim / n_heads."""
        return Heads(
            dim=self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.kv_heads,
            head_dim=self.dim // self.n_heads if head_dim is None else head_dim,
            unfused=self.attention == "unfused",
            **options,
        )

    def grouping(self) -> Iterable[str]:
        """A sentence where query heads do not fall into equal groups; a model's `check` yields it."""
        if self.n_heads % self.kv_heads:
            kv = nearest(self.kv_heads, lambda k: self.n_heads % k == 0, most=self.n_heads)
            yield f"n_heads {self.n_heads} must be divisible by n_kv_heads {self.kv_heads}; nearest: {kv}"


class Decoder(nn.Module):
    """The whole model, or what a stage holds of it: absent modules are None, absent layers are not in `layers`.

    Integer x is tokens and goes through the embedding; floating x is hidden states of an earlier stage.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        learned_positions: bool = False,
        rotary: Rotary | None = None,
        dropout: Dropout | None = None,
        embed_norm: nn.Module | None = None,
        embed_scale: float = 1.0,
        logit_cap: float = 0.0,
        tells_padding: bool = False,
    ) -> None:
        """Put the modules together.

        layers: called as (x, positions, documents, rope) on hidden states [B, S, D], and return such. While a model
            that draws is trained, its seeds [B] are the fifth argument.
        tells_padding: where samples are padded, the sixth argument of layers is a mask [B, S], true at tokens, for
            layers that share numbers over tokens.
        norm: of the hidden states after the last layer.
        learned_positions: a table of `max_seq_len` positions is added to the embedding.
        rotary: makes the `rope_table` [2, B, S, R/2] of layers; None: they are given None.
        dropout, embed_norm: of the embeddings' sum; None: none.
        embed_scale: factor of the embedding, rounded to the compute dtype.
        logit_cap: c: logits x become c tanh(x / c); 0: they stay.
        """
        super().__init__()
        self.rotary = rotary
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_seq_len, config.dim) if learned_positions else None
        self.embed_norm, self.embed_scale = embed_norm, embed_scale
        self.embed_dropout, self.tells_padding = dropout, tells_padding
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm: nn.Module | None = norm
        head = partial(CappedLinear, logit_cap) if logit_cap else partial(nn.Linear, bias=False)
        self.output: nn.Linear | None = head(config.dim, config.vocab_size)
        if config.tied:
            self.output.weight = self.embed.weight

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        seeds: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, S] or hidden states [B, S, D] -> logits [B, S, V], or hidden states without the head."""
        rope = None if self.rotary is None else rope_table(self.rotary, positions)
        if not x.is_floating_point():
            assert self.embed is not None, "tokens reached a stage without the embedding"
            x = self.embed(x)
            x = x if self.embed_scale == 1 else x * x.new_full((), self.embed_scale)
            x = x if self.positions is None else x + self.positions(positions)
            x = x if self.embed_norm is None else self.embed_norm(x)
            x = x if self.embed_dropout is None else self.embed_dropout(x, seeds, positions)
        more: tuple[Tensor | None, ...] = () if seeds is None else (seeds,)
        if self.tells_padding and lengths is not None:
            more = (seeds, positions < lengths[:, None])
        for layer in self.layers.values():
            x = layer(x, positions, documents, rope, *more)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


class CappedLinear(nn.Linear):
    """A projection to logits with a soft cap, cap * tanh(W x / cap) (Gemma 2, arXiv 2408.00118), without a bias.

    So a loss that projects some positions at a time, or on slices of the vocabulary, has the cap too.
    """

    def __init__(self, cap: float, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, V]."""
        return self.cap * (super().forward(x) / self.cap).tanh()


def decoder_spec(
    config: DecoderConfig,
    layer: LayerPart,
    *,
    ffn_dim: int,
    vectors: int,
    learned_positions: bool = False,
    dropout: bool = False,
    embed_norm: bool = False,
    embed_scale: bool = False,
    logit_cap: bool = False,
) -> ModelSpec:
    """The spec of a `Decoder` whose mean layer is `layer`; its core is named `attn.core`.

    Initial weights are normal with `config.init_std`, smaller by sqrt(2 n_layers) in linears of style "row": these add
    to the hidden states, whose variance would else grow with depth (GPT-2).

    layer: one layer as data; where layers differ, with the operations of all, each with its `of_layers`. The cores
        have equal heads.
    vectors: weight vectors of the last norm, and of that of the embeddings: 1 for RMSNorm, 2 for LayerNorm.
    learned_positions, dropout, embed_norm, embed_scale, logit_cap: whether the `Decoder` has each.
    """
    c, words = config, config.vocab_size
    before: dict[str, tuple[cost.Operation, TensorStyle]] = {}
    before["embed"] = cost.EmbeddingOp(module="embed", rows=words, width=c.dim), "embedding"
    if learned_positions:
        before["positions"] = cost.EmbeddingOp(module="positions", rows=c.max_seq_len, width=c.dim), "positions"
    if embed_norm:
        before["embed_norm"] = cost.norm("embed_norm", c.dim, vectors, vectors), "norm"
    embeddings = tuple(op for op, _ in before.values())
    scaled = (cost.Elementwise(region="hidden", forward=2 * c.dim, backward=2 * c.dim),) if embed_scale else ()
    last_norm, projection = cost.norm("norm", c.dim, vectors, vectors), cost.linear("output", c.dim, words, saved=c.dim)
    head: tuple[cost.Operation, ...] = (last_norm, projection)
    tensor: dict[str, TensorStyle] = {name: style for name, (_, style) in before.items()}
    tensor |= {"norm": "norm", "output": "head"}
    tensor |= {f"layers.*.{module}": style for module, style in layer.tensor.items()}
    parameters = dict(_parameters([*embeddings, *(head[:1] if c.tied else head)]))
    parameters |= {f"layers.*.{name}": kind for name, kind in _parameters(layer.operations)}
    draws = (*(("embed_dropout",) if dropout else ()), *(f"layers.*.{module}" for module in layer.draws))
    core = next(op for op in layer.operations if isinstance(op, cost.Attention))
    tanh = cost.SavedTensor(numel=words, region="logits")  # the cap is three passes
    cap = cost.Elementwise(region="logits", forward=6 * words, backward=7 * words, saved=(tanh,))
    return ModelSpec(
        n_layers=c.n_layers, dim=c.dim, n_heads=core.heads, n_kv_heads=core.kv_heads, head_dim=core.head_dim,
        ffn_dim=ffn_dim, vocab_size=c.vocab_size, max_seq_len=c.max_seq_len,
        embeddings=tuple(before), head=("norm", "output"),
        tied=(("output.weight", "embed.weight"),) if c.tied else (),
        tensor=tensor, attention=("layers.*.attn.core",), draws=draws, init=_initial(c, parameters, tensor),
        layer_params=sum(op.of_layers * cost.parameter_count(op) for op in layer.operations),
        embedding_params=sum(map(cost.parameter_count, embeddings)),
        head_params=sum(map(cost.parameter_count, head[:1] if c.tied else head)),
        matmul_params_per_layer=sum(
            op.of_layers * op.used * op.inputs * op.outputs for op in layer.operations if isinstance(op, cost.Matmul)
        ),
        head_matmul_params=cost.parameter_count(projection),
        embedding_ops=(*embeddings, *scaled, *((dropout_cost(c.dim),) if dropout else ())),
        layer_ops=layer.operations, head_ops=(*head, *((cap,) if logit_cap else ())),
    )  # fmt: skip


def gated_decoder(config: DecoderConfig, heads: Heads, ffn_dim: int, rotary: Rotary) -> Decoder:
    """A decoder of `PreNormLayer`s with RMSNorm, `SelfAttention`, rotary positions and SwiGLU (arXiv 2302.13971)."""
    norm = partial(nn.RMSNorm, config.dim, eps=config.norm_eps)
    layers = (
        PreNormLayer(norm(), SelfAttention(heads), norm(), SwiGLU(config.dim, ffn_dim)) for _ in range(config.n_layers)
    )
    return Decoder(config, layers, norm(), rotary=rotary)


def gated_spec(config: DecoderConfig, heads: Heads, ffn_dim: int) -> ModelSpec:
    """The spec of `gated_decoder`."""
    layer = pre_norm(config.dim, heads.part(), swiglu(config.dim, ffn_dim), vectors=1)
    return decoder_spec(config, layer, ffn_dim=ffn_dim, vectors=1)


_Kind = Literal["matrix", "stack", "table", "scale", "bias"]


def _parameters(operations: Iterable[cost.Operation]) -> Iterator[tuple[str, _Kind]]:
    for op in operations:
        match op:
            case cost.Matmul(bias=bias):
                yield f"{op.module}.weight", "stack" if op.stack > 1 else "matrix"
            case cost.EmbeddingOp():
                yield f"{op.module}.weight", "table"
                bias = False
            case cost.Elementwise(params=vectors) if vectors:
                yield f"{op.module}.weight", "scale"
                bias = vectors == 2
            case _:
                continue
        if bias:
            yield f"{op.module}.bias", "bias"


def _initial(c: DecoderConfig, parameters: Mapping[str, _Kind], tensor: Mapping[str, TensorStyle]) -> dict[str, Init]:
    values = {"table": normal(c.init_std), "scale": ONES, "bias": ZEROS}
    rows = {f"{module}.weight" for module, style in tensor.items() if style in ("row", "summand")}
    added = c.init_std / math.sqrt(2 * c.n_layers)
    return {
        name: values.get(kind) or normal(added if name in rows else c.init_std, per_element=kind == "stack")
        for name, kind in parameters.items()
    }
