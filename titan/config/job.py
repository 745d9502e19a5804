"""A job: everything a TOML decides, parsed, with plugins chosen. Frozen; nothing here needs a process group."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from titan.contracts import Dataset, Fact, Loss, LrSchedule, Model, Optimizer, Precision, Technique, Tokenizer, Tracker
from titan.contracts.base.layout import Layout
from titan.contracts.base.spec import ModelSpec
from titan.contracts.plugin.conformance import answer, label
from titan.contracts.plugin.options import did_you_mean, shown
from titan.contracts.sections import (
    CheckpointSection,
    CommSection,
    DataSection,
    MetricsSection,
    RunSection,
    TrainSection,
    ValidationSection,
)
from titan.errors import PluginError
from titan.paths import expanded


@dataclass(frozen=True)
class Source:
    """A dataset and its share of the samples."""

    plugin: Dataset
    weight: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run as its TOML describes it. Hooks see it as a `titan.contracts.Job`.

    validation_data: the dataset of `[validation]`, or None.  techniques: those that are on, in TOML order.
    table: the resolved TOML, defaults filled in; loading it again gives the same job.
    """

    run: RunSection
    train: TrainSection
    data: DataSection
    checkpoint: CheckpointSection
    validation: ValidationSection
    metrics: MetricsSection
    comm: CommSection
    layout: Layout
    model: Model
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    validation_data: Dataset | None
    loss: Loss
    optimizer: Optimizer
    lr_schedule: LrSchedule
    techniques: tuple[Technique, ...]
    trackers: tuple[Tracker, ...]
    table: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The run's folder, `[run] dir`/`[run] name`, with `~` expanded."""
        return expanded(Path(self.run.dir, self.run.name), "run.dir")

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's spec as the techniques that are on change it."""
        spec = answer(self.model, "spec", ModelSpec)
        for technique in self.techniques:
            spec = answer(technique, "spec", ModelSpec, spec)
        return spec

    @property
    def separable_updates(self) -> bool:
        """Whether the optimizer can update some parameters before others."""
        return self.optimizer.separable

    @cached_property
    def clips_apart(self) -> bool:
        """Whether clipping is a pass over all gradients, as the optimizer does not clip or a technique sees them."""
        sees = any(type(technique).before_update is not Technique.before_update for technique in self.techniques)
        return sees or bool(self.stating("wraps_optimizer")) or not self.optimizer.takes_grad_scale

    def lr_factor(self, step: int) -> float:
        """The schedule's factor of the peak rate for the update of a step, counted from 1."""
        return self.lr_schedule.factor(step, self.train.steps)

    def provides(self, capability: str) -> bool:
        """Whether a technique that is on provides this capability."""
        return any(capability in technique.provides for technique in self.techniques)

    def stating(self, fact: Fact) -> list[str]:
        """What the techniques that are on and state this fact say of it: a sentence each, with the way out."""
        return [facts[fact] for technique in self.techniques if fact in (facts := self._facts_of(technique))]

    def _facts_of(self, technique: Technique) -> dict[Fact, str]:
        facts: dict[Fact, str] = answer(technique, "facts", dict)
        known = get_args(Fact)
        for fact in facts:
            if fact not in known:
                raise PluginError(f"{label(type(technique))}: facts() states {fact!r}{did_you_mean(fact, known)}")
        return facts

    @cached_property
    def expendable(self) -> list[frozenset[int]]:
        """The ranks of each worker that may die without ending the run.

        Raises:
            PluginError: a technique names workers that are none, or the first one.
        """
        axis = self.layout.worker_axis
        if not (axis and self.stating("own_pace")):
            return []
        ranks: dict[int, list[int]] = {}
        for rank in range(self.layout.world_size):
            ranks.setdefault(self.layout.coordinate(rank)[axis], []).append(rank)
        found = {one.name: answer(one, "expendable", tuple, self) for one in self.techniques}
        for name, workers in found.items():
            if wrong := [worker for worker in workers if worker not in range(1, len(ranks))]:
                what = f"must be workers from 1 to {len(ranks) - 1}, as the others need the first"
                raise PluginError(f"technique {name!r}: expendable() returned {shown(wrong[0])}; {what}")
        return [frozenset(ranks[worker]) for worker in sorted({one for some in found.values() for one in some})]

    @cached_property
    def precision(self) -> Precision:
        """The run's precision as the techniques that are on change it."""
        precision = Precision()
        for technique in self.techniques:
            precision = answer(technique, "precision", Precision, precision)
        return precision

    def laid_out(self, layout: Layout, micro_batch: int, techniques: tuple[Technique, ...]) -> "Job":
        """The same training, laid out otherwise; its `table` stays this job's."""
        train = replace(self.train, micro_batch_size=micro_batch)
        job = replace(self, layout=layout, train=train, techniques=techniques)
        if all(type(t).spec is Technique.spec for t in (*self.techniques, *techniques)):
            vars(job)["spec"] = self.spec  # the model's own, and it takes a while to make
        return job

    @property
    def batch_ranks(self) -> int:
        """Ranks (or groups of them) that see different samples."""
        return self.layout.degree_of("dealt")

    @property
    def micro_batch(self) -> int:
        """Samples (sequences) per forward pass on one rank, chosen here if the TOML leaves it at 0."""
        if self.train.micro_batch_size:
            return self.train.micro_batch_size
        return choose_micro_batch(self.train.global_batch_size // self.batch_ranks, self.layout.degree_of("layers"))

    @property
    def micro_batches(self) -> int:
        """Micro batches per step on one rank: gradient accumulation, or what flows through the pipeline."""
        return self.train.global_batch_size // (self.micro_batch * self.batch_ranks)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch, padding included."""
        return self.train.global_batch_size * self.data.seq_len


def choose_micro_batch(share: int, stages: int) -> int:
    """The largest micro batch for a rank's `share` of samples: all of it, or under pipelines the largest that leaves
    two micro batches per stage (where the share is too small for that, one sample)."""
    if stages == 1:
        return share
    return max((size for size in divisors(share) if share // size >= 2 * stages), default=1)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order; takes as many trials as its root."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
