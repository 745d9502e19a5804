"""Rotary positions (arXiv 2104.09864): pairs of features of queries and keys are rotated by their token's position.

Feature i of a head is paired with feature i + R/2, as in Hugging Face, and rotated by `position * theta ** (-2 i / R)`:
the first R features of a head, as a rule all N. Weights in Meta's convention, which pairs neighbors, need their q and k
rows permuted first. Tables are built and applied in float32.
"""

# B rows, S tokens, H heads, N head_dim, R rotated features of a head.

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions of a model.

    head_dim: features per head.  theta: base of the frequencies.
    features: features per head that are rotated, from the first on, an even number; None: all.
    scaling_factor: divides low frequencies, as in Llama 3.1 (arXiv 2407.21783); 1: no scaling.
    scaling_low, scaling_high: a frequency is low below `scaling_low` turns within `scaling_original_max` tokens, and
        unscaled above `scaling_high` turns; in between the two are interpolated.
    """

    head_dim: int
    theta: float
    features: int | None = None
    scaling_factor: float = 1.0
    scaling_low: float = 1.0
    scaling_high: float = 4.0
    scaling_original_max: int = 8192


def rope_frequencies(rotary: Rotary, device: torch.device | None = None) -> Tensor:
    """Radians by which each pair of features is rotated from one position to the next: [R/2], float32."""
    n = rotary.head_dim if rotary.features is None else rotary.features
    frequencies = rotary.theta ** (-torch.arange(0, n, 2, dtype=torch.float32, device=device) / n)
    if rotary.scaling_factor == 1:
        return frequencies
    low, high = rotary.scaling_low, rotary.scaling_high
    turns = rotary.scaling_original_max * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rotary.scaling_factor)


def rope_table(rotary: Rotary, positions: Tensor) -> Tensor:
    """Cosine and sine of positions [S] or [B, S]: [2, S, R/2] or [2, B, S, R/2], float32."""
    angles = positions[..., None].float() * rope_frequencies(rotary, positions.device)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate heads x [B, S, H, N] by the first S positions of a `rope_table`; the result has x's dtype."""
    cos, sin = rope[..., : x.shape[1], None, :]
    turned = 2 * rope.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)  # promoted to the float32 of the table
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if turned == x.shape[-1] else torch.cat((rotated, x[..., turned:]), dim=-1)
