"""bfloat16 mixed precision: fp32 master weights, bf16 forward and backward, fp32 reduction of gradients.

Parameters are cast once when a unit is gathered, activations follow; a micro batch's gradient is bf16 and is added up
over micro batches and ranks in fp32. The optimizer, the loss, softmax and norms' statistics stay fp32.
Mixed precision training: arXiv 1710.03740; bfloat16: arXiv 1905.12322.

Cost: 2 bytes instead of 4 per gathered parameter and activation; the master copy stays. The technique that gathers
parameters casts them, so one is enabled if none is.
"""

from dataclasses import dataclass

import torch

from titan.contracts import Precision, Technique, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.bf16]`: there are none."""


@register
class BFloat16(Technique):
    """Computes in bfloat16 with fp32 master weights and fp32 gradient sums."""

    name = "bf16"
    Config = Config
    phase = "shard"
    requires = ("mixed_precision",)
    preserves_numerics = False

    def precision(self, precision: Precision) -> Precision:
        """Parameters and activations in bfloat16, sums of gradients in float32."""
        return Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
