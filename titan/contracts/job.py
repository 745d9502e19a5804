"""The job that hooks are given: a parsed config, read-only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from titan.contracts.base.layout import Layout
from titan.contracts.base.parts import Precision
from titan.contracts.base.spec import ModelSpec
from titan.contracts.model import Model
from titan.contracts.sections import Sections
from titan.contracts.text import Tokenizer
from titan.paths import expanded

Fact = Literal[
    "reduces_per_micro_batch", "one_backward", "moves_parameters", "sizes_from_values", "own_pace", "scales_loss",
    "narrow_weights", "computes_attention", "weights_on_host", "state_on_host", "updates_in_backward",
    "wraps_optimizer", "skips_inductor", "unpartitioned", "casts_in_gather",
]  # fmt: skip
"""What a technique can state about itself in `Technique.facts`.

reduces_per_micro_batch: it reduces gradients, and frees gathered parameters, in each micro batch.
one_backward: backward of the inputs and of the weights cannot run apart from each other.
moves_parameters: parameters have another address in each step's forward pass.
sizes_from_values: sizes of tensors depend on values of others, which the host reads during a forward.
computes_attention: where an axis above 1 slices sequences, it computes attention without calling another's operation.
weights_on_host: trained weights, their gradients and the update are in the host's memory, of those that shard weights.
state_on_host: between updates the optimizer's state is in the host's memory. Its hook `optimizer` is called after those
    of others, which so find the state of what they step beside its parameters.
updates_in_backward: weights are updated in the backward pass, before it is known whether the step is finite. Its hook
    `optimizer` is called last.
wraps_optimizer: the hook `optimizer` returns another one. It does not take `grad_scale` (`Optimizer.takes_grad_scale`),
    so gradients are clipped before it steps.
own_pace: workers, along an axis with weights of their own, are at different steps. They meet only where all ranks
    validate or save, and at the end (`Technique.meet`). Rows have the numbers of the first worker.
scales_loss: until `after_backward`, gradients are those of the objective times a number that changes between steps. The
    sentence also ends what is said of a run that ends by a step that is not finite.
narrow_weights: weights and their gradients are stored in fewer bits than float32, which lose what is added up in them.
skips_inductor: it compiles layers without inductor, and so without the passes of inductor over their graphs.
unpartitioned: it compiles layers, but leaves it to autograd what their forward saves for the backward.
casts_in_gather: weights are of a type with a gather of its own, which casts them.
"""


@dataclass(frozen=True, kw_only=True)
class Job(Sections, Protocol):
    """What a TOML decides, as far as hooks may know it; `titan.config.Job` is one. Frozen, and equal on all ranks.

    The fields of `Sections` have the host's keys, not those of datasets and trackers.
    layout: degrees of all mesh axes, as pure arithmetic; `context.mesh` has the process groups.
    model, optimizer (an `Optimizer`), tokenizer: the plugins chosen, with their config.
    table: the resolved TOML as nested tables, defaults filled in; loading it again gives the same job.
    """

    layout: Layout
    model: Model
    optimizer: Any
    tokenizer: Tokenizer
    table: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The run's folder, which all ranks may write to: `[run] dir`/`[run] name`, with `~` expanded."""
        return expanded(Path(self.run.dir, self.run.name), "run.dir")

    @property
    def spec(self) -> ModelSpec:
        """The model's spec with the changes of all techniques that are on."""

    @property
    def precision(self) -> Precision:
        """The run's dtypes with the changes of all techniques that are on."""

    @property
    def batch_ranks(self) -> int:
        """Groups of ranks that see different samples: the product of the degrees of axes with data "dealt"."""
        return self.layout.degree_of("dealt")

    @property
    def micro_batch(self) -> int:
        """Sequences per forward on a rank."""

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on a rank, for gradient accumulation or pipelining."""
        return self.train.global_batch_size // (self.micro_batch * self.batch_ranks)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks, padding included."""
        return self.train.global_batch_size * self.data.seq_len

    @property
    def needs_no_shards(self) -> bool:
        """Whether a rank that data parallelism leaves alone needs none of its wrappers (`ModelPart.cast_parameters`).

        It has all of the model on its device, and adds gradients of micro batches up in the dtype that keeps them.
        """
        elsewhere = self.stating("weights_on_host") or self.stating("casts_in_gather")
        whole = self.layout.degree_of("slices", "layers") == 1 and not elsewhere
        return whole and (self.precision.store_dtype == self.precision.reduce_dtype or self.micro_batches == 1)

    @property
    def separable_updates(self) -> bool:
        """Whether the optimizer can update some parameters before others (`Optimizer.separable`)."""
        return bool(self.optimizer.separable)

    def lr_factor(self, step: int) -> float:
        """The schedule's factor of the peak rate for the update of a step, counted from 1."""

    def provides(self, capability: str) -> bool:
        """Whether a technique that is on provides this capability."""

    def stating(self, fact: Fact) -> list[str]:
        """What techniques that are on state about a fact: one sentence each, with the key to change."""
