"""One recording: torch.profiler and the allocator's history on this rank, from one step to another."""

import gzip
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from titan.contracts import Mesh
from titan.contracts.base.collectives import around_each

from .trace import OVER

_EVENTS = 1_000_000
"""Allocations that the allocator remembers, the latest ones."""

_LEVEL = 6
"""Of gzip: 9 takes four times as long for a tenth less."""

_CHUNK = 1 << 20


class Written(NamedTuple):
    """The files of a recording. size: bytes of the trace's JSON, before compression.  snapshot: None without memory."""

    trace: Path
    size: int
    snapshot: Path | None


class Recorder:
    """Records whole steps of this rank. A step lasts from the end of the one before, so its wait for data is in it."""

    def __init__(self, mesh: Mesh, folder: Path, *, memory: bool) -> None:
        self._mesh, self._folder = mesh, folder
        self._groups = {group.group_name: axes for axes, group in mesh.groups()}
        self._profiler = profile()
        self._step: Any = None
        self._ready = False
        self._listening = ExitStack()
        self._memory = _allocator(mesh.device) if memory else None

    def prepare(self) -> None:
        """Make the device's profiler ready, a step before the first: what that costs is not recorded."""
        if not self._ready:
            self._profiler.prepare_trace()
            self._ready = True

    def begin(self, step: int) -> None:
        """Record from now on, when step `step` begins."""
        self.prepare()
        self._finish_queued()
        with ExitStack() as listening:
            self._listen(listening)
            self._profiler.start_trace()
            self._enter(step)
            self._listening = listening.pop_all()

    def next(self, step: int) -> None:
        """The step under way is done, and step `step` begins."""
        self._step.__exit__(None, None, None)
        self._enter(step)

    def end(self, name: str, *, whole: bool) -> Written | None:
        """The step under way ends, and all is written under this name.

        Whatever fails, collectives and allocations are not recorded any more.
        whole: no error has ended the run. Work that is queued on the device belongs to the step then. After an error,
            None: the device may wait for a rank that has failed, and torch's profiler cannot stop before the device is
            done. So it is left as it is, and nothing is written. Only a CPU's recording is written then too.

        Raises:
            OSError, RuntimeError: a file cannot be written, or the profiler cannot stop.
        """
        with self._listening:
            if not whole and self._on_device:
                return None
            self._stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"{name}.pt.trace.json.gz"
            size = self._export(trace)
            return Written(trace, size, self._dump(name))

    @property
    def groups(self) -> dict[str, str]:
        """Name of each process group of the mesh -> its axes."""
        return self._groups

    def _enter(self, step: int) -> None:
        self._step = record_function(f"ProfilerStep#{step}")  # a name that TensorBoard's plugin looks for
        self._step.__enter__()

    def _listen(self, listening: ExitStack) -> None:
        """Record allocations and collectives until the stack is closed."""
        if self._memory is not None:
            listening.callback(self._memory._record_memory_history, enabled=None)
            self._memory._record_memory_history(max_entries=_EVENTS, stacks="python")
        if not self._on_device and self._groups:  # gloo does not say for which group it works; NCCL does
            listening.callback(around_each(self._annotated))

    def _stop(self) -> None:
        self._finish_queued()
        self._step.__exit__(None, None, None)
        self._profiler.stop_trace()

    def _export(self, trace: Path) -> int:
        """Write the trace, and return the bytes of its JSON.

        torch's own export to a `.gz` compresses line by line at the highest level, which takes 5 times as long.

        Raises:
            OSError: a file cannot be written. Where the folder of temporary files is full, torch's profiler raises
                nothing and leaves an empty file.
        """
        with tempfile.NamedTemporaryFile(suffix=".json") as place:
            self._profiler.export_chrome_trace(place.name)
            if not Path(place.name).stat().st_size:
                raise OSError(
                    f"torch's profiler wrote no trace to {tempfile.gettempdir()}; set TMPDIR to another folder"
                )
            # By name: the profiler may have put another file there.
            with open(place.name, "rb") as plain, gzip.open(trace, "wb", compresslevel=_LEVEL) as packed:
                shutil.copyfileobj(plain, packed, _CHUNK)
                return plain.tell()

    def _dump(self, name: str) -> Path | None:
        if self._memory is None:
            return None
        snapshot = self._folder / f"{name}.memory.pickle"
        self._memory._dump_snapshot(str(snapshot))
        return snapshot

    @property
    def _on_device(self) -> bool:
        return self._mesh.device.type != "cpu"

    def _finish_queued(self) -> None:
        if self._on_device:
            torch.accelerator.synchronize(self._mesh.device)

    def _annotated(self, operation: Any, args: Sequence[Any], group: dist.ProcessGroup) -> AbstractContextManager[Any]:
        return record_function(OVER + self._groups.get(group.group_name, ""))


def read(trace: Path) -> dict[str, Any]:
    """The JSON of a trace."""
    with gzip.open(trace) as file:
        found: dict[str, Any] = json.load(file)
    return found


def _allocator(device: torch.device) -> Any:
    """The module of the device's allocator, if that can remember allocations; None for a CPU."""
    memory = getattr(torch.get_device_module(device), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None
