"""Batches of one rank, read ahead. Its saved state is the number of the next global sample and the fingerprint."""

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from titan.contracts import Batch
from titan.data.samples.samples import Columns, Sample, Samples, stacked, to_device
from titan.data.tokens.processes import context, end_with_parent
from titan.errors import ResourceError, TitanError

GPU_WORKERS = 2
"""Loader processes of a rank on a GPU: while one waits for the file system, the other has the next batch ready."""


class Loader:
    """Iterates over training steps: each gives this rank's micro batches, on its device.

    A step consumes the next `global_batch` samples of the global order; rank `index` of `ranks` takes the `index`-th
    contiguous slice of them, in micro batches of `micro_batch`. `first` is the global sample the first step starts at.
    `workers` processes read ahead; with 0 the training process reads. None stands for GPU_WORKERS on a GPU, and for 0
    on a CPU, where they would take the cores that train.

    Raises (while iterating):
        DataError: as `Samples`, also when a worker met it.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch: int,
        micro_batch: int,
        first: int,
        index: int,
        ranks: int,
        workers: int | None,
        device: torch.device,
    ) -> None:
        assert global_batch % (micro_batch * ranks) == 0 and 0 <= index < ranks
        self._samples, self._device = samples, device
        self._copies = Copies(device)
        self.workers = workers if workers is not None else GPU_WORKERS if device.type != "cpu" else 0
        self._numbers = _Numbers(first, global_batch, micro_batch, index, ranks)
        self._next = first
        self._batches: Iterator[Columns | TitanError] | None = None
        self._children: list[BaseProcess] = []

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> list[Batch]:
        if self._batches is None:
            others = multiprocessing.active_children()
            self._batches = self._read_ahead()
            self._children = [child for child in multiprocessing.active_children() if child not in others]
        starts = self._numbers.starts(self._next)
        step = [self._on_device(self._read(self._batches), start) for start in starts]
        self._next += self._numbers.global_batch
        return step

    def _read(self, batches: "Iterator[Columns | TitanError]") -> Columns | TitanError:
        try:
            return next(batches)
        except Exception as error:
            # PyTorch says so itself, or the connection by which a batch is fetched from the process is gone.
            if not self._children or not wait([child.sentinel for child in self._children], timeout=1.0):
                raise
            what = "a data loader process was killed, possibly for lack of memory"
            raise ResourceError(f"{what}; set data.workers = 0 to load in the training process") from error

    def state_dict(self) -> dict[str, int | str]:
        """The number of the first global sample that no step has been given yet, and whose samples they are."""
        return {"samples": self._next, "fingerprint": self._samples.fingerprint}

    def close(self) -> None:
        """Stop the worker processes; the next step starts new ones."""
        self._batches = None
        # They are left where another one was killed: the exception still holds the iterator, which would end them. They
        # do not hear SIGTERM, by which Python ends its children when it exits, and for which it then waits.
        for child in self._children:
            child.kill()
        self._children = []

    def _read_ahead(self) -> Iterator[Any]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata 0.11 calls what torch 2.13 deprecates
            return iter(
                StatefulDataLoader(
                    _Reader(self._samples),
                    batch_sampler=self._numbers,
                    num_workers=self.workers,
                    collate_fn=_as_read,
                    worker_init_fn=_begin if self.workers else None,
                    pin_memory=self._device.type == "cuda",
                    multiprocessing_context=context() if self.workers else None,
                    generator=torch.Generator(),  # the run's random state is not the loader's to advance
                    snapshot_every_n_steps=1 << 62,
                )
            )

    def _on_device(self, read: Columns | TitanError, start: int) -> Batch:
        if isinstance(read, TitanError):
            raise read
        columns = self._copies(read)
        samples = torch.arange(start, start + len(columns[0]), device=self._device)
        return Batch(*columns, samples=samples)


class Copies:
    """Copies of batches to the device, beside what it computes.

    The host prepares a step while the device still computes the one before. On the stream that computes, the copy would
    be behind all of that. On a stream of its own it is done by then, and the computation waits for an event that has
    passed.
    """

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

    def __getitem__(self, g: int) -> Sample:
        return self._samples[g]

    def __getitems__(self, numbers: Sequence[int]) -> Columns | TitanError:
        try:
            return stacked([self._samples[g] for g in numbers])
        except TitanError as error:
            return error


def _begin(_: int) -> None:
    end_with_parent()


def _as_read(read: Columns | TitanError) -> Columns | TitanError:
    return read
