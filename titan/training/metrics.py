"""Measurement of steps, by the host and by plugins, and the trackers that log it. Values leave the device with rows."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.config import Job
from titan.contracts import Loss, Measure, Mesh, Model, ModelPart, Row, RunInfo, Technique, Tracker
from titan.contracts.base.layout import DataFact
from titan.contracts.base.spec import ModelSpec
from titan.contracts.plugin.conformance import answer, label
from titan.contracts.plugin.options import did_you_mean, shown
from titan.errors import ConfigError, PluginError, by_errno
from titan.log import log
from titan.machine import device_name
from titan.paths import told

_HOPPER = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0}
_INSTINCT = {"MI300A": 980.6, "MI300X": 1307.4, "MI325X": 1307.4, "MI350X": 2306.9, "MI355X": 2516.6, "MI250X": 191.5}
PEAK_TFLOPS = {"V100": 125.0, "A100": 312.0, "L40S": 362.0, **_HOPPER, "B200": 2250.0, **_INSTINCT}
"""Dense bf16 (V100: fp16) peak of a device as its vendor states it, by a piece of its name; MI250X: one die."""

RANKS = 1 << 20  # more than a run has; the rest of 63 bits counts KiB


def peak_tflops(device: torch.device) -> float | None:
    """Dense peak of a device in TFLOP/s, by its name; None where that does not tell."""
    return next((peak for piece, peak in PEAK_TFLOPS.items() if piece in device_name(device)), None)


Beside = Literal["save", "validation", "gc"]
"""What takes time beside the steps: the blocking part of a save, a validation, a collection of garbage."""


class Meter:
    """Turns steps into rows, whose speed is over all of the wall clock since the row before.

    devices: of the run; fewer once it has lost workers.
    mates: where workers keep their own pace, the ranks of this one, for tensors in host memory; None: all ranks.
    """

    mates: dist.ProcessGroup | None = None

    def __init__(self, spec: ModelSpec, seq_len: int, devices: int, device: torch.device, stated_peak: float) -> None:
        self._flops_per_token = spec.flops_per_token(seq_len)
        self.devices, self._device = devices, device
        self._peak = stated_peak or peak_tflops(device)
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
        """Book what the body takes as spent on that, in the row that comes next."""
        # Or a save or a validation would be charged for steps still queued, whose results it needs.
        if what != "gc" and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._beside[what] += time.perf_counter() - began

    def row(self, step: int, loss: float, grad_norm: float, lr: float, tokens: int, valid_tokens: int) -> Row:
        """The row of a step; begins the next. All ranks together.

        tokens: positions consumed since the very start, padding and what has no label included.
        valid_tokens: of these, those that were learnt from: with a label, in steps whose update was made.
        data_time_s: waited for data, per step.  save_time_s, validation_time_s, gc_time_s: in all since the row before.
        """
        now = time.perf_counter()
        seconds = now - self._since
        steps, per_s = max(self._steps, 1), self._tokens / seconds
        tflops = per_s * self._flops_per_token / self.devices / 1e12
        memory_gib, fullest_rank = fullest(peak_memory_gib(self._device), self.devices, self.mates)
        row: Row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "valid_tokens": valid_tokens,
            "tokens_per_s": per_s,
            "tokens_per_s_per_device": per_s / self.devices,
            "model_tflops_per_device": tflops,
            "mfu": tflops / self._peak if self._peak else None,
            "step_time_s": seconds / steps,
            "data_time_s": self._data_s / steps,
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


def fullest(held_gib: float, world_size: int, mates: dist.ProcessGroup | None = None) -> tuple[float, int]:
    """The most that a rank holds, in GiB, and the lowest rank that holds as much; the same on all ranks (`mates`). One
    all-reduce of 8 bytes from host memory, exact to a KiB, up to 8 PiB. held_gib: what this rank holds."""
    if world_size == 1:
        return held_gib, 0
    # KiB above, ranks below, counted down so that the largest number is of the lowest rank among equals.
    packed = torch.tensor(round(held_gib * 2**20) * RANKS + RANKS - 1 - dist.get_rank())
    dist.all_reduce(packed, dist.ReduceOp.MAX, mates)
    held_kib, place = divmod(int(packed), RANKS)
    return held_kib / 2**20, RANKS - 1 - place


_COUNTS = {"step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "skipped_updates"}
_SPEEDS = {"tokens_per_s", "tokens_per_s_per_device", "model_tflops_per_device", "mfu"}
_TIMES = {"time", "step_time_s", "data_time_s", "save_time_s", "validation_time_s", "gc_time_s"}
_OTHERS = {"peak_memory_gib", "peak_memory_rank", "validation_loss", "validation_perplexity"}
KEYS: Set[str] = _COUNTS | _SPEEDS | _TIMES | _OTHERS
"""Keys of rows that are the host's: what plugins measure has other names."""

