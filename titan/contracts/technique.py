"""Techniques: everything that changes how a model is trained. Their phases, their hooks, and what hooks are given.

Hooks of a training run, in the order in which they are called. Unless a hook says otherwise, every rank calls it at the
same point, so a collective over any group of `context.mesh` is allowed. Where workers keep their own pace, its
reductions reach no other worker until all meet:

plan    once per process that loads the job   check, facts, spec, precision: no process group, tensors or collectives
        `titan plan`, search, tune            cost, no_effect: likewise
        `titan plan`, `titan config`, a run   unset_options: likewise
build   once per run, on each rank            split or apply (by phase), optimizer, loss_scale
state   once per run, on each rank            state_dict, load_state_dict
step    per micro batch, on each rank         batch (by phase)
        per step, on each rank                before_step, before_microbatch, after_backward, before_update, after_step
        per logged row, on each rank          measure
        per meeting, on each rank             meet: where workers keep their own pace
state   per save, on each rank                state_dict: no collectives
        at the end of training, on each rank  close: no collectives

`titan plan --dry-run` calls the hooks of the build and of one step, and `state_dict`, with tensors on the meta device,
of which each number that a hook reads is 1, and collectives that return at once. Validation, generation and evaluation
call no step hooks. Techniques are called in TOML order, then those without a table, by name; for `batch` and `cost`, by
phase first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from titan.contracts.base.batch import Batch
from titan.contracts.base.cost import Costs, PredictedStep
from titan.contracts.base.layout import Axis
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.parts import ModelPart, Precision
from titan.contracts.base.spec import ModelSpec
from titan.contracts.job import Fact, Job
from titan.contracts.objective import NamedParameter
from titan.contracts.plugin.registry import Plugin
from titan.contracts.tracker import Measure

Phase = Literal["convert", "split", "partition", "recompute", "compile", "shard", "materialise"]
"""When a technique changes the model, in this order; `titan/training/phases.py` gives the reasons."""

SUMMED_GRADIENTS = "summed_gradients"
"""Capability: sums gradients over all axes that slice sequences. Techniques that own such an axis require it unsaid."""


class PerRank(dict[str, Tensor]):
    """A table in a technique's state whose tensors each rank along a mesh axis has of its own, such as an error.

    They are saved together, [ranks, ...]. A load at the same degree of the axis gives each rank its own; at another
    degree, all ranks get the mean of what was saved, or with `join` "sum" their share of its sum.
    tensors: by name; plain, or DTensors placed as this rank's part of the model is.  axis: name of the axis.
    """

    def __init__(self, tensors: Mapping[str, Tensor], axis: str, join: Literal["mean", "sum"] = "mean") -> None:
        super().__init__(tensors)
        self.axis, self.join = axis, join


class Own(dict[str, Tensor]):
    """A table of tensors that belong to one rank of one layout, under keys that are the same on all ranks.

    A load gives them back on as many ranks, of whatever layout, and an empty table on more or fewer.
    """


class Alike(dict[str, Tensor]):
    """A table in a technique's state whose tensors are equal along an axis with weights of their own; saved once.

    Of all other tensors a checkpoint has each worker's, as of the weights.
    """


@dataclass
class BuildContext:
    """What a technique is given in `apply` and `split`. One per rank; treat it as read-only.

    mesh: process groups, and this rank's coordinates.  spec, precision: with the changes of all techniques.
    techniques: those that are on, in TOML order.
    parts: the model parts of this rank, in stage order; empty until phase `split` is over.
    predict: the step that `titan plan --cluster` predicts; "": on titan's cluster of this device; None: there is none.
    in_step: a training step is under way, so the state is not that of a finished one.
    """

    job: Job
    mesh: Mesh
    spec: ModelSpec
    precision: Precision
    techniques: Sequence[Technique] = field(default_factory=list)
    parts: Sequence[ModelPart] = ()
    predict: Callable[[str], PredictedStep | None] = lambda cluster: None
    in_step: bool = False

    @property
    def device(self) -> torch.device:
        """The device this rank trains on. Modules are on the meta device before phase `materialise`."""
        return self.mesh.device


class Engine(Protocol):
    """Runs forward and backward over the micro batches of a step. Made by `Technique.split`, or the host's own.

    May not draw from PyTorch's default generators or write to a persistent buffer: each step is checked.
    parts: the model parts of this rank, in stage order.
    """

    parts: Sequence[ModelPart]

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        """Add the gradients of all micro batches to `.grad`; every rank calls it once per step; collectives allowed.

        batches: this rank's micro batches, `job.micro_batches` of them, on its device, as techniques have cut them.

        The last stage's forward, called with labels, returns the scalar to differentiate (`ModelPart.forward`). It is
        divided by the step's global number of tokens, so gradients are summed, never averaged. Only hooks that a
        technique has put on the modules reduce gradients over data-parallel ranks here. Nothing clears or clips them.
        """

    def forward(self, batch: Batch, labels: Tensor | None = None) -> Tensor | None:
        """Logits [B, S, V] of a micro batch, at `batch.positions`; None on ranks that do not have the last stage.

        labels: [B, S], in validation: to be given to the last stage alone, which then returns the loss that it reports,
            a float32 sum over these positions in nats. Where V is split, all ranks that share it have the whole sum.

        Called under `torch.no_grad` in eval mode, by every rank with a micro batch of its own and the same shape.
        """


class Technique(Plugin):
    """Changes how the model is trained. Its `[plugins.NAME]` table enables it, or a mesh axis of its own above 1.

    phase: when `apply` or `split` is called (`Phase`).
    axes: mesh axes that the technique owns.
    covers: axes of other techniques that this one handles while it is on; these axes then do not enable their owners.
    provides, requires: capabilities, words of the techniques' own. Where no technique that is on provides what another
        requires, the provider with `default = True` is enabled.
    conflicts: name or capability of another technique -> a sentence that says why the two cannot be on together.
    preserves_numerics: the float32 loss curve stays the same within the tolerances of docs/correctness.md. The contract
        suite tests it; a search leaves out techniques that say False, unless the job asks for them.
    search_toggle: a search may switch the technique on and off.  search_space: tables of options that a search tries.
    measures: name -> `Measure` of the numbers that `measure` adds to rows of training.
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
    measures: ClassVar[Mapping[str, Measure]] = {}

    # --- plan -----------------------------------------------------------------------------------------------------

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Sentences about what cannot work in this job; each names value found, value required, and the key.

        Called in every process that loads the job, and for each layout that a search considers. May build the model
        under `torch.device("meta")`.
        """
        return ()

    def facts(self) -> dict[Fact, str]:
        """What other techniques must take into account (`job.stating`): `Fact` -> a sentence with the key to change."""
        if self.phase == "compile":
            return {"one_backward": f"[plugins.{self.name}] compiles it as one; switch {self.name} off"}
        return {}

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model's spec as this technique changes it: a copy made by `dataclasses.replace`, or `spec` itself.

        Called once per loaded job, each technique with the result of the one before. Change what stops being true of
        the model, such as tensor styles or initial values of buffers that the technique registers. Builds nothing.
        Few do, but what a spec says wrongly is cut, drawn and predicted wrongly: no other hook could mend it.
        """
        return spec

    def precision(self, precision: Precision) -> Precision:
        """The run's precision as this technique changes it, likewise; the first one is given float32 for all dtypes."""
        return precision

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        """Sentences about options that change nothing for this model; each names value found and the key.

        A run at its start and a plan print them; a search leaves out tables of `search_space` that have any. `check`
        refuses jobs. Builds nothing. spec: as all techniques have changed it.
        """
        return ()

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The cost of a step as this technique changes it: a copy made by `dataclasses.replace`, or `costs` itself.

        Only the planner calls it, once for each layout it considers (in a run on GPUs for `unset_options`), so keep it
        to arithmetic: a search calls it thousands of times. Techniques are called by phase, within a phase in TOML
        order: what comes after phase `shard`, such as an exchange of weights, is given `costs.updated_over`. Then come
        the loss, the optimizer, and techniques that own an axis with weights "layers". What the latter change must
        follow from their options, the degrees and the micro batch alone.
        costs: see `Costs` for every field and unit.  job: of this layout.
        """
        return costs

    def unset_options(self, job: Job) -> list[dict[str, Any]]:
        """Values of options that the job leaves to memory, None or "auto": tables, the fastest first; or none.

        The technique uses the values of the first table as long as its options are unset. The host sets the first one
        with which the job leaves enough of the device's memory free (`DeviceMemory.limit_gib`), by the costs that
        techniques state. Where several techniques have tables, it takes those that are fewest places down, all added
        up. A table that `check` refuses is skipped.
        job: of this layout.
        """
        return []

    # --- build ----------------------------------------------------------------------------------------------------

    def split(self, model: nn.Module, context: BuildContext) -> Engine | None:
        """Phase `split` only, in place of `apply`: an engine with the parts of the model that this rank trains.

        None: the host's SequentialEngine runs the whole model. Only one technique may define it: what cuts a model into
        stages also says in which order they run. Called for generation and evaluation too.
        model is the whole model on the meta device. Set modules of other stages to None, and drop the layers of other
        stages from their ModuleDict. Later phases wrap the parts, so an engine asks for a part's `runner` in a step.
        """
        return None

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Change one model part, in this technique's phase; called on every rank, for each of its parts in stage order.

        part: `part.module` is on the meta device; in phase `materialise` it is on `context.device` with initial values.
            A checkpoint's weights are loaded later, into the same tensors.

        May replace modules and parameters, wrap forwards (`ModelPart.wrap_forward`), register hooks, and set
        `part.runner`. Canonical names of parameters must not change. Ranks of different pipeline stages have different
        parts: collectives are allowed over groups of axes within a stage, in the same order on all their ranks.
        """

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
    ) -> torch.optim.Optimizer:
        """The run's optimizer as this technique changes it: one that wraps it, or `optimizer` itself.

        Called after the last phase, each technique with the result of the one before, and with what the job's optimizer
        was built from: in TOML order, but the later for the facts `state_on_host` and `updates_in_backward`.
        Who returns a wrapper states the fact `wraps_optimizer`. It has `param_groups` and `state` of the wrapped one,
        and its `eval` and `train` where it has these (`Optimizer.build`). It keeps what it adds there, by a slot name
        of its own per parameter: so a checkpoint has it under canonical names, at any layout. One that keeps state
        elsewhere than the parameter has `state_like`. `step()` is not called where loss or gradient norm are not
        finite, unless it has `_step_supports_amp_scaling` and skips by `found_inf` (`Optimizer.takes_grad_scale`): no
        collectives in it over an axis with weights of their own, whose ranks judge each for themselves.
        """
        return optimizer

    def loss_scale(self) -> Tensor | None:
        """What the objective is multiplied by before it is differentiated: a float32 scalar on the device; or None.

        Called once, after the last phase; change the tensor in place, between steps, alike on all ranks of a worker.
        Divide the gradients by it in `after_backward`; logged losses are without it. While it is above 1, a step that
        is not finite does not end the run, whatever `train.non_finite` is: the update is skipped and counted. So lower
        it after each skipped update, down to 1.
        For gradients in float16 alone: the host has to know, as it divides the loss by tokens and judges the step.
        """
        return None

    # --- step -----------------------------------------------------------------------------------------------------

    def batch(self, batch: Batch) -> Batch:
        """A micro batch as this technique changes it: a copy made by `dataclasses.replace`, or `batch` itself.

        Called on every rank for each micro batch of training, validation, evaluation, generation and the dry run,
        before the forward. A technique whose ranks share a sequence returns this rank's positions of it: tokens, labels
        and positions alike, and documents whole. The host deals samples.
        """
        return batch

    def before_step(self, step: int) -> None:
        """A step begins; `step` counts from 1. The micro batches are on the device, gradients are cleared."""

    def before_microbatch(self, index: int, count: int) -> None:
        """The SequentialEngine is about to run micro batch `index` (from 0) of `count` of this step.

        Other engines need not call it. It obeys the limits of a forward: no draws from PyTorch's default generators,
        no writes to persistent buffers.
        """

    def after_backward(self) -> None:
        """All micro batches have been added to the gradients; norm, clipping and update follow.

        `.grad` of this rank's parameters may be changed in place, or reduced; none may stay a partial sum, since the
        global norm is computed next. Techniques with a loss scale come first, then those that own or cover
        axes, the latest phase first.
        """

    def before_update(self, grad_norm: Tensor) -> None:
        """Gradients are clipped, and the optimizer is about to step, unless loss or norm are not finite.

        grad_norm: global norm before clipping, a float32 scalar on the device, equal on all ranks; NaN where the update
            is skipped. A host that reads it waits for the device.
        """

    def after_step(self, step: int, updated: Tensor) -> None:
        """Step `step` is done: weights are updated (or the update was skipped) and gradients are cleared.

        Called before metrics, validation and saving. Weights and persistent buffers may be changed here, the same way
        on every rank that has them.
        updated: whether loss and norm were finite, so that weights are updated by them; a bool scalar on the device,
            equal on all ranks of a worker. Where it is false, state that follows updates stays, by `torch.where`.
        """

    def measure(self) -> Mapping[str, Tensor | None]:
        """What this rank adds to the row of the step just done: each name in `measures` -> a value, or None.

        Called on every rank when a row is due, after `after_step`; never in a dry run. Gradients are cleared by then:
        add up on the device what they tell in earlier hooks.

        A value is a plain tensor on the rank's device, a scalar or, for a mean, [2] (`Join`). None: this rank has none,
        such as a pipeline stage without the loss. The row leaves out what no rank has a value of, and a mean whose
        counts add up to 0. The host joins the values of all ranks and reads them with the loss: read none here.
        """
        return {}

    def meet(self, step: int) -> Collection[int] | None:
        """All ranks have done step `step`, and are about to validate, to save, or to end.

        Called only where a technique states `own_pace`: where workers may wait for each other, and collectives over all
        ranks are allowed. Weights may be changed here, the same way on every rank that has them.
        Returns the workers that have died so far, of those that `Mesh.spare` names, as the ranks of the first worker
        know; what rank 0 says counts. The host goes on without them: `context.mesh` reduces over those that are there.
        For parameter servers alone: no other technique lets workers be at different steps, and only the host knows when
        a run pauses.
        """
        return None

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State that must outlive the process: tables and lists of tensors, and of values that JSON can hold.

        Called when a checkpoint is saved, and on resume once before `load_state_dict`. Each rank returns the part it
        has; tables are merged key by key over all ranks. A tensor is saved under its keys from any rank that returns
        it, a DTensor with all its shards. A value that several ranks return under one key must be the same on all of
        them, or the save fails. So name state of a layer or parameter after it: canonical names are the same at every
        layout. `PerRank`, `Own` and `Alike` are tables of tensors that ranks hold each of their own, or alike.

        A table `weights` of tensors under canonical names of parameters is a second set of weights:
        `titan eval`, `titan generate` and `titan convert` use it with `--weights NAME`.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every rank and at any layout; a new run passes an empty table.

        Called after weights and optimizer state are loaded and before the first step. Values come from all ranks. A
        tensor is loaded on the ranks whose own `state_dict` names it at this moment: as shards of the DTensor named
        there, or else whole, plain and on the CPU. One that no rank names is loaded on every rank, so make large ones
        before the first step. Keys that were not saved are absent.
        """

    def close(self) -> None:
        """The run ends, by its last step or by an error; called in reverse order. Other ranks may be gone."""
