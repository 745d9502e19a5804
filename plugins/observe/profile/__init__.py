"""Where a step goes: traces of a window of steps, memory snapshots, and a table beside what `titan plan` predicts.

    [plugins.profile]
    from_step = 10
    steps = 3

Each rank of `ranks` writes to `profile/` of the run's folder:

    rank-0_steps-10-12.pt.trace.json.gz   torch.profiler's trace: ui.perfetto.dev, or TensorBoard's profiler plugin
    rank-0_steps-10-12.memory.pickle      the allocations of a GPU: pytorch.org/memory_viz; a CPU has no such history

and logs a table of where its steps went, rank 0 in the terminal. The next row of metrics has the means over these
ranks. An instant of a step counts once, for the first of these that has it (`intervals.divided`). On a GPU: kernels of
the update, other kernels, communication kernels, the wait for data. On a CPU: the wait for data, operations, gloo, the
rest of the update. What is left is "other": the host's own time, copies, idle time. So communication counts where it is
exposed. It includes the wait for ranks that arrive later.

Cost: nothing before the window. Inside, some microseconds of the host per operation, so steps on a CPU take longer;
the device is waited for at its begin and end. After it, seconds to write and to read the trace; one
of over 200 MB is written without a table. An error of the profile is a warning, and the run goes on.
Limits: no GPU has run this yet. The first step that a process runs is recorded without its wait for data. A run that
resumes in the window records what is left of it. Communication through symmetric memory counts as computation.
`titan tune` records too: disable this technique there.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from titan.contracts import BuildContext, Job, Measure, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import PredictedStep

from .recorder import Recorder, Written, read
from .table import FAMILIES, by_row, text
from .trace import axis_of_batches, seconds_per_step

_log = logging.getLogger("titan")

FEW = 8
"""Up to this many ranks, all of them record by default."""

MOST_BYTES = 200_000_000
"""Largest JSON of a trace that is read: half a minute on a busy core, and 0.6 GB. Meanwhile other ranks wait."""

_FAILURES = (OSError, EOFError, ValueError, RuntimeError, LookupError, MemoryError)
"""What writing and reading a trace raises: a full disk, JSON cut short, an error of the device, dropped steps."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.profile]`."""

    from_step: int = option(
        10, "first step to record; the first steps of a run compile and allocate", unit="steps", at_least=1
    )
    steps: int = option(3, "number of steps to record", unit="steps", at_least=1)
    ranks: Literal["auto", "all"] | tuple[int, ...] = option(
        "auto", f"ranks that record; auto: all of up to {FEW}, of more the first rank of each pipeline stage"
    )
    memory: bool = option(True, "also write a snapshot of a GPU's memory, with the allocations of the window")
    cluster: str = option(
        "",
        "cluster of the prediction, a name or a file as for titan plan; empty: the one that comes with titan for "
        "this GPU",
    )


def _measures() -> dict[str, Measure]:
    docs = {
        "step": "all",
        "compute": "computation",
        **{family: f"exposed {row}" for family, row in FAMILIES.items()},
        "optimizer": "the optimizer's update",
        "data": "waiting for data",
        "other": "the rest: host, copies, idle",
    }
    return {
        f"profile_{row}_s": Measure(f"seconds per step of {doc}, mean over the ranks that record", "mean", detail=True)
        for row, doc in docs.items()
    }


