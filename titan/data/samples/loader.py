"""Batches of one rank, read ahead. Its saved state is the number of the next global sample and the fingerprint."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from titan.contracts import Batch
from titan.data.samples.samples import Columns, Sample, Samples, each, stacked, to_device
from titan.data.tokens.processes import context, end_with_parent
from titan.errors import PreemptedError, ResourceError, TitanError
from titan.machine import process_state
from titan.ranks.meeting import signals

GPU_WORKERS = 2
"""Loader processes of a rank on a GPU: while one waits for the file system, the other has the next batch ready."""

LOOK_S = 0.5  # between two looks of a rank that waits for data: for a signal, and at its limit
PATIENCE_S = 15.0  # after a signal, data that are slow may still come, so that the run stops between two steps
Limit = tuple[float, str]  # longest wait for the data of a step, in seconds, and the key that sets it
NO_LIMIT: Limit = (float("inf"), "")


class Loader:
    """Iterates over training steps: each gives this rank's micro batches, on its device.

    A step consumes the next `global_batch` samples of the global order; rank `index` of `ranks` takes the `index`-th
    contiguous slice of them, in micro batches of `micro_batch`. `first` is the global sample the first step starts at.
    `workers` processes read ahead; with 0 a thread of the training process reads. None stands for GPU_WORKERS on a GPU,
    and for 0 on a CPU, where they would take the cores that train. `limits` are those of the first step and of others.

    While iterating, it raises a DataError as `Samples`, also when a worker met it; a ResourceError: processes cannot be
    started, or were killed, or no data came within the limit; a PreemptedError: no data `PATIENCE_S` after a signal.
    """

    def __init__(
        self, samples: Samples, *, global_batch: int, micro_batch: int, first: int, index: int, ranks: int,
        workers: int | None, device: torch.device, limits: tuple[Limit, Limit] = (NO_LIMIT, NO_LIMIT),
    ) -> None:  # fmt: skip
        assert global_batch % (micro_batch * ranks) == 0 and 0 <= index < ranks
        self._samples, self._device = samples, device
        self._copies = Copies(device)
        self.workers = workers if workers is not None else GPU_WORKERS if device.type != "cpu" else 0
        self._numbers = _Numbers(first, global_batch, micro_batch, index, ranks)
        self._next = first
        self._limit, self._later_limit = limits
        self._batches: _Reading | None = None
        self._children: list[BaseProcess] = []

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> list[Batch]:
        if self._batches is None:
            self._batches = _Reading(self._start, self._device)
        step = []
        for start in self._numbers.starts(self._next):
            columns = self._copies(self._read(self._batches))
            samples = torch.arange(start, start + len(columns[0]), device=self._device)
            step.append(Batch(*columns, samples=samples))
        self._next += self._numbers.global_batch
        self._limit = self._later_limit
        return step

    def _start(self) -> Callable[[], Any]:
        """Start to read; what gives the next batch."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        others = multiprocessing.active_children()
        try:
            if self.workers:
                context().Lock()  # as their queues have; they cannot be taken apart again where that fails
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*set_vital")  # torch 2.13 deprecates it; of torchdata 0.11
                batches = StatefulDataLoader(
                    _Reader(self._samples),
                    batch_sampler=self._numbers,
                    num_workers=self.workers,
                    collate_fn=_as_read,
                    worker_init_fn=end_with_parent if self.workers else None,
                    pin_memory=self._device.type == "cuda",
                    multiprocessing_context=context() if self.workers else None,
                    generator=torch.Generator(),  # the run's random state is not the loader's to advance
                    snapshot_every_n_steps=1 << 62,
                )
                return partial(next, iter(batches))
        except OSError as error:
            what = f"data loader processes cannot be started ({error.strerror or error})"
            raise ResourceError(f"{what}; set data.workers = 0 to load in the training process") from error
        finally:
            self._children = [child for child in multiprocessing.active_children() if child not in others]

    def _read(self, batches: "_Reading") -> Columns:
        waited, heard = 0.0, 0.0  # of looks, not of a clock: it goes on while this process is stopped
        batches.ask()
        while (answer := batches.take(LOOK_S)) is None:
            waited += LOOK_S
            heard = heard or (waited if signals.heard() else 0.0)
            if heard and waited > heard + PATIENCE_S:
                raise PreemptedError(f"preempted by {signals.gravest()} while waiting for data")
            if waited > self._limit[0]:  # a process in "disk sleep" waits for a file system that does not answer
                states = [f"data loader process {child.pid}: {process_state(child.pid)}" for child in self._children]
                what = f"no data for a step within {self._limit[0]:g} s ({self._limit[1]})"
                raise ResourceError(f"{what}; {', '.join(states) or 'the training process reads'}")
        read, error = answer
        if isinstance(read, TitanError):
            raise read
        if error is None:
            return read.columns() if isinstance(read, _Sent) else read
        # PyTorch says so itself, or the connection by which a batch is fetched from the process is gone.
        if not self._children or not wait([child.sentinel for child in self._children], timeout=1.0):
            raise error
        what = "a data loader process was killed, possibly for lack of memory"
        raise ResourceError(f"{what}; set data.workers = 0 to load in the training process") from error

    def state_dict(self) -> dict[str, int | str]:
        """The number of the first global sample that no step has been given yet, and whose samples they are."""
        return {"samples": self._next, "fingerprint": self._samples.fingerprint}

    def close(self) -> None:
        """Stop the worker processes; the next step starts new ones."""
        if self._batches is not None:
            self._batches.ask(more=False)
        self._batches = None
        # They are left where another one was killed: the exception still holds the iterator, which would end them. They
        # do not hear SIGTERM, by which Python ends its children when it exits, and for which it then waits.
        for child in self._children:
            child.kill()
        self._children = []


