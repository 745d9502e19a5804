"""Model architectures: arithmetic in an nn.Module, and a `ModelSpec` that says everything else as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from titan.contracts.base.spec import HfTensor, ModelSpec
from titan.contracts.plugin.registry import Plugin
from titan.contracts.tracker import Measure


class Model(Plugin, ABC):
    """An architecture: nn.Module arithmetic, and a spec that is data. Knows no mesh, no process group and no job.

    Hooks run on every rank and in commands without ranks, such as `titan plan`: no collectives.
    """

    kind = "model"
    section = "model"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published sizes: preset name -> values of Config."""
    measures: Mapping[str, Measure] = {}
    """Numbers that `measure` adds to rows of training, by name. A model may have others for each of its configs."""

    def check(self) -> Iterable[str]:
        """Sentences about sizes that cannot work together: values found, values required, and the key to change.

        Called first; `spec` and `build` are called only where it returns no sentence.
        """
        return ()

    @abstractmethod
    def spec(self) -> ModelSpec:
        """The model as data; a function of the config alone, equal in every process. Allocates no tensors."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The whole model, called under `torch.device("meta")` on every rank; every call returns a new module.

        Values of parameters and buffers are lost: `ModelSpec.init` and `ModelSpec.buffers` give the initial values.

        `forward(x, positions, documents=None)` is what every pipeline stage runs. x is tokens [B, S] int64 on the first
        stage, and hidden states [B, S, D] of the compute dtype on the others. Tell the two apart by dtype, not by
        the modules of the stage: a later stage may hold an embedding whose weight its head is tied to. Returns logits
        [B, S, V] where the head is present, hidden states [B, S, D] where the head's modules were set to None.
        `positions` [B, S] int64 are the places of the tokens in their sequences: S may be this rank's slice of a
        sequence, so a model invents no positions of its own. `documents` [B, T] int64 numbers the document of each
        place of the whole sequence, where attention must not cross documents; else None. Both go to the modules in
        which positions see each other, `AttentionCore`s that `ModelSpec.attention` names.

        A forward with an argument `lengths=None` is given `Batch.lengths` in it, in training, where samples are padded.
        Only a model that shares numbers over tokens needs it, such as counts of tokens per expert: those at
        `positions < lengths[:, None]` count.

        A forward draws random numbers by `RandomModule`s alone. `ModelSpec.draws` names them, and the forward has
        another argument, `seeds=None` [B] int64, that it passes on to them; None in eval mode, where nothing is drawn.
        A training step whose forward draws from PyTorch's generators or writes to a persistent buffer raises a
        PluginError, as the curve would depend on the layout.

        Where the spec names attention, text is generated with a key-value cache as its operation, elsewhere by
        recomputing the whole text for each token.
        """

    def after_step(self, module: nn.Module, total: Callable[[Tensor], Tensor], updated: Tensor) -> None:
        """A step of training is done: weights are updated, or the update was skipped. Persistent buffers may change.

        Called for each part of the model that a rank has, on all ranks of its stage alike, before metrics and saving.
        A forward leaves what it counts in buffers that are not persistent. Where layers are recomputed, it runs again:
        ask `titan.layers.experts.is_recomputed`.
        total: adds up a tensor, in place, over all ranks that see other tokens. All ranks call it alike.
        updated: as in `Technique.after_step`. A skipped step leaves persistent buffers as they were, by arithmetic on
            the device, such as `torch.where`: what its forward has counted may come from NaN.
        """

    def measure(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """What one module adds to a row of training: each name in `measures` -> a value, or None.

        As `Technique.measure`, but called for each part of the model that a rank has; their values are joined as
        those of ranks are. A forward leaves what it measures in attributes of its modules, or in buffers that are not
        persistent. With sequence parallelism a rank's hidden states are its positions alone: use a mean or a maximum.
        module: as `build` made it, with None for the modules of other stages, and as techniques have changed it.
        """
        return {}

    hf_ignored: ClassVar[Sequence[str]] = ()
    """Globs of tensors in Hugging Face checkpoints that hold no weights: buffers that old exports wrote."""

    def hf_config(self) -> Mapping[str, Any] | None:
        """The config.json with which transformers builds the same model; None where it has no such architecture.

        Raises:
            ConfigError: it has one, but not with these options; names each with its value and those that it has.
        """
        return None

    def hf_tensors(self) -> Sequence[HfTensor]:
        """All tensors of this model's Hugging Face checkpoint. Each parameter is in exactly one, copies left aside."""
        return ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Values of Config for a Hugging Face config.json, which is not trusted; None: it is of another architecture.

        Called on every model plugin until one returns values.

        Raises:
            ConfigError: it is of this architecture, but asks for what the model does not support; names key and value.
        """
        return None
