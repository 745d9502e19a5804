"""The CPU's side of parity: a checkpoint in fp32, and the curve that each job draws from it on a CPU.

Made once, wherever there is a CPU, and carried to the machine with the GPU: initial weights differ between versions of
PyTorch and between devices, so both sides start from the same checkpoint.
"""

import json
from dataclasses import replace

from bench.gpu import jobs
from bench.gpu.jobs import Curve, Keys
from bench.gpu.setting import Setting

JOBS: dict[str, Keys] = {"untied": {}, "tied": {"model.tied": True}, "packed": {"data.packing": "document_mask"}}
"""Each has a curve of its own. All but `tied` start from the weights of `untied`."""

STEPS_BEFORE = 4
"""Steps that the checkpoint has seen: weights that are no longer symmetric noise."""


def make(setting: Setting) -> None:
    """Make checkpoints and curves in `setting.reference`, unless they are there."""
    if (setting.reference / "curves.json").exists():
        return
    on_cpu = replace(setting, folder=setting.reference, rehearse=True)
    shard = jobs.tokens(setting.reference, 512, 1 << 16)
    for weights in ("untied", "tied"):
        saving = {"train.steps": STEPS_BEFORE, "checkpoint.enabled": True, "checkpoint.async": False}
        jobs.train(on_cpu, weights, {"data.path": shard, **saving, **JOBS[weights]})
    curves = {name: jobs.train(on_cpu, f"curve-{name}", keys_of(on_cpu, name)) for name in JOBS}
    fresh = setting.reference / "curves.json.tmp"
    fresh.write_text(json.dumps(curves) + "\n")
    fresh.replace(setting.reference / "curves.json")


def keys_of(setting: Setting, name: str) -> Keys:
    """The keys with which a job draws the curve called `name`, on any device."""
    weights = "tied" if name == "tied" else "untied"
    checkpoint = setting.reference / "runs" / weights / "checkpoints" / f"step-{STEPS_BEFORE:08}"
    shard = jobs.tokens(setting.reference, 512, 1 << 16)
    return {"data.path": shard, "checkpoint.init_from": checkpoint, **JOBS[name]}


def curve(setting: Setting, name: str) -> Curve:
    """The CPU's rows by step."""
    curves = json.loads((setting.reference / "curves.json").read_text())
    return {int(step): row for step, row in curves[name].items()}
