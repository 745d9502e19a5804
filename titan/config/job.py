"""A job: everything a TOML decides, parsed, with plugins chosen. Frozen; nothing here needs a process group."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from titan import contracts
from titan.contracts import Dataset, Fact, Loss, LrSchedule, Optimizer, Precision, Technique, Tracker
from titan.contracts.base.layout import Layout
from titan.contracts.base.spec import ModelSpec
from titan.contracts.plugin.conformance import answer, label
from titan.contracts.plugin.options import did_you_mean
from titan.errors import PluginError


@dataclass(frozen=True)
class Source:
    """A dataset and its share of the samples."""

    plugin: Dataset
    weight: float


@dataclass(frozen=True, kw_only=True)
class Job(contracts.Job):
    """A run as its TOML describes it, with what hooks need not know.

    validation_data: the dataset of `[validation]`, or None.  techniques: those that are on, in TOML order.
    """

    optimizer: Optimizer
    sources: tuple[Source, ...]
    validation_data: Dataset | None
    loss: Loss
    lr_schedule: LrSchedule
    techniques: tuple[Technique, ...]
    trackers: tuple[Tracker, ...]

    @cached_property
    def spec(self) -> ModelSpec:
        spec = answer(self.model, "spec", ModelSpec)
        for technique in self.techniques:
            spec = answer(technique, "spec", ModelSpec, spec)
        return spec

    @cached_property
    def clips_apart(self) -> bool:
        """Whether clipping is a pass over all gradients, as the optimizer does not clip or a technique sees them."""
        sees = any(type(technique).before_update is not Technique.before_update for technique in self.techniques)
        return sees or bool(self.stating("wraps_optimizer")) or not self.optimizer.takes_grad_scale

    def lr_factor(self, step: int) -> float:
        return self.lr_schedule.factor(step, self.train.steps)

    def provides(self, capability: str) -> bool:
        return any(capability in technique.provides for technique in self.techniques)

    def stating(self, fact: Fact) -> list[str]:
        """What techniques that are on state about a fact; a PluginError where `facts` fails or states what is none."""
        found = []
        for technique in self.techniques:
            facts: dict[Fact, str] = answer(technique, "facts", dict)
            for key in facts:
                if key not in (known := get_args(Fact)):
                    raise PluginError(f"{label(type(technique))}: facts() states {key!r}{did_you_mean(key, known)}")
            found += [facts[fact]] if fact in facts else []
        return found

    @property
    def keeps_own_pace(self) -> bool:
        """Whether there are workers, and they are at different steps."""
        return bool(self.layout.worker_axis and self.stating("own_pace"))

    @cached_property
    def precision(self) -> Precision:
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
    def micro_batch(self) -> int:
        """Samples (sequences) per forward pass on one rank, chosen here if the TOML leaves it at 0."""
        if self.train.micro_batch_size:
            return self.train.micro_batch_size
        return choose_micro_batch(self.train.global_batch_size // self.batch_ranks, self.layout.degree_of("layers"))


def choose_micro_batch(share: int, stages: int) -> int:
    """A rank's whole share of samples; under pipelines the largest size that leaves two micro batches per stage."""
    if stages == 1:
        return share
    return max((size for size in divisors(share) if share // size >= 2 * stages), default=1)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order; takes as many trials as its root."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
