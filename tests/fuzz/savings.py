"""What saves time or memory in a drawn job: optimizer, precision, operation of attention, recomputation, offloading.

A generator of its own draws it, so a job is otherwise the one that it was before.
"""

import random
from collections.abc import Mapping
from typing import Any

from titan.contracts.plugin import registry

Keys = dict[str, Any]

EPS = 1e-4
"""A gradient that is zero but for rounding, as of a key's bias, would else be moved by nothing but its sign."""
OPTIMIZERS: Mapping[str, Keys] = {
    "adamw": {"eps": EPS},
    "muon": {"eps": EPS, "adamw_eps": EPS},
    "schedule_free_adamw": {"eps": EPS},
    "adamw_8bit": {"eps": EPS},
    "adafactor": {},
    "lion": {},
    "sgd": {},
}
ROUNDINGS = ("nearest", "stochastic", "kahan")
GROUPS = '[{match = ["table", "vector"], lr = 1e-4}]'
PRECISIONS: Mapping[str, int] = {"fp32": 66, "bf16": 10, "pure": 8, "fp16": 8, "float8": 8}
"""By how often they are drawn, in percent."""
EIGHT = {"model.dim": 64, "model.n_heads": 4, "model.n_kv_heads": 4, "model.ffn_dim": 128}
"""A model whose products have sizes that float8 takes, on up to 4 ranks."""
WHERE_ASKED = {"model.expert_dim": 64, "model.rotary_pct": 0.5}


NOISY = ("adamw_8bit", "adafactor", "lion")
"""Optimizers whose updates do not vanish with the gradient, or round their state by blocks of a shard."""
BOUNDS: Mapping[str, Mapping[str, float] | None] = {
    "float32": None,
    "float32, noisy": {},
    "fp16": {"loss": 5e-4, "validation_loss": 5e-4, "grad_norm": 2e-2},
    "bf16": {"loss": 1e-2, "validation_loss": 1e-2, "grad_norm": 5e-2},
    "float8": {"loss": 1.6e-2, "validation_loss": 1.6e-2, "grad_norm": 5e-2},
}
"""Arithmetic -> largest relative differences of rows, in place of those of the tolerance table; None: weights too.

They are about twice the largest among 300 jobs of seed 2, some of which have a weight scale of 0.2 and four tokens.
"""

COUNTED = {
    "optimizer.groups": "optimizer groups",
    "loss.chunk_tokens": "chunks of {} tokens",
    "plugins.attention.backend": "attention {}",
    "plugins.offload.parameters": "parameters on the host",
    "plugins.offload.optimizer": "optimizer on the host",
    "plugins.offload.activations": "activations on the host",
    "plugins.update_in_backward.enabled": "updates in backward",
    "plugins.bf16.enabled": "bf16",
    "plugins.bf16.rounding": "pure bf16 {}",
    "plugins.fp16.init_scale": "fp16",
    "plugins.float8.recipe": "float8 {}",
}
"""Key -> what a job that has it is counted by."""

SPOILT: Mapping[str, tuple[Any, ...]] = {
    "optimizer.name": (*OPTIMIZERS, "adam"),
    "optimizer.groups": ('[{match = "norms"}]', '[{match = "layers.*", lr = 1e-5}]', "[]"),
    "plugins.bf16.rounding": ("nearest", "stochastic"),
    "plugins.fp16.init_scale": (1024, 1000),
    "plugins.float8.recipe": ("tensorwise", "mxfp8"),
    "plugins.offload.parameters": (True,),
    "plugins.attention.backend": ("flash", "cpu", "documents", "math"),
    "plugins.update_in_backward.enabled": (True,),
}
"""Values that many jobs cannot have."""


def save(rng: random.Random, curve: Keys, layout: Keys) -> None:
    """Draw for a job that is meant to be legal."""
    _optimizer(rng, curve)
    _precision(rng, curve, layout)
    if rng.random() < 0.4:
        layout["loss.chunk_tokens"] = rng.choice((1, 2, 3, 5, 8, 1000))
    if rng.random() < 0.35:
        layout["plugins.attention.backend"] = rng.choice(_backends(curve, layout))
    if rng.random() < 0.3:
        layout |= _offloaded(rng, curve, layout)
    if rng.random() < 0.15:
        layout |= _recomputed(rng, layout)
    if _may_update_within(curve, layout):
        curve["train.grad_clip"] = 0
        layout["plugins.update_in_backward.enabled"] = True


