"""What happens inside a step: waits of the host for the device, idle time, kernels, collections of garbage."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu import isolated, jobs, reference, speed
from bench.gpu.records import Row
from bench.gpu.setting import Setting
from bench.gpu.shapes import JOBS as SPEED_JOBS
from bench.gpu.shapes import keys_of
from titan.training import trainer

WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
"""Operations whose result the host needs: on a GPU it waits for them. `aten::equal` is left out: the step compares the
states of random generators, which are in host memory."""

JOBS: dict[str, dict[str, object]] = {
    "bf16": {},
    "4 micro batches": {"train.micro_batch_size": 2},
    "packed documents": {"data.packing": "document_mask"},
    "recompute selective": {"plugins.activation_checkpoint.mode": "selective"},
}


def no_waiting(setting: Setting) -> Iterator[Row]:
    """Ten steps between two rows of metrics, in which any wait of the host for the device is an error."""
    for name, keys in JOBS.items():
        keys = {**reference.keys_of(setting, "untied"), "plugins.bf16.enabled": True, **keys}
        with jobs.open_run(setting, jobs.PARITY, f"waiting {name}", keys) as run:
            batches = iter(run.loader)
            for _ in range(2):
                trainer.step(run, next(batches))
            failure = ""
            try:
                with _waits_are_errors(setting):
                    for _ in range(10):
                        trainer.step(run, next(batches))
            except RuntimeError as error:
                failure = str(error).partition("\n")[0][:80]
        yield Row(f"{name}: waits in 10 steps", failure or "none", passed=not failure)


class _Refusing(TorchDispatchMode):
    """The rehearsal's stand-in for CUDA's mode: operations that would wait on a GPU raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITING:
            raise RuntimeError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def _waits_are_errors(setting: Setting) -> Iterator[None]:
    if setting.rehearse:
        with _Refusing():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profiled(*names: str) -> Callable[[Setting], Iterator[Row]]:
    """The measurement of the share of time in which the device idles, and of the kernels that take most of it."""

    def measure(setting: Setting) -> Iterator[Row]:
        for name in names:
            for label, value, unit in isolated.call(partial(_profile, setting, name), setting.log, speed.LIMIT_S):
                yield Row(f"{name}: {label}", value, unit)

    return measure


def _profile(setting: Setting, name: str) -> list[tuple[str, float, str]]:
    """Three steps of a job: seconds, idle share, and the share of each of the longest kernels."""
    kind, steps = setting.size(ProfilerActivity.CUDA, ProfilerActivity.CPU), 3
    device = setting.size(torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU)
    shape = SPEED_JOBS[name]
    with jobs.open_run(setting, jobs.SPEED, "profile", keys_of(setting, shape), shape.ranks) as run:
        jobs.step_seconds(setting, run, 1)
        with profile(activities=[kind]) as seen:
            seconds = sum(jobs.step_seconds(setting, run, steps, warm_up=0)) / steps
    events = [event for event in seen.events() if event.device_type == device and not event.is_user_annotation]
    busy = covered((event.time_range.start, event.time_range.end) for event in events) / 1e6 / steps
    found = [("seconds per step, profiled", seconds, "s"), ("share in which the device idles", 1 - busy / seconds, "")]
    time_of: Counter[str] = Counter()
    count_of: Counter[str] = Counter()
    for event in events:
        time_of[event.name[:80]] += event.time_range.elapsed_us()
        count_of[event.name[:80]] += 1
    for kernel, microseconds in time_of.most_common(16):
        found.append((f"{count_of[kernel] // steps} x {kernel}", microseconds / 1e6 / steps / seconds, "of a step"))
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time line any of the spans covers."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def garbage(setting: Setting) -> Iterator[Row]:
    """A collection of all objects, and one of young objects after `gc.freeze()`, beside a built run."""
    with jobs.open_run(setting, jobs.SPEED, "garbage", keys_of(setting, SPEED_JOBS["1B"])) as run:
        jobs.step_seconds(setting, run, 1, warm_up=2)
        yield Row("objects that Python tracks", len(gc.get_objects()))
        yield Row("collection of all", 1e3 * _seconds_of(gc.collect), "ms")
        gc.freeze()
        try:
            trainer.step(run, next(iter(run.loader)))
            yield Row("young objects, the rest frozen", 1e3 * _seconds_of(lambda: gc.collect(1)), "ms")
        finally:
            gc.unfreeze()


def _seconds_of(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
