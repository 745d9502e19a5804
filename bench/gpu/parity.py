"""The curve on the device against the CPU's, from one fp32 checkpoint; and bands for lower precisions.

In fp32 with TF32 off a device must stay within the tolerances of docs/correctness.md, which hold between layouts on a
CPU. A lower precision has a band around the fp32 curve: wide enough for its rounding, too narrow for a wrong scale.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from bench.gpu import isolated, jobs, reference
from bench.gpu.jobs import Keys
from bench.gpu.records import Row
from bench.gpu.setting import Setting

LOSS_RTOL, NORM_RTOL = 1e-5, 1e-4
"""Of docs/correctness.md."""

LIMIT_S, AT_ONCE = 150.0, 6
"""Of a job, which takes little of a GPU; and how many jobs share one."""

BANDS = {"bf16": (2e-3, 2e-2), "fp16": (2e-4, 5e-3), "float8": (1e-2, 1e-1)}
"""Largest relative difference of loss and gradient norm from the fp32 curve, at any of 20 steps."""

FP32: dict[str, tuple[str, Keys]] = {
    "eager": ("untied", {}),
    "compiled": ("untied", {"plugins.compile.enabled": True}),
    "recompute full": ("untied", {"plugins.activation_checkpoint.mode": "full"}),
    "recompute every second block": ("untied", {"plugins.activation_checkpoint.mode": "every_n"}),
    "recompute selective": ("untied", {"plugins.activation_checkpoint.mode": "selective"}),
    "compiled, recompute full": (
        "untied",
        {"plugins.compile.enabled": True, "plugins.activation_checkpoint.mode": "full"},
    ),
    "compiled, recompute selective": (
        "untied",
        {"plugins.compile.enabled": True, "plugins.activation_checkpoint.mode": "selective"},
    ),
    "4 micro batches": ("untied", {"train.micro_batch_size": 2}),
    "4 micro batches, ZeRO stage 3": ("untied", {"train.micro_batch_size": 2, "plugins.fsdp.zero_stage": 3}),
    "no loader workers": ("untied", {"data.workers": 0}),
    "tied": ("tied", {}),
    "packed documents": ("packed", {}),
    "packed documents, compiled": ("packed", {"plugins.compile.enabled": True}),
}
"""By name: the curve that a job must draw, and its keys."""


def fp32(setting: Setting) -> Iterator[Row]:
    """Every job of `FP32`."""
    # One job compiles to code in a rehearsal too; a CPU would take a minute for each of the others.
    slow = {"plugins.compile.backend": "aot_eager"} if setting.rehearse else {}
    yield from _against(
        setting,
        {
            name: (curve, {**keys, **(slow if "plugins.compile.enabled" in keys and name != "compiled" else {})})
            for name, (curve, keys) in FP32.items()
        },
        (LOSS_RTOL, NORM_RTOL),
    )


def bf16(setting: Setting) -> Iterator[Row]:
    """bf16, eager and compiled."""
    keys: Keys = {"plugins.bf16.enabled": True}
    compiled = {**keys, "plugins.compile.backend": setting.size("inductor", "aot_eager")}
    jobs_ = {"bf16, eager": ("untied", keys), "bf16, compiled": ("untied", compiled)}
    yield from _against(setting, jobs_, BANDS["bf16"])


def fp16(setting: Setting) -> Iterator[Row]:
    """fp16 with its loss scale, eager."""
    yield from _against(setting, {"fp16": ("untied", {"plugins.fp16.enabled": True})}, BANDS["fp16"])


def float8(setting: Setting) -> Iterator[Row]:
    """float8 in each recipe, compiled as it is meant to be used."""
    keys: Keys = {
        "plugins.bf16.enabled": True,
        "plugins.compile.enabled": True,
        "plugins.compile.backend": setting.size("inductor", "aot_eager"),
        "plugins.float8.emulate": setting.size("auto", "always"),
    }
    recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    jobs_ = {f"float8, {recipe}": ("untied", {**keys, "plugins.float8.recipe": recipe}) for recipe in recipes}
    yield from _against(setting, jobs_, BANDS["float8"])


def _against(setting: Setting, jobs_: Mapping[str, tuple[str, Keys]], bounds: tuple[float, float]) -> Iterator[Row]:
    """Largest relative differences of loss and gradient norm over all steps; each job in a process of its own."""
    works = [partial(_differences, setting, name, curve, keys) for name, (curve, keys) in jobs_.items()]
    for index, worst in isolated.calls(works, setting.log, LIMIT_S, setting.size(AT_ONCE, 1)):
        name = list(jobs_)[index]
        if isinstance(worst, isolated.CallError):
            yield Row(f"{name}: loss", str(worst), passed=False)
            continue
        for key, value, bound in zip(("loss", "grad_norm"), worst, bounds, strict=True):
            yield Row(f"{name}: {key}", value, f"(at most {bound:g})", value <= bound)


def _differences(setting: Setting, name: str, curve: str, keys: Keys) -> list[float]:
    """Largest relative difference of the loss, and of the gradient norm, from the CPU's curve."""
    steps = setting.size(20, 5)
    theirs = {step: row for step, row in reference.curve(setting, curve).items() if step <= steps}
    torch.set_float32_matmul_precision("highest")  # fp32 products in fp32
    ours = jobs.train(setting, f"parity {name}", {**reference.keys_of(setting, curve), "train.steps": steps, **keys})
    assert ours.keys() == theirs.keys(), f"{name}: steps {sorted(ours)}, the CPU's curve has {sorted(theirs)}"
    return [max(_apart(ours[step][key], theirs[step][key]) for step in theirs) for key in ("loss", "grad_norm")]


def _apart(ours: float | None, theirs: float) -> float:
    return float("inf") if ours is None else abs(ours / theirs - 1)
