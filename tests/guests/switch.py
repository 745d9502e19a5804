"""A mixture from outside: each token passes one expert (arXiv 2101.03961), and large logits of the router cost a loss.

Of the step's tokens, it remembers how many each expert has had since the run began.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from titan.contracts import Measure, Model, ModelSpec, option, register
from titan.contracts.base.cost import Elementwise, Matmul, SavedTensor, linear, shared
from titan.contracts.base.spec import ZEROS
from titan.layers.blocks import Heads, LayerPart, PreNormLayer, SelfAttention, pre_norm
from titan.layers.decoder import Decoder, DecoderConfig, decoder_spec
from titan.layers.experts import Experts, SideLoss, is_recomputed, rows_per_expert
from titan.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Sizes."""

    experts: int = option(4, "experts of a layer", at_least=1)
    width: int = option(24, "hidden units of an expert", at_least=1)

    @property
    def heads(self) -> Heads:
        return self.heads_with(rotary=True)


class Switch(nn.Module):
    """A router and its experts.  seen [E]: tokens of all finished steps.  counts [E]: of the step under way."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.experts, self.side = Experts(c.experts, c.dim, c.width), SideLoss()
        self.register_buffer("seen", torch.zeros(c.experts))
        self.register_buffer("counts", torch.zeros(c.experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, seeds: Tensor | None, positions: Tensor, real: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        logits = self.router(x.flatten(0, 1)).float()
        weights, chosen = logits.softmax(-1).max(-1, keepdim=True)
        if self.training and not is_recomputed():
            self.counts.add_(rows_per_expert(chosen, len(self.counts), None if real is None else real.flatten()))
        if self.training:
            squares = logits.logsumexp(-1).square()
            weights = self.side(weights, 0.1 * (squares if real is None else squares * real.flatten()).sum())
        return self.experts(x.flatten(0, 1), chosen, weights).view_as(x)


@register
class SwitchModel(Model):
    """A decoder with one expert per token."""

    name = "switch"
    Config = Config
    config: Config
    measures: ClassVar = {
        "most_tokens": Measure("tokens that the most used expert of any layer has had", "max"),
        "used_experts": Measure("experts that have had tokens, in all layers", "sum", over=("layers",), detail=True),
    }

    def build(self) -> nn.Module:
        c = self.config
        norm = partial(nn.RMSNorm, c.dim, eps=c.norm_eps)
        layers = [
            PreNormLayer(norm(), SelfAttention(c.heads), norm(), Switch(c), ffn_by_token=True)
            for _ in range(c.n_layers)
        ]
        rotary = Rotary(head_dim=c.heads.head_dim, theta=1000.0)
        return Decoder(c, layers, norm(), rotary=rotary, tells_padding=True)

    def spec(self) -> ModelSpec:
        c = self.config
        d, f = c.dim, c.width
        stack = partial(Matmul, stack=c.experts, used=1)
        saved = (SavedTensor(numel=3 * f, region="tp_sharded"),)
        operations = (
            shared(d, 2),
            linear("ffn.router", d, c.experts, saved=d),
            stack(module="ffn.experts.w1", inputs=d, outputs=f),
            stack(module="ffn.experts.w3", inputs=d, outputs=f),
            Elementwise(region="tp_sharded", forward=5 * f, backward=8 * f, saved=saved),
            stack(module="ffn.experts.w2", inputs=f, outputs=d),
        )
        styles = {
            "ffn": "mixture",
            "ffn.router": "router",
            "ffn.experts.w1": "column",
            "ffn.experts.w3": "column",
            "ffn.experts.w2": "summand",
        }
        layer = pre_norm(d, c.heads.part(), LayerPart(operations, styles), vectors=1)
        spec = decoder_spec(c, layer, ffn_dim=f, vectors=1)
        return replace(spec, buffers={f"layers.*.ffn.{name}": ZEROS for name in ("seen", "counts", "experts.computed")})

    def after_step(self, module: nn.Module, total: Callable[[Tensor], Tensor], updated: Tensor) -> None:
        for switch in _switches(module):
            switch.seen.add_(total(switch.counts) * updated)
            switch.counts.zero_()

    def measure(self, module: nn.Module) -> dict[str, Tensor | None]:
        if not (seen := [switch.seen for switch in _switches(module)]):
            return dict.fromkeys(self.measures)
        used = torch.stack(seen).count_nonzero()
        return {"most_tokens": torch.stack(seen).max(), "used_experts": used}


def _switches(module: nn.Module) -> list[Switch]:
    return [layer.ffn for layer in module.layers.values()]
