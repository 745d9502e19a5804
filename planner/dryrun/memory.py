"""Records every storage of a step: size, lifetime and component (parameters, gradients, ...).

The component is often known only later: a storage is a gradient once it has reached its parameter. Changes of size are
therefore recorded with a record of the storage, and summed when the step is over.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan.planner.dryrun.step_position import StepPosition

SAVED, TRANSIENT = "saved", "transient"


class Storage:
    """A storage of this rank.

    born: step position of its allocation.  op, shape, dtype: of the tensor that allocated it.  component: one of
    COMPONENTS, or empty: then `what` derives it.  kept: seen by a backward operation.
    """

    __slots__ = ("born", "component", "dtype", "kept", "op", "shape", "turn")

    def __init__(self, born: StepPosition, op: str, tensor: Tensor, component: str, turn: int) -> None:
        self.born, self.op, self.shape, self.dtype = born, op, tensor.shape, tensor.dtype
        self.component, self.turn, self.kept = component, turn, False

    def what(self) -> str:
        """The component. Without one: "saved" if made in forward and alive in a later backward, else "transient"."""
        if self.component:
            return self.component
        return SAVED if self.kept and self.born.phase in ("forward", "recompute") else TRANSIENT


class Account:
    """Live storages and the changes of their sizes.

    changes: (storage, change in bytes, step position), in order.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[Storage, int, StepPosition]] = []
        self._live: dict[int, tuple[weakref.ref[Any], Storage]] = {}
        self._bytes: dict[int, int] = {}
        self._turn, self._backward = 0, False
        self.place = StepPosition("start", -1, "")

    def at(self, place: StepPosition) -> None:
        """Set the step position of the next operations; counts changes from forward or recompute to backward."""
        self.place = place
        backward = place.phase == "backward"
        if backward and not self._backward:
            self._turn += 1
        self._backward = backward

    def add(self, tensor: Tensor, op: str, component: str = "") -> None:
        """Record the storage of a tensor if it is new. op: the operation that made it.  component: "" if not known."""
        storage = tensor.untyped_storage()
        key = id(storage)  # PyTorch keeps the object as long as the storage lives
        if key in self._live:
            return
        record = Storage(self.place, op, tensor, component, self._turn)
        self._live[key] = weakref.ref(storage, lambda _: self._remove(key)), record
        self._bytes[key] = 0
        self._change(key, record, storage.nbytes())

    def find(self, tensor: Tensor) -> Storage | None:
        """The record of a tensor's storage; None: it is not recorded."""
        held = self._live.get(id(tensor.untyped_storage()))
        return None if held is None else held[1]

    def tag(self, tensor: Tensor, component: str, over: Sequence[str] = ("",)) -> None:
        """Set the component of a tensor's storage if its present one is in `over`."""
        record = self.find(tensor)
        if record is not None and record.component in over:
            record.component = component

    def _change(self, key: int, record: Storage, size: int) -> None:
        delta = size - self._bytes[key]
        if delta:
            self._bytes[key] = size
            self.changes.append((record, delta, self.place))

    def _remove(self, key: int) -> None:
        _, record = self._live.pop(key)
        self._change(key, record, 0)
        self._bytes.pop(key)
        record.kept = self._turn > record.turn

    def close(self) -> None:
        """End the step: storages freed later are not recorded."""
        for _, record in self._live.values():
            record.kept = self._turn > record.turn
        self._live, self._bytes = {}, {}

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Record resized storages while the context is open: FSDP frees and reallocates gathered parameters so."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            held = self._live.get(id(storage))
            if held is not None:
                self._change(id(storage), held[1], size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
