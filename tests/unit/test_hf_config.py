"""What models read of a config.json: as transformers reads it, or refused by key and value."""

from typing import Any

import pytest

from tests.huggingface import LLAMA, SCALED, plugin
from titan.errors import ConfigError

ONLY, SIZE = "{key} = {value!r}: this model has ", "{key} = {value!r}: must be an integer of at least 1"
ROPE_TYPE, OBJECT = "{key} rope_type = {kind!r}: this model has ", "{key} = {value!r}: must be an object"
QUANTIZED = "{key}: the weights are quantized; convert"
PARTIAL = "rope_parameters partial_rotary_factor = 0.5: this model supports only 1"


def each(models: str, said: str, **values: Any) -> list[tuple[str, str, Any, str]]:
    return [(model, key, value, said) for model in models.split() for key, value in values.items()]


REFUSED = [
    *each("llama", ONLY, hidden_act="gelu", is_causal=False, per_layer_config={"0": {}}, transformers_weights="a"),
    *each("llama neox", ONLY, hidden_act=None),
    *each("llama olmo2", ONLY, attention_bias=True),
    *each("llama olmo2 neox", ONLY, head_dim=8),
    *each("gpt", ONLY, activation_function="relu", scale_attn_by_inverse_layer_idx=True),
    *each("qwen3", ONLY, use_sliding_window=True),
    *each("gemma", ONLY, hidden_activation="gelu", use_bidirectional_attention=True),
    *each("bloom", ONLY, apply_residual_connection_post_layernorm=True),
    *each("neox", ONLY, attention_bias=False, hidden_act=["gelu"]),
    *each("llama neox", SIZE, hidden_size=None),
    *each("olmo2", SIZE, hidden_size=0),
    *each("gpt bloom", SIZE, n_head=0),
    *each("bloom", SIZE, seq_length="2k"),
    *each("qwen3", SIZE, head_dim=None),
    *each("gemma", SIZE, query_pre_attn_scalar=1.5),
    *each("llama", QUANTIZED, quantization_config={"bits": 4}, compression_config={"format": "dense"}),
    *each("llama", "{key}: this model has full_attention only", layer_types=["sliding_attention"] * 2),
    *each("qwen3", "{key}: this model has full_attention only", layer_types="full_attention"),
    *each("gemma", "{key}: this model has sliding_attention and full", layer_types=["full_attention"] * 2),
    *each("llama neox", ROPE_TYPE, rope_scaling={"type": "linear", "factor": 2}),
    *each("llama", ROPE_TYPE, rope_scaling={"rope_type": ["llama3"]}, rope_parameters={"rope_type": None}),
    *each("qwen3 olmo2", ROPE_TYPE, rope_scaling={"rope_type": "yarn"}),
    *each("llama", "{key} factor: missing", rope_parameters={"rope_type": "llama3"}),
    *each("llama neox", OBJECT, rope_parameters=[1]),
    *each("gemma", "{key} full_attention: this model rotates all", rope_parameters={"full_attention": {}}),
    *each("llama", PARTIAL, partial_rotary_factor=0.5),
    *each("qwen3", PARTIAL, rope_parameters={"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("name", "key", "value", "said"), REFUSED)
def test_what_the_model_cannot_do_is_refused(name: str, key: str, value: Any, said: str) -> None:
    model = plugin(name)
    kind = value.get("rope_type", value.get("type")) if isinstance(value, dict) else None
    with pytest.raises(ConfigError) as refused:
        model.from_hf({**(model.hf_config() or {}), key: value})
    assert str(refused.value).startswith("config.json: " + said.format(key=key, value=value, kind=kind))


def test_what_transformers_lays_out_in_two_ways_is_read_alike() -> None:
    """Where rotary positions stand; keys that are left out are compared in tests/unit/test_transformers.py."""
    own = {**LLAMA, "model_type": "llama"}
    new = {**own, "rope_theta": 1.0, "rope_parameters": {**SCALED, "rope_theta": 5e5}}
    old = {**own, "rope_theta": 5e5, "rope_scaling": {**SCALED, "type": "ignored"}}
    assert plugin("llama").from_hf(new) == plugin("llama").from_hf(old)
    pythia = {**LLAMA, "model_type": "gpt_neox", "use_parallel_residual": False}
    rope = {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}
    read = plugin("neox").from_hf({**pythia, "rotary_emb_base": 500, "rotary_pct": 0.5}) or {}
    assert (read["parallel_residual"], read["rotary_pct"], read["rope_theta"]) == (False, 0.5, 500)
    assert read == plugin("neox").from_hf({**pythia, "rope_parameters": rope})
    assert read == plugin("neox").from_hf({**pythia, "rope_scaling": rope, "rotary_pct": 0.1})


def test_no_model_of_transformers_is_none() -> None:
    others = [plugin("neox", n_kv_heads=2), plugin("bloom", n_kv_heads=2), plugin("bloom", ffn_dim=40)]
    assert [model.hf_config() for model in others] == [None] * 3
    assert plugin("gpt").from_hf(LLAMA) is None and plugin("llama").from_hf({"model_type": "gpt2"}) is None


def test_other_names_are_read_as_transformers_does() -> None:
    """Of a key, of an activation, and of a key that has gone: decapoda's LLaMA says no max_position_embeddings."""
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_embed": 32, "n_head": 8, "num_attention_heads": 4}
    found = plugin("bloom").from_hf(bloom) or {}
    assert (found["dim"], found["n_heads"]) == (32, 4)
    gpt = plugin("gpt").from_hf({"model_type": "gpt2", "hidden_size": 32, "num_hidden_layers": 3, "n_ctx": 7}) or {}
    assert (gpt["dim"], gpt["n_layers"], gpt["max_seq_len"]) == (32, 3, 1024)
    early = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    early |= {"model_type": "llama", "max_sequence_length": 512, "pad_token_id": -1, "hidden_act": "swish"}
    assert (plugin("llama").from_hf(early) or {})["max_seq_len"] == 2048
    for name, key in (("neox", "hidden_act"), ("gpt", "activation_function"), ("gemma", "hidden_activation")):
        model = plugin(name, **({} if name == "gemma" else {"gelu_approximate": "tanh"}))
        own = model.hf_config() or {}
        for other in ("gelu_fast", "gelu_new", "gelu_pytorch_tanh"):
            assert model.from_hf({**own, key: other}) == model.from_hf(own), (name, other)
    assert (plugin("neox", gelu_approximate="tanh").hf_config() or {})["hidden_act"] == "gelu_fast"


def test_a_window_is_mistrals() -> None:
    """Null, or more than the longest sequence, is no window; a llama has none whatever its file says."""
    llama, written = plugin("llama", sliding_window=5), {**LLAMA, "model_type": "mistral"}
    for said, read in ((5, 5), (None, None), (64, None)):
        assert (llama.from_hf({**written, "sliding_window": said}) or {}).get("sliding_window") == read
    assert "sliding_window" not in (llama.from_hf({**written, "model_type": "llama", "sliding_window": 5}) or {})
    with pytest.raises(ConfigError, match="sliding_window = '4k': must be an integer"):
        llama.from_hf({**written, "sliding_window": "4k"})
