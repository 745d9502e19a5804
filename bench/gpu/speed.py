"""Whole steps of the jobs of `bench.gpu.shapes`, each in a process of its own; the loader, and saves."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import isolated, jobs
from bench.gpu.records import Row
from bench.gpu.setting import Setting, no_garbage
from bench.gpu.shapes import JOBS, flops_per_step, keys_of, mfu
from titan.training import build, trainer

STEPS = 10
LIMIT_S = 240.0
AT_ONCE = 12
"""Processes that compile beside each other, on a host of one GPU with some 16 cores."""


def speeds(*names: str) -> Callable[[Setting], Iterator[Row]]:
    """The measurement of these jobs, one after the other. One that fails does not end the others."""

    def measure(setting: Setting) -> Iterator[Row]:
        for name in names:
            try:
                taken = isolated.call(partial(steps_of, setting, name), setting.log, LIMIT_S)
            except isolated.CallError as error:
                yield Row(f"{name}: step", str(error), passed=False)
                continue
            yield from rows(name, taken)

    return measure


def steps_of(setting: Setting, name: str) -> dict[str, Any]:
    """Measure a job, in a process that has not touched the device.

    Returns "first_s": from the start of the build to the end of the first step; "steps_s", seconds of steps;
    "tokens" per step and rank; "dropped": updates that were not made, for want of finite gradients; "mfu" by how
    attention is counted; "allocated_gib" and "reserved_gib", and "sizes" of the model.
    """
    shape, steps = JOBS[name], setting.size(STEPS, 2)
    began = time.perf_counter()
    with jobs.open_run(setting, jobs.SPEED, name, keys_of(setting, shape), shape.ranks) as run:
        trainer.step(run, next(iter(run.loader)))
        setting.synchronize()
        first = time.perf_counter() - began
        taken = jobs.step_seconds(setting, run, steps, warm_up=setting.size(2, 1))
        flops = flops_per_step(run.context.spec, run.job.data.seq_len, shape.sequences / shape.ranks)
        step = statistics.median(taken)
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        return {
            "first_s": first,
            "steps_s": taken,
            "tokens": run.job.tokens_per_step // shape.ranks,
            "dropped": run.guard.read()[0].dropped,
            "mfu": {counted: mfu(setting, each, step) for counted, each in flops.items()},
            "allocated_gib": None if setting.rehearse else torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": None if setting.rehearse else torch.cuda.max_memory_reserved() / 2**30,
            "sizes": {key: getattr(run.context.spec, key, None) for key in sizes},
        }


def rows(name: str, taken: dict[str, Any]) -> Iterator[Row]:
    """The figures of a job's steps; of steps that made no update, the memory alone.

    Where ranks are faked, numbers that nobody has reduced may not be finite: that is no fault of the job.
    """
    dropped = taken["dropped"]
    yield Row(f"{name}: updates dropped", dropped, passed=not dropped if JOBS[name].ranks == 1 else None)
    if not dropped:
        step = statistics.median(taken["steps_s"])
        yield Row(f"{name}: step", step, "s", samples=tuple(round(each, 5) for each in taken["steps_s"]))
        yield Row(f"{name}: tokens/s", taken["tokens"] / step, "tokens/s")
        for counted, share in taken["mfu"].items():
            yield Row(f"{name}: MFU, {counted} attention", share)
    yield Row(f"{name}: peak allocated", taken["allocated_gib"], "GiB")
    yield Row(f"{name}: peak reserved", taken["reserved_gib"], "GiB")
    yield Row(f"{name}: start of the build to the end of the first step", taken["first_s"], "s")


def loader(setting: Setting) -> Iterator[Row]:
    """Tokens/s of the loader alone, its batches on the device, beside those of training 1 B."""
    for packing in ("concat", "document_mask"):
        keys = {**keys_of(setting, JOBS["1B"]), "data.packing": packing}
        with jobs.open_run(setting, jobs.SPEED, "loader", keys) as run:
            batches = iter(run.loader)
            next(batches)  # starts the processes that read ahead
            count = setting.size(500, 4)
            seconds = setting.timed(lambda: [next(batches) for _ in range(count)]) / count  # noqa: B023  called at once
            step = statistics.median(jobs.step_seconds(setting, run, setting.size(5, 1), warm_up=setting.size(3, 1)))
            yield Row(f"{packing}: loader", run.job.tokens_per_step / seconds, "tokens/s")
            yield Row(f"{packing}: loader, relative to training", step / seconds)


def saves(setting: Setting) -> Iterator[Row]:
    """Saves in the background of 0.8 B with optimizer state: what they stall, slow down and write; and a load."""
    layers = setting.size({"model.n_layers": 4}, {})
    keys = {**keys_of(setting, JOBS["1B"]), **layers, "checkpoint.enabled": True, "checkpoint.keep_latest": 1}
    with jobs.open_run(setting, jobs.SPEED, "saves", {**keys, "checkpoint.resume": "never"}) as run, no_garbage():
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


def compiled(*names: str) -> Callable[[Setting], Iterator[Row]]:
    """The measurement that fills the compiler's caches for these jobs, several at a time.

    A block is compiled by itself, so one layer and a small vocabulary will do.
    """

    def measure(setting: Setting) -> Iterator[Row]:
        small = {"model.n_layers": 1, "model.vocab_size": 512, "data.path": jobs.tokens(setting.folder, 512, 1 << 16)}
        works = [partial(_compiled, setting, name, {} if setting.rehearse else small) for name in names]
        for index, seconds in isolated.calls(works, setting.log, LIMIT_S, setting.size(AT_ONCE, 1)):
            failed = isinstance(seconds, isolated.CallError)
            value = str(seconds) if failed else seconds
            yield Row(f"{names[index]}: one layer, first step", value, "" if failed else "s", False if failed else None)

    return measure


def _compiled(setting: Setting, name: str, small: dict[str, object]) -> float:
    began = time.perf_counter()
    keys = {**keys_of(setting, JOBS[name]), **small}
    with jobs.open_run(setting, jobs.SPEED, f"compiled {name}", keys) as run:
        trainer.step(run, next(iter(run.loader)))
        setting.synchronize()
    return time.perf_counter() - began
