"""Whole steps of titan and torchtitan in turns: the same untied model, tokens, optimizer and compilation by block."""

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.gpu import jobs
from bench.gpu.records import Row
from bench.gpu.setting import Setting
from bench.gpu.shapes import B1, B3, Shape, flops_per_step, keys_of, mfu
from titan.contracts import ModelSpec
from titan.training import trainer

TURNS = 2
NEEDED = ("torchtitan", "tyro", "datasets", "tokenizers", "einops")
"""datasets may be a stub: torchtitan imports it, and this comparison reads no text."""


def b1(setting: Setting) -> Iterator[Row]:
    """1 B at 8,192."""
    yield from _turns(setting, B1)


def b3(setting: Setting) -> Iterator[Row]:
    """3 B at 4,096."""
    yield from _turns(setting, B3)


def _turns(setting: Setting, shape: Shape) -> Iterator[Row]:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    failure = f"cannot be imported: no {', '.join(absent)}" if absent else ""
    ours, theirs = list[float](), list[float]()
    for _ in range(TURNS):
        spec, asked, took = _ours(setting, shape)
        ours.append(took)
        if failure:
            break
        setting.free()  # the GPU is torchtitan's now
        try:
            theirs.append(_theirs(asked)["in_a_row_s"])
        except RuntimeError as error:
            failure = str(error)
    yield from _rows(setting, spec, asked["seq_len"], "titan", ours)
    if failure:
        yield Row("torchtitan", failure, passed=None if absent else False)
        return
    yield from _rows(setting, spec, asked["seq_len"], "torchtitan", theirs)
    yield Row("speed of titan over torchtitan", statistics.median(theirs) / statistics.median(ours))


def _rows(setting: Setting, spec: ModelSpec, seq_len: int, who: str, taken: list[float]) -> Iterator[Row]:
    step = statistics.median(taken)
    yield Row(f"{who}: step, by turn", ", ".join(f"{one:.4f}" for one in taken), "s")
    yield Row(f"{who}: tokens/s", seq_len / step, "tokens/s")
    for counted, flops in flops_per_step(spec, seq_len).items():
        yield Row(f"{who}: MFU, {counted} attention", mfu(setting, flops, step))


def _ours(setting: Setting, shape: Shape) -> tuple[ModelSpec, dict[str, Any], float]:
    """titan's turn: its spec, what torchtitan is to be asked, and seconds per step."""
    keys, steps = keys_of(setting, shape), setting.size(10, 2)
    with jobs.open_run(setting, jobs.SPEED, f"turn {shape.name}", keys) as run:
        for _ in range(setting.size(3, 1)):
            trainer.step(run, next(iter(run.loader)))
        took, spec, job = jobs.seconds_in_a_row(setting, run, steps), run.context.spec, run.job
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    return spec, {
        **{name: getattr(spec, name) for name in sizes}, "seq_len": job.data.seq_len, "steps": steps,
        "warm_up": setting.size(2, 1), "device": setting.device.type, "backend": setting.size("inductor", "aot_eager"),
        "batch": 1, "dtype": "bfloat16", "tp": 1,
        "recompute": keys.get("plugins.activation_checkpoint.mode", "none"), "tokens": str(keys["data.path"]),
        "folder": str(setting.folder / "torchtitan"),
    }, took  # fmt: skip


def _theirs(asked: dict[str, Any]) -> dict[str, float]:
    """torchtitan's turn."""
    command = [sys.executable, "-m", "bench.gpu.opponent", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(f"torchtitan: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
