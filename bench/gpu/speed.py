"""Whole steps of Llama 3.2 1B with an untied head, on random tokens: bf16, float8, recomputation, packing, saves."""

import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from bench.gpu import jobs
from bench.gpu.records import Row
from bench.gpu.setting import Setting
from bench.gpu.shapes import B1, B3, Shape, flops_per_step, keys_of, mfu
from titan.training import build, trainer

STEPS = 10
FLOAT8 = {"plugins.float8.recipe": "tensorwise"}, {"plugins.float8.recipe": "rowwise"}
LESS: Mapping[str, Mapping[str, object]] = {
    "optimizer on the host": {"plugins.offload.optimizer": True},
    "activations on the host": {"plugins.offload.optimizer": False, "plugins.offload.activations": True},
    "parameters on the host": {"plugins.offload.parameters": True, "plugins.fsdp.enabled": True},
    "8-bit state": {"optimizer.name": "adamw_8bit"},
    "updates in backward": {"plugins.update_in_backward.enabled": True, "train.grad_clip": 0},
    "pure bf16": {"plugins.bf16.pure": True},
    "half of what the compiler would save": {"plugins.activation_checkpoint.mode": "budget"},
}
"""What each leaves on the device, by name."""


def b1(setting: Setting) -> Iterator[Row]:
    """1 B at 8,192 tokens, bf16, compiled."""
    yield from _speed(setting, B1, {})


def float8(setting: Setting) -> Iterator[Row]:
    """1 B with the products of its layers in float8, the head in bf16."""
    for keys in FLOAT8:
        yield from _speed(setting, B1, keys, str(keys["plugins.float8.recipe"]) + ": ")


def recompute(setting: Setting) -> Iterator[Row]:
    """1 B with each mode of recomputation."""
    for mode in ("selective", "full"):
        yield from _speed(setting, B1, {"plugins.activation_checkpoint.mode": mode}, f"{mode}: ")


def packed(setting: Setting) -> Iterator[Row]:
    """1 B over the whole sample, and within documents: with a mask, and by the operation that titan picks."""
    documents = {"data.packing": "document_mask"}
    ways = {"streamed": {}, "a mask": documents, "no mask": {**documents, "plugins.attention.enabled": True}}
    for name, keys in ways.items():
        yield from _speed(setting, B1, keys, f"{name}: ")


def float8_3b(setting: Setting) -> Iterator[Row]:
    """3 B in bf16, and with the products of its layers in float8."""
    for keys in ({}, *FLOAT8):
        yield from _speed(setting, B3, keys, f"{keys.get('plugins.float8.recipe', 'bf16')}: ")


def memory(setting: Setting) -> Iterator[Row]:
    """1 B with less on the device, as each technique means it."""
    for name, keys in LESS.items():
        yield from _speed(setting, B1, keys, f"{name}: ")


def _speed(setting: Setting, shape: Shape, keys: Mapping[str, object], label: str = "") -> Iterator[Row]:
    """Seconds per step, tokens/s, both MFUs and peak memory of a job."""
    began = time.perf_counter()
    with jobs.open_run(setting, jobs.SPEED, f"speed {shape.name}", {**keys_of(setting, shape), **keys}) as run:
        first = setting.timed(lambda: trainer.step(run, next(iter(run.loader))))
        yield Row(f"{label}start to end of the first step", time.perf_counter() - began, "s")
        each = jobs.step_seconds(setting, run, setting.size(STEPS, 2), warm_up=setting.size(3, 1))
        row = jobs.seconds_in_a_row(setting, run, setting.size(STEPS, 2))
        yield from speed_rows(setting, run, first, each, row, label)


def speed_rows(
    setting: Setting, run: build.Run, first: float, each: list[float], in_a_row: float, label: str
) -> Iterator[Row]:
    """The figures of a job's steps."""
    seq_len, middle = run.job.data.seq_len, statistics.median(each)
    yield Row(f"{label}first step", first, "s")
    yield Row(f"{label}step, device waited for around each", middle, "s")
    yield Row(f"{label}step, queued one after the other", in_a_row, "s")
    yield Row(f"{label}tokens/s", run.job.tokens_per_step / in_a_row, "tokens/s")
    for counted, flops in flops_per_step(run.context.spec, seq_len).items():
        yield Row(f"{label}MFU, {counted} attention", mfu(setting, flops, in_a_row))
    reserved = None if setting.rehearse else torch.cuda.max_memory_reserved() / 2**30
    yield Row(f"{label}peak memory reserved", reserved, "GiB")


def loader(setting: Setting) -> Iterator[Row]:
    """Tokens/s of the loader alone, its batches on the device, beside those of training 1 B."""
    for packing in ("concat", "document_mask"):
        with jobs.open_run(setting, jobs.SPEED, "loader", {**keys_of(setting, B1), "data.packing": packing}) as run:
            batches = iter(run.loader)
            next(batches)  # starts the processes that read ahead
            count = setting.size(500, 4)
            seconds = setting.timed(lambda: [next(batches) for _ in range(count)]) / count  # noqa: B023  called at once
            step = statistics.median(jobs.step_seconds(setting, run, setting.size(5, 1), warm_up=setting.size(3, 1)))
            yield Row(f"{packing}: loader", run.job.tokens_per_step / seconds, "tokens/s")
            yield Row(f"{packing}: loader, relative to training", step / seconds)


def saves(setting: Setting) -> Iterator[Row]:
    """A save in the background of 0.8 B with optimizer state: what it stalls, slows and writes; and a load."""
    layers = setting.size({"model.n_layers": 4}, {})
    keys = {**keys_of(setting, B1), **layers, "checkpoint.enabled": True, "checkpoint.keep_latest": 1}
    with jobs.open_run(setting, jobs.SPEED, "saves", {**keys, "checkpoint.resume": "never"}) as run:
        assert run.checkpointer is not None
        before = statistics.median(jobs.step_seconds(setting, run, 5))
        yield Row("step", before, "s")
        for which in ("first", "second"):
            yield from _save(setting, run, which, before)
        yield Row("step after the saves", statistics.median(jobs.step_seconds(setting, run, 5, warm_up=0)), "s")
        path = run.checkpointer.find("required")
        assert path is not None
        seconds = setting.timed(lambda: run.checkpointer.load(path, run.parts, run.optimizer))
        yield Row("load, after the files were hashed", _bytes(path) / seconds / 1e9, "GB/s")


def _save(setting: Setting, run: build.Run, which: str, step: float) -> Iterator[Row]:
    assert run.checkpointer is not None
    writing: list[float] = []
    began = time.perf_counter()
    stall = setting.timed(lambda: trainer.save(run))
    while run.checkpointer._writer is not None and run.checkpointer._writer.is_alive():
        writing += jobs.step_seconds(setting, run, 1, warm_up=0)
    run.checkpointer.wait()
    seconds = time.perf_counter() - began
    path = sorted(run.checkpointer.folder.glob("step-*"))[-1]
    yield Row(f"{which} save: stall", stall, "s")
    yield Row(f"{which} save: stall, share of a step", stall / step)
    yield Row(f"{which} save: step while writing", statistics.median(writing) if writing else None, "s")
    yield Row(f"{which} save: written and synced", _bytes(path) / seconds / 1e9, "GB/s")
    run.step += not writing  # a save of the same step would be left out


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