class _Reading:
    """A thread that reads a batch whenever asked: whoever waits for it can look at signals and at a clock.
    start: called first, in the thread; returns what reads the next batch.  device: that of the rank."""

    def __init__(self, start: Callable[[], Callable[[], Any]], device: torch.device) -> None:
        self._device = device
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        Thread(target=self._serve, args=(start,), name="data", daemon=True).start()

    def ask(self, *, more: bool = True) -> None:
        """Begin to read the next batch, or with `more=False` end the thread."""
        self._requests.put(more)

    def take(self, timeout_s: float) -> tuple[Any, Exception | None] | None:
        """The batch, or what reading it has raised; None where neither is there yet."""
        try:
            return self._answers.get(timeout=timeout_s)
        except Empty:
            return None

    def _serve(self, start: Callable[[], Callable[[], Any]]) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # that of a new thread is the first one
        read: Callable[[], Any] | None = None
        while self._requests.get():
            try:
                read = read or start()
                self._answers.put((read(), None))
            except Exception as error:
                self._answers.put((None, error))


class Copies:
    """Copies of batches to the device, beside what it computes: on a stream of their own. The host prepares a step
    while the device still computes the one before. On the stream that computes, a copy would be behind all of that; so
    it is done by then, and the computation waits for an event that has passed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        self._module: Any = torch.cuda if device.type == "cuda" else None

    def __call__(self, columns: Columns) -> Columns:
        """The columns on the device, to be used by its current stream."""
        if self._module is None:
            return to_device(columns, self._device)
        if self._stream is None:
            self._stream = self._module.Stream(self._device)
        computing = self._module.current_stream(self._device)
        with self._module.stream(self._stream):
            moved = to_device(columns, self._device)
        computing.wait_stream(self._stream)
        for column in moved:
            if column is not None:  # its memory is the copying stream's, which would write to it again
                column.record_stream(computing)
        return moved


@dataclass(frozen=True)
class _Numbers:
    """Global sample numbers of one rank's micro batches, without end."""

    first: int
    global_batch: int
    micro_batch: int
    index: int
    ranks: int

    def starts(self, first: int) -> range:
        """The first sample of each micro batch of the step that starts at global sample `first`."""
        own = self.global_batch // self.ranks
        start = first + self.index * own
        return range(start, start + own, self.micro_batch)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        while True:
            for start in self.starts(first):
                yield list(range(start, start + self.micro_batch))
            first += self.global_batch


class _Reader(torch.utils.data.Dataset[Sample]):
    """Samples as stacked micro batches. A fault is a value here: exceptions lose type and words on a worker's way."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitems__(self, numbers: Sequence[int]) -> Columns | TitanError:
        try:
            return stacked([self._samples[g] for g in numbers])
        except TitanError as error:
            return error


def _as_read(read: Columns | TitanError) -> "Columns | TitanError | _Sent":
    sent = isinstance(read, tuple) and torch.utils.data.get_worker_info() is not None
    return _Sent(read) if sent else read  # type: ignore[arg-type]


class _Sent:
    """A micro batch on its way from a loader process, through a pipe. PyTorch would send tensors through files in
    /dev/shm, which containers keep small (64 MB under Docker). A process that finds no room there prints so and sends
    nothing, and its reader waits for ever."""

    def __init__(self, columns: Columns) -> None:
        self._arrays = [None if column is None else column.numpy() for column in columns]

    def columns(self) -> Columns:
        """The tensors, which share the memory of what has arrived."""
        columns = [None if array is None else torch.from_numpy(array) for array in self._arrays]
        return tuple(columns)  # type: ignore[return-value]

    def pin_memory(self) -> Columns:
        """The tensors in pinned memory; called by the thread that PyTorch has for it."""
        return each(self.columns(), Tensor.pin_memory)
