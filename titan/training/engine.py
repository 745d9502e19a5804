"""SequentialEngine: forward and backward of each micro batch, one after the other, on this rank's model part.

Strict: wraps any engine, and raises if a pass draws random numbers or writes to a persistent buffer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan.contracts import IGNORE, Batch, Engine, Loss, ModelPart, Projection, Technique
from titan.contracts.base.spec import ModelSpec
from titan.contracts.plugin.conformance import label
from titan.errors import PluginError


class SequentialEngine:
    """The engine of a model that is not split into stages (see `contracts.Engine`)."""

    def __init__(self, part: ModelPart, techniques: Sequence[Technique]) -> None:
        self.parts: Sequence[ModelPart] = [part]
        self.techniques = techniques

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        """Add the gradients of all micro batches."""
        try:
            for index, batch in enumerate(batches):
                for technique in self.techniques:
                    technique.before_microbatch(index, len(batches))
                self.parts[0].forward(batch.tokens, batch, batch.labels).backward()  # type: ignore[no-untyped-call]
        finally:
            self.parts[0].restore()

    @torch.no_grad()
    def forward(self, batch: Batch, labels: Tensor | None = None) -> Tensor | None:
        """Logits [B, S, V] of one micro batch of this rank, or with labels its reported loss, without gradients."""
        return self.parts[0].forward(batch.tokens, batch, labels)


class Strict:
    """An engine whose forward and backward passes must draw no random number and write to no persistent buffer.

    Random numbers of PyTorch's default generators depend on the layout, and recomputation draws others than the forward
    did; a `RandomModule` draws by position instead. A persistent buffer that a forward writes is each rank's own, while
    a checkpoint keeps one. Checking every step takes microseconds of the host.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.inner, self.parts, self._device = engine, engine.parts, device
        self._persistent = [
            (name, part.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for part in self.parts
            for kept in [part.module.state_dict(keep_vars=True)]
            for name, _ in part.module.named_buffers(remove_duplicate=False)
            if name in kept
        ]

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        """The engine's own; raises PluginError with the generator that it drew from, or the buffer that it wrote to."""
        generators, buffers = self._generators(), self._written()
        self.inner.forward_backward(batches)
        drawn = " and ".join(g for g, state in self._generators().items() if not torch.equal(state, generators[g]))
        if drawn:
            raise PluginError(
                f"forward or backward drew random numbers from the default generator of {drawn}; these "
                "differ between layouts and under recomputation. Draw by position with a titan.contracts.RandomModule, "
                "and nothing in techniques' before_microbatch()"
            )
        for (name, *_), before, now in zip(self._persistent, buffers, self._written(), strict=True):
            if before != now:
                raise PluginError(
                    f"forward or backward wrote to the persistent buffer {name}, but a checkpoint keeps one value for "
                    "all ranks; register the buffer with persistent=False, or write to it in a technique's after_step"
                )

    def forward(self, batch: Batch, labels: Tensor | None = None) -> Tensor | None:
        """Logits or reported loss of one micro batch, from the engine that this one checks."""
        return self.inner.forward(batch, labels)

    def _generators(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)  # seed and offset, which the host has
        return states

    def _written(self) -> list[tuple[int, int]]:
        """Of each persistent buffer, which tensor it is and how often that was written to."""
        tensors = [getattr(module, name) for _, module, name in self._persistent]
        return [(id(tensor), 0 if tensor is None else tensor._version) for tensor in tensors]


@contextmanager
def evaluating(parts: Sequence[ModelPart]) -> Iterator[None]:
    """Forwards without gradients, after which nothing is as if they had been: gathered parameters are let go of."""
    before = [part.module.training for part in parts]
    for part in parts:
        part.module.eval()
    try:
        # No compiled graph: each would be compiled anew for forwards without gradients.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.module.train(training)
            part.release()


@contextmanager
def weights_to_use(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The parameters are those to evaluate and to save, where an optimizer trains others (see `Optimizer.build`)."""
    if not hasattr(optimizer, "eval"):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]


class StepLoss:
    """The loss of a step: sums over tokens divided once by the global number of valid tokens, never a mean of means.

    It is the end of the last stage: the forward of the projection to logits returns the objective, where the stage is
    called with labels. So sharding gathers for it, tensor parallelism slices it, and a pipeline runs it. Without
    gradients, as in validation, it returns the reported sum of the micro batch, and the step's is left as it is.

    reported: the cross-entropy that this rank has seen in the step.
    scales: those of the techniques, by which the objective is multiplied; `reported` is left as it is.
    """

    def __init__(self, loss: Loss, device: torch.device, techniques: Sequence[Technique] = ()) -> None:
        self._loss = loss
        self.scales = [scale for technique in techniques if (scale := _scale_of(technique)) is not None]
        self.reported = torch.zeros((), device=device)
        self._tokens = torch.ones((), device=device)
        self._labels: Tensor | None = None

    def end(self, parts: Sequence[ModelPart], spec: ModelSpec) -> None:
        """Make this the end of the parts, after the last phase: of the one that holds the projection."""
        for part in parts:
            part.runner.register_forward_pre_hook(self._take_labels, with_kwargs=True)
            if part.holds(spec.head[-1]):
                projection = part.module.get_submodule(spec.head[-1])
                whole = Projection(projection, projection.forward, spec.vocab_size)
                projection.forward = partial(self._project, whole)

    def begin(self, tokens: Tensor) -> None:
        """Start a step of `tokens` valid tokens over all ranks and micro batches (a scalar on the device)."""
        self.reported = torch.zeros_like(self.reported)
        self._tokens = tokens.clamp(min=1)

    def _take_labels(self, runner: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._labels = kwargs.pop("labels", None)
        return args, kwargs

    def _project(self, project: Projection, hidden: Tensor) -> Tensor:
        """Logits [B, S, V], the objective of a micro batch as its share of the step's mean, or its reported sum."""
        labels, self._labels = self._labels, None
        if labels is None:
            return project(hidden)
        if not torch.is_grad_enabled():
            return self._loss.of_hidden(hidden, labels, project)[1]
        project = replace(project, factor=self.scaled(1 / self._tokens))
        objective, reported = self._loss.of_hidden(hidden, labels, project)
        self.reported += reported.detach() / self._tokens
        return self.scaled(objective / self._tokens)

    def scaled(self, objective: Tensor) -> Tensor:
        """What is differentiated, of a share of the step's mean; compiled blocks call it too."""
        for scale in self.scales:
            objective = objective * scale
        return objective


def _scale_of(technique: Technique) -> Tensor | None:
    scale = technique.loss_scale()
    if scale is not None and not (isinstance(scale, Tensor) and scale.dtype == torch.float32 and not scale.ndim):
        raise PluginError(f"{label(type(technique))}: loss_scale() returned {scale!r}; required: a float32 scalar")
    return scale


def valid_tokens(batches: Sequence[Batch]) -> Tensor:
    """Number of positions of these micro batches that are learnt from, an int64 scalar on their device."""
    return torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum()