def degree(layout: Keys, *axes: str) -> int:
    """Of the mesh axes together."""
    product = 1
    for axis in axes:
        product *= layout.get(f"mesh.{axis}", 1)
    return product


def _optimizer(rng: random.Random, curve: Keys) -> None:
    name = "adamw" if rng.random() < 0.5 else rng.choice(list(OPTIMIZERS))
    curve |= {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in OPTIMIZERS[name].items()}}
    if name == "schedule_free_adamw":
        curve["lr_schedule.name"] = "constant"
    if rng.random() < 0.15:
        curve["optimizer.groups"] = GROUPS


def _separable(curve: Keys) -> bool:
    return any(plugin.name == curve["optimizer.name"] and plugin.separable for plugin in registry.of_kind("optimizer"))


def _precision(rng: random.Random, curve: Keys, layout: Keys) -> None:
    drawn = rng.choices(list(PRECISIONS), list(PRECISIONS.values()))[0]
    if drawn == "bf16":
        curve["plugins.bf16.enabled"] = True
    elif drawn == "pure":
        curve |= {
            "plugins.bf16.pure": True,
            "plugins.bf16.rounding": rng.choice(ROUNDINGS if _separable(curve) else ROUNDINGS[:1]),
        }
    elif drawn == "fp16":
        curve |= {
            "plugins.fp16.init_scale": rng.choice((64, 1024)),
            "plugins.fp16.growth_interval": rng.choice((1, 2000)),
        }
    elif drawn == "float8" and degree(layout, "tp", "cp") in (1, 2, 4):
        recipes = ("rowwise_with_gw_hp", "mxfp8_with_gw_hp") if degree(layout, "tp") < 4 else ("rowwise_with_gw_hp",)
        recipe = rng.choice(recipes)
        curve |= EIGHT | {key: value for key, value in WHERE_ASKED.items() if key in curve}
        curve |= {"plugins.float8.recipe": recipe, "plugins.float8.emulate": "always", "plugins.bf16.enabled": True}
        curve.pop("model.head_dim", None)
        layout.pop("plugins.compile.backend", None)


def _backends(curve: Keys, layout: Keys) -> tuple[str, ...]:
    """Operations that follow what attention does in this model."""
    if degree(layout, "cp") > 1 or curve.get("model.attention_cap") or curve["model.name"] == "bloom":
        return ("auto",)
    return ("auto", "math", "documents")


def _offloaded(rng: random.Random, curve: Keys, layout: Keys) -> Keys:
    gathers = degree(layout, "dp_shard") > 1 and degree(layout, "dp_replicate", "tp", "ep") == 1
    elsewhere = degree(layout, "pp") > 1 and curve["model.tied"]
    what = {
        "parameters": gathers and not elsewhere and _separable(curve) and rng.random() < 0.8,
        "optimizer": _separable(curve) and rng.random() < 0.8,
        "activations": "mesh.ep" not in layout and rng.random() < 0.7,
    }
    what["buffer_mib"] = rng.choice((0.001, 64))
    return {f"plugins.offload.{key}": value for key, value in what.items()}


def _recomputed(rng: random.Random, layout: Keys) -> Keys:
    modes = ("none", "auto", "attention")
    mode = rng.choice(("budget",) if "plugins.compile.backend" in layout else modes)
    return {"plugins.activation_checkpoint.mode": mode}


def _may_update_within(curve: Keys, layout: Keys) -> bool:
    """Where nothing needs the gradients of all parameters, and a step is one micro batch."""
    ranks = degree(layout, "dp_replicate", "dp_shard")
    alone = layout.get("train.micro_batch_size") == curve["train.global_batch_size"] // ranks
    summed = degree(layout, "tp", "pp") > 1 or "plugins.fp16.init_scale" in curve
    return alone and not summed and _separable(curve)


def arithmetic(curve: Mapping[str, Any]) -> str:
    """What a job is held to: a key of `BOUNDS`."""
    if "plugins.float8.recipe" in curve:
        return "float8"
    if any(key.startswith("plugins.bf16.") for key in curve):
        return "bf16"
    if "plugins.fp16.init_scale" in curve:
        return "fp16"
    return "float32, noisy" if curve["optimizer.name"] in NOISY else "float32"


def features(keys: Mapping[str, Any]) -> set[str]:
    """Those of a job, in words that can be counted."""
    found = {f"optimizer {keys['optimizer.name']}"}
    for key, words in COUNTED.items():
        if keys.get(key):
            found.add(words.format(keys[key]))
    return found
