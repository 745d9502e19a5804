"""A technique from outside that draws random numbers: noisy embeddings (NEFTune, arXiv 2310.05914).

While a model is trained, noise is added to its embeddings, uniform from -a to a with a = alpha / sqrt(S D).
"""

import math
from dataclasses import dataclass, replace

from titan.contracts import Technique, option, register
from titan.layers.philox import RandomModule


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the noise."""

    alpha: float = option(5.0, "size of the noise", at_least=0)


class Noise(RandomModule):
    """Adds uniform noise to hidden states [B, S, D]."""

    def __init__(self, width, bound):
        super().__init__(width)
        self.bound = bound

    def forward(self, x, seeds, positions):
        return x + (2 * self.uniform(x, seeds, positions) - 1).mul(self.bound).to(x.dtype)


@register
class Neftune(Technique):
    """Adds noise to what the first layer is given."""

    name = "neftune"
    Config = Config
    phase = "convert"
    preserves_numerics = False

    def spec(self, spec):
        return replace(spec, draws=(*spec.draws, f"{spec.layer_names([0])[0]}.noise"))

    def apply(self, part, context):
        [name] = context.spec.layer_names([0])
        layer, dim = part.module.get_submodule(name), context.spec.dim
        layer.noise = Noise(dim, self.config.alpha / math.sqrt(context.job.data.seq_len * dim))
        layer.register_forward_pre_hook(_add_noise)


def _add_noise(layer, args):
    if not layer.training:
        return args
    x, positions, documents, rope, seeds, *more = args
    return layer.noise(x, seeds, positions), positions, documents, rope, seeds, *more
