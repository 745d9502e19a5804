"""An architecture, as arithmetic and as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from titan.contracts.base.registry import Plugin
from titan.contracts.base.spec import HfTensor, ModelSpec


class Model(Plugin, ABC):
    """An architecture: nn.Module arithmetic, and a spec that is data. Knows no mesh, no process group, no job."""

    kind = "model"
    section = "model"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published sizes: preset name -> values of Config."""

    def check(self) -> Iterable[str]:
        """Sentences about sizes that cannot work together, with the numbers that clash and the nearest that fit.

        Asked before `spec` and `build`, which may count on sizes that fit.
        """
        return ()

    @abstractmethod
    def spec(self) -> ModelSpec:
        """The model as data."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The whole model, uninitialised; called under `torch.device("meta")`.

        Whatever values parameters and buffers are built with are lost: the spec's `init` and `buffers` say theirs.

        Its forward takes `(x, documents=None, cache=None)` and is what every stage runs: x is tokens [B, S] on the
        first stage and hidden states [B, S, D] on the others, told apart by dtype, because a stage that is not the
        first may hold an embedding whose weight its head is tied to. The result is logits [B, S, V] where the head is
        present, hidden states where its modules were set to None. `documents` [B, S] numbers the document each token
        belongs to, when attention must not cross documents.

        A forward draws no random numbers and writes to no persistent buffer: either would make the curve depend on the
        layout. A training step that finds one doing so raises a PluginError.

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
