"""Every kind of plugin and what the host asks of it: the one file to read before writing a plugin.

A plugin subclasses one of these, sets `name` and `Config`, and carries `@register`::

    from titan.contracts import Optimizer, option, register

Public methods are hooks and keep the names and parameters given here; helpers start with an underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from titan.batch import IGNORE, Batch, Document
from titan.cache import Cache, KeyValues
from titan.conformance import technique_clashes
from titan.cost import Costs
from titan.device import kind_of
from titan.mesh import Axis, Mesh, Role
from titan.options import REQUIRED, option
from titan.parts import Part, Precision, sum_gradients
from titan.plan import HfTensor, ModelPlan
from titan.registry import Plugin, register

if TYPE_CHECKING:
    from titan.config import Job

__all__ = [
    "IGNORE", "REQUIRED", "Axis", "Batch", "Cache", "Costs", "Dataset", "Document", "Engine", "HfTensor", "KeyValues",
    "Loss", "LrSchedule", "Mesh", "Model", "ModelPlan", "NamedParameter", "Optimizer", "Part", "Phase", "Precision",
    "Role", "Row", "RunInfo", "Technique", "Tokenizer", "Tracker", "World", "kind_of", "option", "register",
    "sum_gradients",
]  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------


class Model(Plugin, ABC):
    """An architecture: nn.Module arithmetic, and a plan that is data. Knows no mesh, no process group, no job."""

    kind = "model"
    section = "model"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published sizes: preset name -> values of Config."""

    def check(self) -> Iterable[str]:
        """Sentences about sizes that cannot work together, with the numbers that clash and the nearest that fit.

        Asked before `plan` and `build`, which may count on sizes that fit.
        """
        return ()

    @abstractmethod
    def plan(self) -> ModelPlan:
        """The model as data."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The whole model, uninitialised; called under `torch.device("meta")`.

        Its forward takes `(x, documents=None, cache=None)` and is what every stage runs: x is tokens [B, S] on the
        first stage and hidden states [B, S, D] on the others, told apart by dtype, because a stage that is not the
        first may hold a stem module whose weight its head is tied to. The result is logits [B, S, V] where the head is
        present, hidden states where its modules were set to None. `documents` [B, S] numbers the document each token
        belongs to, when attention must not cross documents.

        With a `cache` the tokens follow those of earlier calls: they stand at `cache.positions` [B, S], and in each
        layer `cache.layer(name).attend(q, k, v)` takes the place of causal attention; `documents` is then None. A
        forward without this parameter generates text too, going through all of it for each token.
        """

    hf_ignored: ClassVar[Sequence[str]] = ()
    """Globs of tensors in Hugging Face checkpoints that hold no weights: buffers that old exports wrote."""

    def hf_config(self) -> Mapping[str, Any] | None:
        """The config.json with which transformers builds this very model; None where it has no such architecture."""
        return None

    def hf_tensors(self) -> Sequence[HfTensor]:
        """Every tensor of the Hugging Face checkpoint of this model; but for copies, each parameter stands in one."""
        return ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Values of Config for a config.json; None when it is of another architecture.

        Raises:
            ConfigError: it is of this architecture, but asks for what the model cannot do; names key and value.
        """
        return None


# --- text and tokens --------------------------------------------------------------------------------------------


class Tokenizer(Plugin, ABC):
    """Text to token ids and back, offline."""

    kind = "tokenizer"
    section = "tokenizer"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    @abstractmethod
    def end(self) -> int:
        """Id that ends a document."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever any text would be encoded otherwise; part of the key of tokenised data."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end id. Text that looks like a special token is ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; broken UTF-8 becomes the replacement character, the end id nothing."""

    def hf_files(self) -> Mapping[str, Any] | None:
        """File name -> JSON value of the files with which transformers builds this very tokenizer; None: it cannot."""
        return None

    @classmethod
    def from_hf(cls, folder: Path) -> Mapping[str, Any] | None:
        """Values of Config that read a Hugging Face folder's tokenizer; None when its files are not of this kind."""
        return None


class Dataset(Plugin, ABC):
    """A source of text, or of tokens that somebody has already made."""

    kind = "dataset"
    section = "data"

    @abstractmethod
    def files(self) -> list[Path]:
        """The files read, in a fixed order. Their contents are the dataset's identity.

        Raises:
            DataError: there is none.
        """

    def documents(self, file: Path) -> Iterator[Document]:
        """The documents of one of the files, in order. Runs in worker processes.

        Raises:
            DataError: something cannot be read; names the place.
        """
        raise NotImplementedError

    def shards(self) -> list[Path] | None:
        """The token shards, for a dataset that is tokenised already; None (the default) for text."""
        return None


# --- loss, optimizer, schedule ----------------------------------------------------------------------------------


