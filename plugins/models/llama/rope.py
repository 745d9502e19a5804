"""Rotary positions (arXiv 2104.09864), with the frequencies that Llama 3.1 stretches (arXiv 2407.21783)."""

import math
from typing import Protocol

import torch
from torch import Tensor


class Rotary(Protocol):
    """The options of a model that say how far its heads turn."""

    head_dim: int
    rope_theta: float
    rope_scaling_factor: float
    rope_scaling_low: float
    rope_scaling_high: float
    rope_scaling_original_max: int


def rope_frequencies(config: Rotary, device: torch.device | None = None) -> Tensor:
    """Angle in radians that each pair of features turns by from one position to the next: [N/2], float32.

    With a scaling factor f > 1, a frequency that makes t turns within the original length is divided by f where
    t < low, kept where t > high, and in between blended linearly in t, so that both ends meet (arXiv 2407.21783).
    """
    n = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, n, 2, dtype=torch.float32, device=device) / n)
    if config.rope_scaling_factor == 1:
        return frequencies
    low, high = config.rope_scaling_low, config.rope_scaling_high
    turns = config.rope_scaling_original_max * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def rope_table(config: Rotary, positions: Tensor) -> Tensor:
    """Cosine and sine of positions [S] or [B, S]: [2, S, N/2] or [2, B, S, N/2], float32."""
    angles = positions[..., None].float() * rope_frequencies(config, positions.device)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the heads x [B, S, H, N] by the first S positions of a `rope_table`; the result has x's dtype."""
    cos, sin = rope[..., : x.shape[1], None, :]
    first, second = x.chunk(2, dim=-1)  # promoted to the float32 of the table
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
