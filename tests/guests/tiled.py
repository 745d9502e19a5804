"""Another attention kernel from outside: it goes through the keys in tiles and never has all scores (2112.05682)."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from titan.contracts import BuildContext, ModelPart, Technique, option, register
from titan.layers.attention import AttentionCore


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.tiled]`."""

    keys: int = option(4, "keys in a tile", at_least=1)


@register
class Tiled(Technique):
    """Gives every attention of the model an operation that merges tiles of keys."""

    name = "tiled"
    Config = Config
    config: Config
    phase = "convert"

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        for module in part.module.modules():
            if isinstance(module, AttentionCore):
                module.use(partial(_attend, self.config.keys), self.name)


def _attend(width: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    top = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.shape[2], width):
        tile = slice(start, start + width)
        places = positions[:, tile]
        seen = positions[..., None] >= places[:, None]
        if documents is not None:
            seen = seen & (documents[..., None] == documents[:, None, tile])
        scores = (q @ k[:, :, tile].mT / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -math.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = higher.masked_fill(higher == -math.inf, 0.0)
        weights, before = (scores - finite).exp(), (top - finite).exp()
        total, out, top = total * before + weights.sum(-1, keepdim=True), out * before + weights @ v[:, :, tile], higher
    return out / total
