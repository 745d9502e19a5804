"""Tracks the position in a step: phase, micro batch, current module.

In forward, module hooks give the module. In backward, autograd does: each forward operation is recorded under the
sequence number of its autograd node, and the node that runs backward is looked up. Operations inside a node that run
with gradients enabled, or in a module's forward, are recomputation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from titan.contracts import Loss, ModelPart, Projection

Phase = Literal["start", "forward", "recompute", "backward", "update"]
"""start: before the first micro batch.  update: after the last one: norm, clipping, optimizer."""

LOSS = "loss"
"""Module name used while the loss is computed."""


class StepPosition(NamedTuple):
    """A position in a step. micro_batch: from 0; -1: outside of micro batches.  module: canonical name."""

    phase: Phase
    micro_batch: int
    module: str

    def __str__(self) -> str:
        batch = f" of micro batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"{self.phase}{batch}" + (f", {self.module}" if self.module else "")


class PositionTracker:
    """Tracks the position in a step of these model parts; `now` is called at each operation.

    on_forward: called with each module when its forward has ended, before its inputs are freed.
    on_micro_batch: called when a part starts a micro batch.
    in_node: whether autograd was running a node at the last call of `now`.
    """

    def __init__(
        self, parts: Sequence[ModelPart], on_forward: Callable[[nn.Module], None], on_micro_batch: Callable[[], object]
    ) -> None:
        self._names = {module: name for part in parts for name, module in part.module.named_modules()}
        self._roots = {part.module for part in parts}
        self._on_forward, self._on_micro_batch = on_forward, on_micro_batch
        self._calls = dict.fromkeys(self._roots, 0)
        self._stack: list[str] = []
        self.in_node = False
        self._outside: StepPosition | None = StepPosition("start", -1, "")
        self._noted: dict[int, StepPosition] = {}
        self._at_loss = False
        self._known: dict[StepPosition, StepPosition] = {}
        self._micro_batch, self._back = -1, StepPosition("backward", -1, "")

    def now(self) -> StepPosition:
        """The step position of the operation just dispatched."""
        if self._outside is not None:
            return self._outside
        node = torch._C._current_autograd_node()
        self.in_node = node is not None
        if node is None or self._at_loss:  # a loss may differentiate within the forward, chunk by chunk
            if self._stack or torch.is_grad_enabled():
                return self._note(self._place("forward", self._micro_batch, self._inner()))
            return self._back
        if torch.is_grad_enabled() or self._stack:
            return self._note(self._place("recompute", self._back.micro_batch, self._inner() or self._back.module))
        origin = self._noted.get(node._sequence_nr())
        if origin is not None:
            self._back = self._place("backward", origin.micro_batch, origin.module)
        return self._back

    def _inner(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _place(self, phase: Phase, micro_batch: int, module: str) -> StepPosition:
        place = StepPosition(phase, micro_batch, module)
        return self._known.setdefault(place, place)

    def _note(self, place: StepPosition) -> StepPosition:
        # Autograd makes the node, which takes a number, before it lets the operation run.
        self._noted[torch._C._autograd._get_sequence_nr() - 1] = place
        return place

    @contextmanager
    def micro_batches(self) -> Iterator[None]:
        """Open while the engine runs the micro batches of a step; the phase is "update" afterwards."""
        self._outside = None
        try:
            yield
        finally:
            self._outside = StepPosition("update", -1, "")

    @contextmanager
    def loss(self, loss: Loss) -> Iterator[None]:
        """Give the operations of a loss the module name LOSS, and the phase "forward", while the context is open."""
        compute, of_hidden = loss.compute, loss.of_hidden

        def named(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            self._stack.append(LOSS)
            try:
                return compute(logits, labels)
            finally:
                self._stack.pop()

        def ended(hidden: Tensor, labels: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
            self._at_loss = True
            try:
                return of_hidden(hidden, labels, project)
            finally:
                self._at_loss = False

        loss.compute, loss.of_hidden = named, ended  # type: ignore[method-assign]
        try:
            yield
        finally:
            loss.compute, loss.of_hidden = compute, of_hidden  # type: ignore[method-assign]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install forward hooks on all modules while the context is open."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # recompute ends in the middle of a module
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return
        if module in self._roots:
            self._micro_batch = self._calls[module]
            self._calls[module] += 1
            self._on_micro_batch()
        self._stack.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._names:
            self._stack.pop()
            self._on_forward(module)
