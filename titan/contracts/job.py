"""A job as hooks see it."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from titan.contracts.base.mesh import Layout
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

Fact = Literal["reduces_per_micro_batch", "one_backward", "recomputes_operations", "moves_parameters"]
"""What a technique can state of itself for others to take into account.

reduces_per_micro_batch: gradients are reduced, and parameters let go of, at each micro batch.
one_backward: a backward pass that is split (input first, weights later) cannot go through it.
recomputes_operations: single operations inside a block are computed again in backward.
moves_parameters: the parameters that a forward pass sees have another address at each step.
"""


class Job(Protocol):
    """What a TOML decides, as far as hooks may know it; `titan.config.Job` is one. Frozen."""

    @property
    def run(self) -> RunSection:
        """`[run]`."""

    @property
    def train(self) -> TrainSection:
        """`[train]`."""

    @property
    def data(self) -> DataSection:
        """`[data]`, the host's keys."""

    @property
    def checkpoint(self) -> CheckpointSection:
        """`[checkpoint]`."""

    @property
    def validation(self) -> ValidationSection:
        """`[validation]`, the host's keys."""

    @property
    def metrics(self) -> MetricsSection:
        """`[metrics]`, the host's keys."""

    @property
    def comm(self) -> CommSection:
        """`[comm]`."""

    @property
    def layout(self) -> Layout:
        """Degrees of all mesh axes."""

    @property
    def model(self) -> Model:
        """The model chosen."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer chosen."""

    @property
    def spec(self) -> ModelSpec:
        """The model's spec as the techniques that are on change it."""

    @property
    def table(self) -> Mapping[str, Any]:
        """The resolved TOML."""

    @property
    def batch_ranks(self) -> int:
        """Ranks (or groups of them) that see different samples."""

    @property
    def micro_batch(self) -> int:
        """Samples per forward on one rank."""

    @property
    def micro_batches(self) -> int:
        """Micro batches a step on one rank: gradient accumulation, or what flows through the pipeline."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch, padding included."""

    def provides(self, capability: str) -> bool:
        """Whether a technique that is on provides this capability."""

    def stating(self, fact: Fact) -> list[str]:
        """What the techniques that are on and state this fact say of it: a sentence each, with the way out."""
