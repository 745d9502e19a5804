"""The job that hooks are given: a parsed config, read-only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from titan.contracts.base.layout import Layout
from titan.contracts.base.parts import Precision
from titan.contracts.base.spec import ModelSpec
from titan.contracts.model import Model
from titan.contracts.sections import (
    CheckpointSection,
    CommSection,
    DataSection,
    MetricsSection,
    RunSection,
    TrainSection,
    ValidationSection,
)
from titan.contracts.text import Tokenizer

Fact = Literal[
    "reduces_per_micro_batch", "one_backward", "moves_parameters", "sizes_from_values", "own_pace", "scales_loss",
    "narrow_weights", "computes_attention", "weights_on_host", "state_on_host", "updates_in_backward",
    "wraps_optimizer", "skips_inductor", "unpartitioned",
]  # fmt: skip
"""What a technique can state about itself in `Technique.facts`.

reduces_per_micro_batch: it reduces gradients, and frees gathered parameters, in each micro batch.
one_backward: backward of the inputs and of the weights cannot run apart from each other.
moves_parameters: parameters have another address in each step's forward pass.
sizes_from_values: sizes of tensors depend on values of others, which the host reads during a forward.
computes_attention: where an axis above 1 slices sequences, it computes attention without calling another's operation.
weights_on_host: trained weights, their gradients and the update are in the host's memory, of those that shard weights.
state_on_host: between updates the optimizer's state is in the host's memory. The hook `optimizer` of such a technique
    is called after those of others, which so find the state of what they step beside its parameters.
updates_in_backward: weights are updated in the backward pass, before it is known whether the step is finite. The hook
    `optimizer` of such a technique is called last.
wraps_optimizer: the hook `optimizer` returns another one. It does not take `grad_scale` (`Optimizer.takes_grad_scale`),
    so gradients are clipped before it steps.
own_pace: workers, along an axis with weights of their own, are at different steps. They meet only where all ranks
    validate or save, and at the end (`Technique.meet`). Rows have the numbers of the first worker.
scales_loss: until `after_backward`, gradients are those of the objective times a number that changes between steps. The
    sentence also ends what is said of a run that ends by a step that is not finite.
narrow_weights: weights and their gradients are stored in fewer bits than float32, which lose what is added up in them.
skips_inductor: it compiles layers without inductor, and so without the passes of inductor over their graphs.
unpartitioned: it compiles layers, but leaves it to autograd what their forward saves for the backward.
"""


class Job(Protocol):
    """What a TOML decides, as far as hooks may know it; `titan.config.Job` is one. Frozen, and equal on all ranks."""

    @property
    def run(self) -> RunSection:
        """Section `[run]`."""

    @property
    def train(self) -> TrainSection:
        """Section `[train]`."""

    @property
    def data(self) -> DataSection:
        """Section `[data]`: the host's keys, not the dataset's."""

    @property
    def checkpoint(self) -> CheckpointSection:
        """Section `[checkpoint]`."""

    @property
    def validation(self) -> ValidationSection:
        """Section `[validation]`: the host's keys, not the dataset's."""

    @property
    def metrics(self) -> MetricsSection:
        """Section `[metrics]`: the host's keys, not the trackers'."""

    @property
    def comm(self) -> CommSection:
        """Section `[comm]`."""

    @property
    def folder(self) -> Path:
        """The run's folder, which all ranks may write to."""

    @property
    def layout(self) -> Layout:
        """Degrees of all mesh axes, as pure arithmetic; `context.mesh` has the process groups."""

    @property
    def model(self) -> Model:
        """The model plugin chosen, with its config."""

    @property
    def optimizer(self) -> Any:
        """The optimizer plugin chosen (`Optimizer`), with its config."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer plugin chosen, with its config."""

    @property
    def spec(self) -> ModelSpec:
        """The model's spec with the changes of all techniques that are on."""

    @property
    def precision(self) -> Precision:
        """The run's dtypes with the changes of all techniques that are on."""

    @property
    def table(self) -> Mapping[str, Any]:
        """The resolved TOML as nested tables, defaults filled in."""

    @property
    def batch_ranks(self) -> int:
        """Groups of ranks that see different samples: the product of the degrees of axes with data "dealt"."""

    @property
    def micro_batch(self) -> int:
        """Sequences per forward on a rank."""

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on a rank, for gradient accumulation or pipelining."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks, padding included."""

    @property
    def separable_updates(self) -> bool:
        """Whether the optimizer can update some parameters before others (`Optimizer.separable`)."""

    def lr_factor(self, step: int) -> float:
        """The schedule's factor of the peak rate for the update of a step, counted from 1."""

    def provides(self, capability: str) -> bool:
        """Whether a technique that is on provides this capability."""

    def stating(self, fact: Fact) -> list[str]:
        """What techniques that are on state about a fact: one sentence each, with the key to change."""
