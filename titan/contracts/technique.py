"""Everything that changes how a model is trained: phases, hooks, and what hooks may know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from titan.contracts.base.batch import Batch
from titan.contracts.base.conformance import technique_clashes
from titan.contracts.base.cost import Costs
from titan.contracts.base.mesh import Axis, Mesh
from titan.contracts.base.parts import ModelPart, Precision
from titan.contracts.base.registry import Plugin
from titan.contracts.base.spec import ModelSpec
from titan.contracts.job import Fact, Job

Phase = Literal["convert", "split", "partition", "recompute", "compile", "shard", "materialise"]
"""When a technique touches the model; `titan/training/phases.py` says why in this order."""


@dataclass
class BuildContext:
    """What a technique may know when it touches the model.

    parts: what this rank holds, once phase `split` is over; empty before.
    """

    job: Job
    mesh: Mesh
    spec: ModelSpec
    precision: Precision
    techniques: Sequence[Technique] = field(default_factory=list)
    parts: Sequence[ModelPart] = ()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.mesh.device


LossFn = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> the objective's sum over valid tokens divided by the step's global number of them."""


class Engine(Protocol):
    """Runs forward and backward over the micro batches of a step."""

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn) -> None:
        """Add the gradients of all micro batches; `loss` is called wherever logits come out."""

    def forward(self, batch: Batch) -> Tensor | None:
        """Logits [B, S, V] of a micro batch, without gradients; None on ranks that do not hold the last stage."""


class Technique(Plugin):
    """Changes how the model is trained. On when its `[plugins.NAME]` table stands, or an axis it owns is above 1.

    phase: when `apply` (or `split`) is called.  axes: mesh axes it owns.
    covers: axes of others that it handles while it is on; their owners are then not switched on by them.
    provides, requires: capabilities, words of the techniques' own. What a technique requires must be provided by one
        that is on; where none is, the provider with `default = True` is switched on.
    conflicts: name or capability of another technique -> a sentence that says why the two cannot be on together.
    preserves_numerics: with it on, the fp32 curve is the one with it off, within the tolerance table; the contract
        suite tests it.
    search_toggle, search_space: a search for the best layout may switch it on and off; and the options that it goes
        through.
    """

    kind = "technique"
    section = "plugins"
    phase: ClassVar[Phase]
    axes: ClassVar[Sequence[Axis]] = ()
    covers: ClassVar[Sequence[str]] = ()
    provides: ClassVar[Sequence[str]] = ()
    requires: ClassVar[Sequence[str]] = ()
    conflicts: ClassVar[Mapping[str, str]] = {}
    preserves_numerics: ClassVar[bool] = True
    search_toggle: ClassVar[bool] = False
    search_space: ClassVar[Sequence[Mapping[str, Any]]] = ()
    _clashes = staticmethod(technique_clashes)

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Sentences about what cannot work in this job, with the numbers that clash and the nearest that fit."""
        return ()

    def facts(self) -> dict[Fact, str]:
        """What others must take into account with these options: fact -> a sentence with the way out of it."""
        if self.phase == "compile":
            return {"one_backward": f"[plugins.{self.name}] compiles it as one; switch {self.name} off"}
        return {}

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model's spec as this technique changes it."""
        return spec

    def precision(self, precision: Precision) -> Precision:
        """The run's precision as this technique changes it."""
        return precision

    def cost(self, costs: Costs, job: Job) -> Costs:
        """What a step costs as this technique changes it, for the planner; asked in TOML order."""
        return costs

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Touch one part of the model, in this technique's phase. On the meta device before `materialise`."""

    def split(self, model: nn.Module, context: BuildContext) -> list[ModelPart]:
        """Phase `split` only: the parts of the whole model that this rank holds, in stage order."""
        return [ModelPart(model)]

    def engine(self, parts: Sequence[ModelPart], context: BuildContext) -> Engine | None:
        """An engine of its own, or None for the host's SequentialEngine. One technique at most brings one."""
        return None

    def before_step(self, step: int) -> None:
        """A step begins: `step` counts from 1."""

    def before_microbatch(self, index: int, count: int) -> None:
        """The SequentialEngine is about to run micro batch `index` of `count`. An engine of one's own need not call it.

        Draws no random numbers and writes to no persistent buffer, as a forward does not.
        """

    def after_backward(self) -> None:
        """All micro batches of the step have been added to the gradients; nothing has been clipped."""

    def before_update(self, grad_norm: Tensor) -> None:
        """Gradients are final; the optimizer is about to step. `grad_norm` is the global norm before clipping."""

    def after_step(self, step: int) -> None:
        """The update is done and gradients are cleared."""

    def state_dict(self) -> dict[str, Any]:
        """What must outlive the process: tables and lists of tensors, and of values that JSON can hold.

        Asked on every rank when a checkpoint is saved, and once before `load_state_dict`; no collectives. Each rank
        gives what it has: tables are united key by key over all ranks, a tensor is saved under its keys from whichever
        rank has it, a DTensor with all its shards. What several ranks give under one key is saved once and must be the
        same on all of them; else the save is refused, naming technique, key and ranks. So name what belongs to a
        layer or a parameter after it: canonical names are the same at every layout.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, on every rank and at any layout; a new run gives an empty table.

        Values come from all ranks. A tensor comes to the ranks whose own `state_dict` names it at this moment: in the
        shards of the DTensor named there, else plain, whole and on the CPU. A tensor that no rank names comes to every
        rank; so a technique with large state makes its tensors before the first step. Keys that were not saved are
        absent.
        """

    def close(self) -> None:
        """The run ends, well or not."""
