"""Adds half of the last step's gradient to each gradient: a technique whose state is as large as the model's part."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan.contracts import BuildContext, ModelPart, Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    late: bool = option(False, "makes its tensors in the first step, and so names none before it")


@register
class Echo(Technique):
    """Gradients with an echo. Each rank keeps those of its own stages, by the names of the parameters."""

    name = "echo"
    Config = Config
    phase = "materialise"
    preserves_numerics = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._parts: list[ModelPart] = []
        self._kept: dict[str, Tensor] = {}
        self._heard: dict[str, int] = {}

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._parts.append(part)
        if not self.config.late:
            self._kept |= {name: torch.zeros_like(parameter.detach()) for name, parameter in part.parameters()}

    @torch.no_grad()
    def after_backward(self) -> None:
        for name, parameter in self._parameters():
            assert parameter.grad is not None
            if name in self._kept:
                parameter.grad.add_(self._kept[name], alpha=0.5)
            self._kept[name] = parameter.grad.clone()
            self._heard[name] = self._heard.get(name, 0) + 1

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [pair for part in self._parts for pair in part.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "heard": self._heard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        here = [name for name, _ in self._parameters()]
        assert self.config.late or sorted(state["kept"]) == sorted(here), sorted(state["kept"])
        self._kept = {name: state["kept"][name] for name in here}
        self._heard = {name: state["heard"][name] for name in here}
