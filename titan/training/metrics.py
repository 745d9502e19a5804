"""Measurement of steps, and the trackers that log them. Values leave the device only when a row is logged."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.distributed as dist

from titan.contracts import Row, RunInfo, Tracker
from titan.contracts.base.spec import ModelSpec
from titan.errors import ConfigError, by_errno
from titan.log import log

PEAK_TFLOPS = {
    "V100": 125.0,
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "MI250X": 191.5,
    "MI300A": 980.6,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI350X": 2306.9,
    "MI355X": 2516.6,
}
"""Dense bf16 (V100: fp16) peak of a device as its vendor states it, by a piece of its name; MI250X: one die."""

RANKS = 1 << 20
"""More than a run has: what is left of 63 bits beside a rank's number counts KiB."""


def peak_tflops(device: torch.device, stated: float) -> float | None:
    """Dense peak of a device in TFLOP/s: what the job states, else what the name tells, else None."""
    if stated:
        return stated
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for piece, peak in PEAK_TFLOPS.items() if piece in name), None)


Beside = Literal["save", "validation", "gc"]
"""What takes time beside the steps: the blocking part of a save, a validation, a collection of garbage."""


class Meter:
    """Turns steps into rows.

    The speed of a row is over all of the wall clock since the row before, saves, validations and garbage collection
    included; how many of the seconds these took stands beside it. The loss and the norm are those of its own step.
    """

    def __init__(self, spec: ModelSpec, seq_len: int, devices: int, device: torch.device, stated_peak: float) -> None:
        self._flops_per_token = spec.flops_per_token(seq_len)
        self._devices, self._device = devices, device
        self._peak = peak_tflops(device, stated_peak)
        began = time.perf_counter()
        self._epoch = time.time() - began
        self._begin(began)

    def _begin(self, now: float) -> None:
        self._since, self._steps, self._tokens, self._data_s = now, 0, 0, 0.0
        self._beside: dict[Beside, float] = dict.fromkeys(get_args(Beside), 0.0)

    def unix_time(self, now: float | None = None) -> float:
        """Unix seconds of a moment of `perf_counter`, by default of this one: a clock that jumps does not show."""
        return self._epoch + (time.perf_counter() if now is None else now)

    def add(self, tokens: int, data_s: float) -> None:
        """Count a step that consumed `tokens` (over all ranks) and waited `data_s` for its data on this rank."""
        self._steps, self._tokens, self._data_s = self._steps + 1, self._tokens + tokens, self._data_s + data_s

    @contextmanager
    def beside(self, what: Beside) -> Iterator[None]:
        """Book what the body takes as spent on that, in the row that comes next.

        Steps whose work is still queued on the device are waited for first, or a save or a validation, which need their
        results, would be charged for them. Collecting garbage needs no results and waits for nothing.
        """
        if what != "gc" and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._beside[what] += time.perf_counter() - began

    def row(self, step: int, loss: float, grad_norm: float, lr: float, tokens: int) -> Row:
        """The row of a step, with `tokens` consumed since the very start; begins the next. All ranks together.

        tokens_per_s and what follows from it, step_time_s: over all of the seconds since the row before.  data_time_s:
        waited for data, per step.  save_time_s, validation_time_s, gc_time_s: spent on these, in all since then.
        peak_memory_gib, peak_memory_rank: of the rank that has held most (`fullest`).
        """
        now = time.perf_counter()
        seconds = now - self._since
        per_s = self._tokens / seconds
        tflops = per_s * self._flops_per_token / self._devices / 1e12
        memory_gib, fullest_rank = fullest(peak_memory_gib(self._device), self._devices)
        row: Row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_s": per_s,
            "tokens_per_s_per_device": per_s / self._devices,
            "model_tflops_per_device": tflops,
            "mfu": tflops / self._peak if self._peak else None,
            "step_time_s": seconds / max(self._steps, 1),
            "data_time_s": self._data_s / max(self._steps, 1),
            **{f"{what}_time_s": spent for what, spent in self._beside.items()},
            "peak_memory_gib": memory_gib,
            "peak_memory_rank": fullest_rank,
            "time": self.unix_time(now),
        }
        self._begin(now)
        return row


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held: on a GPU what its allocator reserved, on a CPU its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    import resource  # Unix only, as gloo and the launcher are

    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux and the BSDs KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def fullest(held_gib: float, world_size: int) -> tuple[float, int]:
    """The most that a rank holds, in GiB, and the lowest rank that holds as much; the same on all ranks.

    held_gib: what this rank holds. One all-reduce of 8 bytes from host memory, which all ranks take part in: no device
    is waited for, and no rank longer than a step makes it wait anyway. Exact to a KiB, up to 8 PiB and `RANKS` ranks.
    """
    if world_size == 1:
        return held_gib, 0
    # KiB above, ranks below, counted down so that the largest number is of the lowest rank among equals.
    packed = torch.tensor(round(held_gib * 2**20) * RANKS + RANKS - 1 - dist.get_rank())
    dist.all_reduce(packed, dist.ReduceOp.MAX)
    held_kib, place = divmod(int(packed), RANKS)
    return held_kib / 2**20, RANKS - 1 - place


class Trackers:
    """All trackers of a run as one; empty on ranks that do not talk.

    A tracker that fails while the run is under way is told once, and asked again with the next row: no curve is worth
    a run. One that fails at the start refuses it.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def start(self, info: RunInfo) -> None:
        """The run begins.

        Raises:
            ConfigError: a tracker cannot write where it should; ResourceError where the machine fails.
            Exception: whatever else a tracker cannot begin with.
        """
        for tracker in self._trackers:
            try:
                tracker.start(info)
            except OSError as error:
                said = f"[metrics.{tracker.name}] cannot start: {error}; enabled = false in that table disables it"
                raise by_errno(error, ConfigError(said)) from error

    def log(self, row: Row) -> None:
        """Give a row (metric name -> value) to every tracker; a failure is logged, not raised."""
        self._each(lambda tracker: tracker.log(row))

    def progress(self, step: int) -> None:
        """Tell every tracker that optimizer step `step` is done; called at each step."""
        self._each(lambda tracker: tracker.progress(step))

    def close(self) -> None:
        """Close every tracker at the end of the run; a failure is logged, not raised."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                act(tracker)
            except Exception as error:  # whatever it is, it is not the training's
                self._tell(tracker.name, error)

    def _tell(self, name: str, error: Exception) -> None:
        if name in self._failed:
            return
        self._failed.add(name)
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning(f"[metrics.{name}] {said}; training continues, and this tracker misses some rows")
