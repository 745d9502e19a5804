"""Rotary positions against complex numbers, and their scaling against the published code."""

import math

import pytest
import torch
from torch import Tensor

from titan.layers.rotary import Rotary, rope_frequencies, rope_table, rotate
from titan.plugins.models import llama


def naive_rope(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Each pair (i, i + N/2) as one complex number, turned by exp(1j * position * theta ** (-2i/N)), in float64."""
    _, s, _, n = x.shape
    out = torch.empty_like(x)
    for i in range(n // 2):
        turn = torch.exp(1j * torch.arange(s, dtype=torch.float64) * theta ** (-2 * i / n))
        pair = torch.complex(x[..., i].double(), x[..., i + n // 2].double()) * turn[None, :, None]
        out[..., i], out[..., i + n // 2] = pair.real, pair.imag
    return out


def test_rope_turns_pairs_like_complex_numbers() -> None:
    rotary = llama.LlamaConfig(rope_theta=500.0).rotary
    x = torch.randn(2, 100, 3, 32)
    table = rope_table(rotary, torch.arange(128))
    assert table.shape == (2, 128, 16) and table.dtype == torch.float32
    torch.testing.assert_close(rotate(x, table), naive_rope(x, 500.0), rtol=1e-5, atol=2e-5)


def test_the_first_features_of_a_head_turn_alone() -> None:
    x = torch.randn(2, 100, 3, 32).bfloat16()
    table = rope_table(Rotary(head_dim=32, theta=500.0, features=8), torch.arange(128))
    assert table.shape == (2, 128, 4)
    turned = rotate(x, table)
    assert torch.equal(turned[..., 8:], x[..., 8:]) and turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned[..., :8], naive_rope(x[..., :8].float(), 500.0).bfloat16(), rtol=1e-2, atol=1e-2)


def test_rope_turns_bfloat16_in_float32() -> None:
    x = torch.randn(1, 128, 2, 32).bfloat16()
    table = rope_table(llama.LlamaConfig().rotary, torch.arange(128))
    turned = rotate(x, table)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), table).bfloat16())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_is_llama_3_1s(factor: float) -> None:
    """Wavelength by wavelength, as the published code states it."""
    config = llama.LlamaConfig(**{**llama.Llama.presets["llama3-8b"], "rope_scaling_factor": factor})
    low, high, original = 1.0, 4.0, 8192
    expected, kinds = [], set()
    for i in range(64):
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            kinds.add("kept")
            expected.append(frequency)
        elif wavelength > original / low:
            kinds.add("slow")
            expected.append(frequency / factor)
        else:
            kinds.add("blended")
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    assert kinds == {"kept", "slow", "blended"}
    torch.testing.assert_close(rope_frequencies(config.rotary), torch.tensor(expected), rtol=1e-5, atol=0)