class Loss(Plugin, ABC):
    """What is minimised, as a sum over tokens; the trainer divides once, by the step's global number of valid ones."""

    kind = "loss"
    section = "loss"

    @abstractmethod
    def compute(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, reported): sums over the valid tokens, fp32 scalars, plain tensors.

        logits [B, S, V], maybe a DTensor split over V; labels [B, S]. `objective` is differentiated; `reported`,
        without a graph, is the cross-entropy in nats that the logs show (the same where there is no extra term). Both
        are equal on all ranks that split V.
        """

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The job's costs with this loss at the end of the head."""
        return costs


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter with its canonical name, and whether usual practice decays it."""

    name: str
    parameter: nn.Parameter
    decays: bool


class Optimizer(Plugin, ABC):
    """Turns gradients into an update."""

    kind = "optimizer"
    section = "optimizer"

    @abstractmethod
    def build(self, parameters: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        """An optimizer over these (plain or DTensor). Each group's `lr` is the peak rate; the schedule scales it.

        Its state holds tensors shaped like the parameter or scalars, so that any layout can load it.
        """

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The job's costs with this optimizer's state and the bytes of its update."""
        return costs

    def describe(self, parameters: Sequence[NamedParameter]) -> str:
        """One line for the start of the run: which parameters are decayed, and how many."""
        return ""


class LrSchedule(Plugin, ABC):
    """The learning rate over the run, as a factor of the peak. A function of the step alone: nothing to save."""

    kind = "lr_schedule"
    section = "lr_schedule"

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Factor for the update that ends step `step` (1 is the first) of `steps`."""


# --- what is measured -------------------------------------------------------------------------------------------

Row = Mapping[str, float | int | None]
"""One line of metrics; `step` is always there. None: not known here (MFU of a device without a known peak)."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may want to know at the start."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    start_step: int
    steps: int
    params: int
    every: int


class Tracker(Plugin, ABC):
    """Where metrics go. Lives on rank 0 alone. Configured in `[metrics.NAME]`; `enabled = false` switches one off."""

    kind = "tracker"
    section = "metrics"

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on from `info.start_step`."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Take a row."""

    def progress(self, step: int) -> None:
        """A step is done; called each step, so it must cost nothing."""

    def close(self) -> None:
        """The run ends, well or not."""


# --- techniques: everything that changes how a model is trained ---------------------------------------------------

Phase = Literal["convert", "split", "partition", "recompute", "compile", "shard", "materialise"]
"""When a technique touches the model; `titan/phases.py` says why in this order."""


@dataclass
class World:
    """What a technique may know when it touches the model.

    parts: what this rank holds, once phase `split` is over; empty before.
    """

    job: Job
    mesh: Mesh
    plan: ModelPlan
    precision: Precision
    techniques: Sequence[Technique] = field(default_factory=list)
    parts: Sequence[Part] = ()

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
    provides, requires: capabilities. What a technique requires must be provided by one that is on; where none is, the
        provider with `default = True` is switched on.
    conflicts: name of another technique -> a sentence that says why the two cannot be on together.
    parity: with it on, the fp32 curve is the one with it off, within the tolerance table; the contract suite tests it.
    optional, choices: a search for the best layout may switch it on and off; and the options that it goes through.
    """

    kind = "technique"
    section = "plugins"
    phase: ClassVar[Phase]
    axes: ClassVar[Sequence[Axis]] = ()
    covers: ClassVar[Sequence[str]] = ()
    provides: ClassVar[Sequence[str]] = ()
    requires: ClassVar[Sequence[str]] = ()
    conflicts: ClassVar[Mapping[str, str]] = {}
    parity: ClassVar[bool] = True
    optional: ClassVar[bool] = False
    choices: ClassVar[Sequence[Mapping[str, Any]]] = ()
    _clashes = staticmethod(technique_clashes)

    def check(self, job: Job, plan: ModelPlan) -> Iterable[str]:
        """Sentences about what cannot work in this job, with the numbers that clash and the nearest that fit."""
        return ()

    def plan(self, plan: ModelPlan) -> ModelPlan:
        """The model's plan as this technique changes it."""
        return plan

    def precision(self, precision: Precision) -> Precision:
        """The run's precision as this technique changes it."""
        return precision

    def cost(self, costs: Costs, job: Job) -> Costs:
        """What a step costs as this technique changes it, for the planner; asked in TOML order."""
        return costs

    def apply(self, part: Part, world: World) -> None:
        """Touch one part of the model, in this technique's phase. On the meta device before `materialise`."""

    def split(self, model: nn.Module, world: World) -> list[Part]:
        """Phase `split` only: the parts of the whole model that this rank holds, in stage order."""
        return [Part(model)]

    def engine(self, parts: Sequence[Part], world: World) -> Engine | None:
        """An engine of its own, or None for the host's Direct one. One technique at most brings one."""
        return None

    def before_step(self, step: int) -> None:
        """A step begins: `step` counts from 1."""

    def before_microbatch(self, index: int, count: int) -> None:
        """The Direct engine is about to run micro batch `index` of `count`. An engine of one's own need not call it."""

    def after_backward(self) -> None:
        """All micro batches of the step have been added to the gradients; nothing has been clipped."""

    def before_update(self, grad_norm: Tensor) -> None:
        """Gradients are final; the optimizer is about to step. `grad_norm` is the global norm before clipping."""

    def after_step(self, step: int) -> None:
        """The update is done and gradients are cleared."""

    def state_dict(self) -> dict[str, Any]:
        """What must outlive the process: tensors, and values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def close(self) -> None:
        """The run ends, well or not."""
