"""What models share on the way to and from Hugging Face: names of tensors, sizes, and the checks of a config.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

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

_TANH = ("gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
_SAME: Mapping[str, str] = {"swish": "silu", "gelu_python": "gelu", **dict.fromkeys(_TANH, "gelu_new")}
"""Activation -> another name of the same function."""

_FIXED: Mapping[str, Any] = {"is_causal": True, "per_layer_config": None, "transformers_weights": None}
"""Keys that transformers reads for every architecture -> the only value that models here have."""


def decoder_tensors(n_layers: int, layer: Mapping[str, str], *, tied: bool) -> Sequence[HfTensor]:
    """The tensors of a decoder without biases, named `model.layers.0.MODULE.weight`.  layer: as `LAYER`."""
    layers = [
        HfTensor(f"model.layers.{i}.{theirs}.weight", (f"layers.{i}.{ours}.weight",))
        for i in range(n_layers)
        for theirs, ours in layer.items()
    ]
    embed = HfTensor("model.embed_tokens.weight", ("embed.weight",))
    head = HfTensor("lm_head.weight", ("embed.weight",) if tied else ("output.weight",), copy=tied)
    return [embed, *layers, HfTensor("model.norm.weight", ("norm.weight",)), head]


def biased_tensors(
    layers: str, n_layers: int, layer: Mapping[str, tuple[str, ...]], *, transposed: bool = False, groups: int = 1
) -> list[HfTensor]:
    """Weights and biases of a decoder's layers, named `LAYERS.0.MODULE.weight` and `.bias`.

    layers: what precedes the number of a layer there, such as "transformer.h".
    layer: module of a layer there -> modules here; several are joined.
    transposed: weights of linears are [in, out] there.  groups: of joined tensors, as in `HfTensor`.
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


def head_issues(config: Mapping[str, Any]) -> list[ConfigIssue]:
    """Issues of heads of another size than hidden_size / num_attention_heads, which are sizes."""
    size = config["hidden_size"] // config["num_attention_heads"]
    known = config.get("head_dim") in (None, size)
    return [] if known else [issue(f"head_dim = {config['head_dim']!r}: this model has {size} only")]


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any], **also: str) -> dict[str, Any]:
    """A config.json with the defaults of transformers for keys that it leaves out.

    also: another name of a key -> the key. Where a file has both, transformers takes the value of the other name.
    """
    renamed = {key: config[name] for name, key in also.items() if config.get(name) is not None}
    return {**defaults, **config, **renamed}


def activation(name: object) -> object:
    """One name for all activations that are the same function, as "gelu_fast" and "gelu_new" are up to rounding."""
    return _SAME.get(name, name) if isinstance(name, str) else name


def fixed_issues(
    config: Mapping[str, Any], fixed: Mapping[str, Any], layers: Sequence[str] = ("full_attention",)
) -> list[ConfigIssue]:
    """Issues of keys that are there with another value than the only one that the model has; and of quantization.

    fixed: key -> value. A null stands for a value that is false or 0; a value that is another name is the same.
    layers: what `layer_types` may call a layer.
    """
    issues = [
        issue(f"{key} = {config[key]!r}: this model has {value!r} only")
        for key, value in {**fixed, **_FIXED}.items()
        if activation(config.get(key, value)) != activation(value) and (config[key] or value)
    ]
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in layers for kind in kinds):
        issues.append(issue(f"layer_types: this model has {' and '.join(layers)} only"))
    if packed := {"quantization_config", "compression_config"} & {key for key in config if config[key]}:
        issues.append(issue(f"{packed.pop()}: the weights are quantized; convert them to plain numbers first"))
    return issues


def read_gelu(config: Mapping[str, Any], key: str) -> tuple[Literal["none", "tanh"], list[ConfigIssue]]:
    """(`approximate` of `FeedForward`, issues) of the key of an activation."""
    name = activation(config[key])
    wrong = issue(f"{key} = {config[key]!r}: this model has 'gelu' and 'gelu_new' only")
    return "tanh" if name == "gelu_new" else "none", [] if name in ("gelu", "gelu_new") else [wrong]


def read_rope(
    config: Mapping[str, Any], kinds: Mapping[str, Sequence[str]], *, partial: bool = False, theta: float = 1e4
) -> tuple[float, Mapping[str, Any], list[ConfigIssue]]:
    """(theta, scaling, issues) of the rotary keys, as transformers 4 and 5 write them.

    scaling: the table `rope_scaling` or `rope_parameters` where its type is not "default", else empty.
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
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if not partial and share != 1:
        issues.append(issue(f"{name} partial_rotary_factor = {share!r}: this model supports only 1"))
    issues += [issue(f"{name} {key}: missing") for key in kinds.get(str(kind), ()) if key not in rope]
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    issues += [issue(f"{name} {key}: this model rotates all layers alike") for key in nested]
    return rope.get("rope_theta", config.get("rope_theta", theta)), {} if kind == "default" else rope, issues
