"""A model from outside whose feed-forward mixes the matrices of a stack: ffn(x) = sum over e of softmax(R x)_e W_e x.

All of a stack [E, D, D] is one parameter, in a module of its own. Its elements are drawn one by one, and each is a
tensor of a Hugging Face folder, transposed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import HfTensor, Model, ModelSpec, option, register
from titan.contracts.base.cost import linear
from titan.contracts.base.spec import normal
from titan.layers import huggingface
from titan.layers.blocks import Heads, LayerPart, PreNormLayer, SelfAttention, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.rotary import Rotary

SIZES = ("n_layers", "dim", "n_heads", "vocab_size", "max_seq_len", "tied", "stacked")


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Sizes."""

    stacked: int = option(4, "matrices of a stack", at_least=1)

    @property
    def heads(self) -> Heads:
        return self.heads_with(rotary=True)


class Stack(nn.Module):
    """The stack [E, D, D] of a layer.  whole: makes all of it from what this rank holds; None: it holds all."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim, dim))
        self.whole: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """x [B, S, D], shares [B, S, E] -> [B, S, D]."""
        weight = self.weight if self.whole is None else self.whole(self.weight)
        return (torch.einsum("eod,bsd->bseo", weight, x) * shares[..., None]).sum(-2)


class Mixture(nn.Module):
    """The feed-forward of a layer."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.router, self.stack = nn.Linear(dim, count, bias=False), Stack(count, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.stack(x, self.router(x).softmax(-1))


@register
class Stacked(Model):
    """A decoder with stacks of matrices."""

    name = "stacked"
    Config = Config
    config: Config

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.RMSNorm, c.dim, eps=c.norm_eps)
        layers = [
            PreNormLayer(norm(), SelfAttention(c.heads), norm(), Mixture(c.stacked, c.dim)) for _ in range(c.n_layers)
        ]
        return Decoder(c, layers, norm(), rotary=Rotary(head_dim=c.heads.head_dim, theta=1000.0))

    def spec(self) -> ModelSpec:
        c = self.config
        operations = (
            linear("ffn.router", c.dim, c.stacked, saved=c.dim),
            linear("ffn.stack", c.dim, c.stacked * c.dim, saved=c.dim),
        )
        ffn = LayerPart(operations, {"ffn.router": "norm", "ffn.stack": "norm"})  # whole on every rank of tp
        spec = decoder_spec(c, pre_norm(c.dim, c.heads.part(), ffn, vectors=1), ffn_dim=0, vectors=1)
        stacks = {"layers.*.ffn.stack.weight": normal(c.init_std, per_element=True)}
        return replace(spec, init={**spec.init, **stacks})

    def hf_config(self) -> Mapping[str, Any]:
        c = self.config
        return {"model_type": "stacked", **{key: getattr(c, key) for key in SIZES}, "n_kv_heads": c.kv_heads}

    def hf_tensors(self) -> Sequence[HfTensor]:
        modules = {theirs: ours for theirs, ours in huggingface.LAYER.items() if not theirs.startswith("mlp.")}
        modules["mlp.gate"] = "ffn.router"
        # Element by element, then layer by layer: the stacks lie across the files.
        elements = [
            HfTensor(f"model.layers.{i}.mlp.{e}", (f"layers.{i}.ffn.stack.weight",), transposed=True, element=e)
            for e in reversed(range(self.config.stacked))
            for i in range(self.config.n_layers)
        ]
        return [*elements, *huggingface.decoder_tensors(self.config.n_layers, modules, tied=self.config.tied)]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if config.get("model_type") != "stacked":
            return None
        return {key: config[key] for key in (*SIZES, "n_kv_heads")}
