"""Sizes of models that cannot work: refused with the numbers, and the nearest that fit."""

import pytest

from titan.contracts import Model
from titan.contracts.base.spec import nearest
from titan.plugins.models import bloom, gemma, gpt, llama, neox, olmo2, qwen3


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        (llama.Llama, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 112"]),
        (llama.Llama, {"dim": 24, "n_heads": 8}, ["dim 24", "n_heads 6 or 12, or dim 16 or 32"]),
        (llama.Llama, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (llama.Llama, {"rope_scaling_low": 4.0}, ["rope_scaling_low 4", "rope_scaling_high 4"]),
        (llama.Llama, {"sliding_window": 129}, ["sliding_window 129", "max_seq_len 128", "at most 128"]),
        (gpt.Gpt, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 104"]),
        (gpt.Gpt, {"n_heads": 4, "n_kv_heads": 8}, ["n_kv_heads 8", "nearest: 4"]),
        (qwen3.Qwen3, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "dim 96 or 112, or set head_dim"]),
        (qwen3.Qwen3, {"dim": 100, "n_heads": 8, "head_dim": 7}, ["head_dim 7", "nearest: 6 or 8"]),
        (qwen3.Qwen3, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (olmo2.Olmo2, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 112"]),
        (olmo2.Olmo2, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (bloom.Bloom, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 104"]),
        (bloom.Bloom, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (gemma.Gemma, {"dim": 36, "n_heads": 4}, ["dim 36 over n_heads 4", "nearest: dim 32 or 40, or set head_dim"]),
        (gemma.Gemma, {"head_dim": 5}, ["head_dim 5 must be even; nearest: 4 or 6"]),
        (neox.Neox, {"dim": 100, "n_heads": 8}, ["dim 100", "n_heads 8", "n_heads 5 or 10, or dim 96 or 104"]),
        (neox.Neox, {"n_heads": 4, "n_kv_heads": 3}, ["n_heads 4", "n_kv_heads 3", "nearest: 2 or 4"]),
        (
            neox.Neox,
            {"dim": 48},
            ["rotary_pct 0.25 of dim / n_heads = 12 features rotates 3", "nearest: 2 or 4 features"],
        ),
        (neox.Neox, {"rotary_pct": 0.01}, ["rotary_pct 0.01", "32 features rotates 0", "nearest: 2 features"]),
    ],
)
def test_sizes_that_clash_are_named_with_what_fits(model: type[Model], sizes: dict[str, int], words: list[str]) -> None:
    said = list(model(model.Config(**sizes)).check())
    assert len(said) == 1
    assert [word for word in words if word not in said[0]] == []


def test_nearest_gives_both_sides_where_there_are_two() -> None:
    assert nearest(7, lambda n: n % 5 == 0) == "5 or 10"
    assert nearest(3, lambda n: n % 5 == 0) == "5"
    assert nearest(7, lambda n: n == 1) == "1"
    assert nearest(7, lambda n: False) == ""
    assert nearest(10**18, most=8) == "8"
    assert nearest(7, step=3) == "6 or 9"
    assert nearest(10**18 + 1, lambda n: n == 1) == ""