Measuring = Model | Loss | Technique


class Measures:
    """What plugins measure: asked on all ranks when a row is due, joined in at most two all-reduces per axis.

    Which all-reduces there are follows from the classes of the plugins alone, never from who has a value.
    """

    def __init__(self, job: Job, parts: Sequence[ModelPart], mesh: Mesh) -> None:
        self._mesh = mesh
        self._owners: dict[str, Measuring] = {}
        others: list[Measuring] = [job.loss, *job.techniques]
        for plugin in (job.model, *others):
            for name in plugin.measures:
                if name in KEYS or name in self._owners:
                    by = f"{label(type(self._owners[name]))} has" if name in self._owners else "rows of metrics have"
                    raise PluginError(f"{label(type(plugin))}: measures: {by} the name {name!r} already; rename it")
                self._owners[name] = plugin
        self._asked: list[tuple[Measuring, tuple[nn.Module, ...]]] = [(job.model, (part.module,)) for part in parts]
        self._asked += [(plugin, ()) for plugin in others]
        self._measures = {name: owner.measures[name] for name, owner in self._owners.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Keys that rows may have more, without details."""
        return tuple(name for name, measure in self._measures.items() if not measure.detail)

    def joined(self) -> Tensor:
        """What `row` makes numbers of: the values of all ranks, float64 and flat, on the device. All ranks together.

        While workers are apart, the values are those of this rank's worker.

        Raises PluginError where a plugin does not return what it declares.
        """
        settings: dict[str, Any] = {"dtype": torch.float64, "device": self._mesh.device}
        # Rows: sums; what they are of, 0 where there are no values; ranks whose value is not counted.
        sums = torch.zeros(3, len(self._measures), **settings)
        largest = torch.full((len(self._measures),), -torch.inf, **settings)
        places = list(self._measures)
        for plugin, arguments in self._asked:
            for name, value in self._given(plugin, arguments):
                place, join = places.index(name), self._measures[name].join
                if join == "mean":
                    sums[:2, place] += value
                elif join == "max":
                    largest[place] = torch.maximum(largest[place], value)
                    sums[0, place] += torch.where(value.isnan(), value, 0.0)  # a reduction to the maximum may lose it
                    sums[1, place] += 1
                elif any(self._mesh.at(axis) for axis in self._equal_along(name)):
                    sums[2, place] += 1
                else:
                    sums[0, place] += value
                    sums[1, place] += 1
        axes = (*get_args(DataFact), "own")  # every axis states one of these
        if self._measures:
            self._mesh.sum(sums, *axes)
        if any(measure.join == "max" for measure in self._measures.values()):
            self._mesh.max(largest, *axes)
        return torch.cat([sums.flatten(), largest])

    def row(self, numbers: Sequence[float]) -> Row:
        """Name -> number, of the numbers in `joined`; without names that no rank has a value of."""
        count, row = len(self._measures), {}
        for place, name in enumerate(self._measures):
            total, weight, elsewhere, largest = numbers[place::count]
            if weight:
                row[name] = {"sum": total, "mean": total / weight, "max": largest + total}[self._measures[name].join]
            elif elsewhere:
                axes = ", ".join(f'{axis} ("{fact}")' for axis, fact in self._equal_along(name).items())
                raise PluginError(
                    f"{label(type(self._owners[name]))}: the sum {name!r} takes the first rank along {axes} for all, "
                    "which has no value, but others have; add the fact of the axis to `over` of its Measure"
                )
        return row

    def _equal_along(self, name: str) -> dict[str, str]:
        """Axes along which the values of a sum are taken as equal -> a fact with which they would be summed."""
        layout = self._mesh.layout
        summed = layout.axes_of(*self._measures[name].over)
        alone = (*summed, layout.worker_axis) if self._mesh.apart else summed  # no other worker's values are here
        others = [axis for axis in layout.dimensions if layout.degrees[axis.name] > 1 and axis.name not in alone]
        return {axis.name: axis.weights if axis.data in (None, "same") else axis.data for axis in others}

    def _given(self, plugin: Measuring, arguments: tuple[nn.Module, ...]) -> Iterator[tuple[str, Tensor]]:
        """The values that this rank has of a plugin, checked, in float64."""
        found, who = answer(plugin, "measure", Mapping, *arguments), label(type(plugin))  # type: ignore[type-abstract]
        for name in found:
            if name not in plugin.measures:
                what = f"which its class does not declare in measures{did_you_mean(name, plugin.measures)}"
                raise PluginError(f"{who}: measure() returned {name!r}, {what}")
        for name, measure in plugin.measures.items():
            if name not in found:
                raise PluginError(f"{who}: measure() left out {name!r}; return None where this rank has no value")
            if (value := found[name]) is not None:
                _check_value(f"{who}: measure() returned for {name!r}", value, measure, self._mesh.device)
                yield name, value.detach().double()


def of_workers(axis: str, found: Sequence[Sequence[float]]) -> Row:
    """`loss_worker_0` and so on: [loss, gradient norm] of each rank along an axis; empty where that has no name."""
    row: dict[str, float] = {}
    for worker, (loss, grad_norm) in enumerate(found if axis else ()):
        row |= {f"loss_{axis}_{worker}": loss, f"grad_norm_{axis}_{worker}": grad_norm}
    return row


def _check_value(what: str, value: Any, measure: Measure, device: torch.device) -> None:
    shape = (2,) if measure.join == "mean" else ()
    wanted = f"a {measure.join} needs a plain tensor of shape {list(shape)} on {device}"
    if not isinstance(value, Tensor):
        raise PluginError(f"{what} {shown(value)}, of type {type(value).__name__}; {wanted}, or None")
    if isinstance(value, DTensor):
        raise PluginError(f"{what} a DTensor; {wanted}: call to_local() or full_tensor()")
    if value.shape != shape or value.device != device:
        raise PluginError(f"{what} a tensor of shape {list(value.shape)} on {value.device}; {wanted}")


class Trackers:
    """All trackers of a run as one; empty on ranks that do not talk.

    One that fails at the start refuses the run. Later it is told once, and asked again: no curve is worth a run.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def start(self, info: RunInfo) -> None:
        """The run begins; raises ConfigError where a tracker cannot write, ResourceError where the machine fails."""
        for tracker in self._trackers:
            try:
                tracker.start(info)
            except OSError as error:
                why = told(error) if error.filename else error
                text = f"[metrics.{tracker.name}] cannot start: {why}; enabled = false in that table disables it"
                raise by_errno(error, ConfigError(text)) from error

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
                if tracker.name not in self._failed:
                    self._failed.add(tracker.name)
                    text = f"{type(error).__name__}: {error}".partition("\n")[0]
                    consequence = "training continues, and this tracker misses some rows"
                    log.warning(f"[metrics.{tracker.name}] {text}; {consequence}")