@register
class Profile(Technique):
    """Records a window of steps, and says where their time went."""

    name = "profile"
    Config = Config
    config: Config
    phase = "materialise"
    measures: ClassVar = _measures()

    _context: BuildContext
    _recorder: Recorder | None = None
    """None: nothing to record, on this rank, or any more."""
    _recording = 0
    """The first step that is recorded; 0: not yet."""
    _done = 0
    """The last step of this process that is done; 0: none."""
    _predicted: PredictedStep | None = None
    _seconds: Mapping[str, float] | None = None
    """Row -> seconds per step, until metrics have them."""

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        last = job.layout.world_size - 1
        unknown = [rank for rank in self.config.ranks if isinstance(rank, int) and not 0 <= rank <= last]
        if unknown:
            yield f'ranks has {unknown}, and the layout has ranks 0 to {last}; leave them out, or set ranks = "auto"'
        elif not self.config.ranks:
            yield f'ranks is empty; name some of ranks 0 to {last}, or set ranks = "auto"'

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._context = context

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A real run begins, on all ranks; refuses a cluster that cannot be used before any step."""
        job, config, mesh = self._context.job, self.config, self._context.mesh
        if config.from_step > job.train.steps:
            _log.warning(
                f"[plugins.profile] from_step = {config.from_step}, but train.steps = {job.train.steps}: nothing is "
                "recorded; set from_step lower"
            )
            return
        self._predicted = self._context.predict(config.cluster)
        if self._records():
            self._recorder = Recorder(mesh, self._folder, memory=config.memory)

    def before_step(self, step: int) -> None:
        """Begin here where no step of this process came before."""
        if self._recorder is None or self._done:
            return
        if step > self._last:
            _log.warning(
                f"[plugins.profile] steps {self.config.from_step} to {self._last} were done before this run resumed "
                f"after step {step - 1}: nothing is recorded; set from_step to a later step"
            )
            self._recorder = None
        elif step >= self.config.from_step:
            self._begin(step)

    def after_step(self, step: int, updated: Tensor) -> None:
        self._done = step
        if self._recorder is None:
            return
        if self._recording and step == self._last:
            self._end(self._recorder, whole=True)
        elif self._recording:
            self._recorder.next(step + 1)
        elif step + 1 == self.config.from_step:
            self._begin(step + 1)
        elif step + 2 == self.config.from_step:
            with self._survived("cannot start the profiler"):
                self._recorder.prepare()

    def measure(self) -> Mapping[str, Tensor | None]:
        """The seconds per step of the window, in the first row after it."""
        seconds, self._seconds = self._seconds or {}, None
        names = {name: name.removeprefix("profile_").removesuffix("_s") for name in self.measures}
        return {name: self._mean(seconds[row]) if row in seconds else None for name, row in names.items()}

    def close(self) -> None:
        """Write what is recorded, where the run ends inside of the window."""
        if self._recorder is not None and self._recording:
            self._end(self._recorder, whole=sys.exc_info()[0] is None)

    @property
    def _folder(self) -> Path:
        return self._context.job.folder / "profile"

    @property
    def _last(self) -> int:
        return min(self.config.from_step + self.config.steps - 1, self._context.job.train.steps)

    def _records(self) -> bool:
        layout, rank, ranks = self._context.mesh.layout, self._context.mesh.rank, self.config.ranks
        if not isinstance(ranks, str):
            return rank in ranks
        at, stages = layout.coordinate(rank), layout.axes_of("layers")
        return ranks == "all" or layout.world_size <= FEW or not any(at[axis] for axis in at if axis not in stages)

    def _begin(self, step: int) -> None:
        assert self._recorder is not None
        with self._survived("cannot start the profiler"):
            self._recorder.begin(step)
            self._recording = step

    def _end(self, recorder: Recorder, *, whole: bool) -> None:
        """Write the recording, and say where its whole steps went. whole: no error has ended the run."""
        self._recorder = None
        count, last = self._done - self._recording + 1, max(self._done, self._recording)
        name = f"rank-{self._context.mesh.rank}_steps-{self._recording}-{last}"
        files = f"{self._folder / name}.*"
        with self._survived(f"cannot write or read {files}"):
            written = recorder.end(name, whole=whole)
            if written is None:
                _log.info(
                    f"profile: {files} are not written: the run failed inside of the window, and the profiler would "
                    "wait for the device, which may wait for another rank"
                )
                return
            snapshot = f" and {written.snapshot.name}" if written.snapshot else f"; {self._no_snapshot()}"
            _log.info(f"profile: wrote {written.trace}{snapshot}")
            if whole and count >= 1:
                self._evaluate(written, name, count, recorder.groups)

    def _evaluate(self, written: Written, name: str, steps: int, groups: Mapping[str, str]) -> None:
        """Log the table of the first `steps` steps of a trace, and keep its rows for metrics."""
        if written.size > MOST_BYTES:
            _log.warning(
                f"[plugins.profile] {written.trace} is written, but has no table: its JSON has "
                f"{written.size / 1e6:,.0f} MB, at most {MOST_BYTES / 1e6:,.0f} MB are read; set steps lower"
            )
            return
        layout = self._context.mesh.layout
        measured = seconds_per_step(read(written.trace), steps, groups, axis_of_batches(layout))
        rows = by_row(measured, layout.axes)
        _log.info(f"{self._title(name)}\n{text(measured, layout.axes, self._predicted)}")
        self._seconds = {**rows, "step": sum(rows.values())}

    @contextmanager
    def _survived(self, what: str) -> Iterator[None]:
        """A failure of the profile is a warning. Not all ranks record, so others would wait for one that ends.

        what: the sentence of the warning, without its subject.
        """
        try:
            yield
        except _FAILURES as error:
            self._recorder = None
            _log.warning(f"[plugins.profile] {what}: {type(error).__name__}: {error}; the run goes on without a table")

    def _title(self, name: str) -> str:
        where = f"profile: seconds per step, {name.replace('_', ', ').replace('-', ' ', 2)}"
        if self._predicted is not None:
            return f"{where}; predicted: the rank that ends last, {self._predicted.cluster}"
        return (
            f"{where}; no prediction, as no cluster that comes with titan has this device (titan doctor --output FILE, "
            "then [plugins.profile] cluster = FILE)"
        )

    def _no_snapshot(self) -> str:
        if not self.config.memory:
            return "no memory snapshot: memory = false"
        return f"no memory snapshot: a {self._context.device.type.upper()} keeps no history"

    def _mean(self, seconds: float) -> Tensor:
        return torch.tensor([seconds, 1.0], dtype=torch.float64, device=self._context.device)
