"""What models share on the way to and from Hugging Face: names of tensors, sizes, and the checks of a config.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan.contracts.base.spec import HfTensor
from titan.errors import ConfigIssue

SIZES: Mapping[str, str] = {
    "num_hidden_layers": "n_layers", "hidden_size": "dim", "num_attention_heads": "n_heads",
    "intermediate_size": "ffn_dim", "vocab_size": "vocab_size", "max_position_embeddings": "max_seq_len",
}  # fmt: skip
"""Key of a config.json -> option, in the names that most decoders have."""

LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk",
    "self_attn.v_proj": "attn.wv", "self_attn.o_proj": "attn.wo", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn.w1", "mlp.up_proj": "ffn.w3", "mlp.down_proj": "ffn.w2",
}  # fmt: skip
"""Module of a layer there -> here, for a `PreNormLayer` of `SelfAttention` and `SwiGLU` without biases."""


def decoder_tensors(n_layers: int, layer: Mapping[str, str], *, tied: bool) -> Sequence[HfTensor]:
    """The tensors of a decoder without biases, named `model.layers.0.MODULE.weight`.  layer: as `LAYER`."""
    layers = [
        HfTensor(f"model.layers.{i}.{theirs}.weight", (f"layers.{i}.{ours}.weight",))
        for i in range(n_layers)
        for theirs, ours in layer.items()
    ]
    embed, norm = (
        HfTensor("model.embed_tokens.weight", ("embed.weight",)),
        HfTensor("model.norm.weight", ("norm.weight",)),
    )
    head = HfTensor("lm_head.weight", ("embed.weight",) if tied else ("output.weight",), copy=tied)
    return [embed, *layers, norm, head]


def biased_tensors(
    layers: str, n_layers: int, layer: Mapping[str, tuple[str, ...]], *, transposed: bool = False, groups: int = 1
) -> list[HfTensor]:
    """Weights and biases of a decoder's layers, named `LAYERS.0.MODULE.weight` and `.bias`.

    Args:
        layers: what precedes the number of a layer there, such as "transformer.h".
        n_layers: number of layers.
        layer: module of a layer there -> modules here; several are joined.
        transposed: weights of linears are [in, out] there.
        groups: of joined tensors, as in `HfTensor`.
    """
    return [
        HfTensor(
            f"{layers}.{i}.{theirs}.{kind}",
            tuple(f"layers.{i}.{name}.{kind}" for name in ours),
            transposed=transposed and kind == "weight" and not ours[0].endswith("norm"),
            groups=groups if len(ours) > 1 else 1,
        )
        for i in range(n_layers)
        for theirs, ours in layer.items()
        for kind in ("weight", "bias")
    ]


def issue(text: str) -> ConfigIssue:
    """An issue of a config.json; starts with its key."""
    return ConfigIssue("config.json", text)


def size_issues(config: Mapping[str, Any], keys: Iterable[str]) -> list[ConfigIssue]:
    """Issues of keys whose values are no positive integers."""
    return [
        issue(f"{key} = {config.get(key)!r}: must be an integer of at least 1")
        for key in keys
        if type(config.get(key)) is not int or config[key] < 1
    ]


def fixed_issues(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[ConfigIssue]:
    """Issues of keys that are there with another value than the only one that the model has; and of quantization."""
    return [
        issue(f"{key} = {config[key]!r}: this model has {value!r} only")
        for key, value in {**fixed, "quantization_config": None}.items()
        if config.get(key, value) not in (value, None)
    ]


def read_rope(
    config: Mapping[str, Any], kinds: Mapping[str, Sequence[str]], *, partial: bool = False, theta: float = 1e4
) -> tuple[float, Mapping[str, Any], list[ConfigIssue]]:
    """(theta, scaling, issues) of the rotary keys, as transformers 4 and 5 write them.

    scaling: the table `rope_scaling` or `rope_parameters` where its type is not "default", else empty.

    Args:
        config: a config.json.
        kinds: each `rope_type` that the model supports -> the keys that its table must have.
        partial: the model may rotate a share of each head, and reads `partial_rotary_factor` itself.
        theta: what transformers takes where the config says none.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        return 0.0, {}, [issue(f"{name} = {rope!r}: must be an object")]
    issues = []
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        issues.append(issue(f"{name} rope_type = {kind!r}: this model has {' and '.join(map(repr, kinds))} only"))
    if not partial and rope.get("partial_rotary_factor", 1) != 1:
        told = f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: this model supports only 1"
        issues.append(issue(f"{name} {told}"))
    issues += [issue(f"{name} {key}: missing") for key in kinds.get(str(kind), ()) if key not in rope]
    found = rope.get("rope_theta") or config.get("rope_theta") or theta
    return found, {} if kind == "default" else rope, issues
