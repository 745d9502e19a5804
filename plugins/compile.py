"""torch.compile, block by block.

All blocks share one graph, so the compile time is that of one block (10-20 s cold, little with a warm cache), whatever
the number of layers. Hooks of data parallelism stay outside of the graph. Worth it on GPUs, and on CPUs for long runs.

Limits: modes that capture CUDA graphs are refused where parameters move, as where they are gathered or cast.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from titan.contracts import BuildContext, Costs, Fact, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.plugin.options import did_you_mean
from titan.paths import check_python, check_writable, temporary_folder

BACKENDS = ("inductor", "aot_eager", "eager")
"""Known without asking the compiler, whose import takes a second."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.compile]`."""

    backend: str = option("inductor", "torch.compile backend")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default", "torch.compile mode; reduce-overhead and max-autotune capture CUDA graphs"
    )


@register
class Compile(Technique):
    """Compiles the forward of each block with torch.compile."""

    name = "compile"
    Config = Config
    phase = "compile"
    search_toggle = True
    provides = ("compiled_layers",)

    def facts(self) -> dict[Fact, str]:
        """A layer's backward is one; other backends than PyTorch's compiler run its graph as it is."""
        facts, name = super().facts(), self.config.backend
        if name != "inductor":
            what = f'[plugins.compile] backend = "{name}" does not use it; set backend = "inductor"'
            facts["skips_inductor"] = what
        if name == "eager":
            why = '[plugins.compile] backend = "eager" runs layers as autograd does; set backend = "inductor"'
            facts["unpartitioned"] = why
        return facts

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """A backend that exists, and no CUDA graphs over parameters that move."""
        name = self.config.backend
        if name not in BACKENDS and name not in (known := torch.compiler.list_backends(exclude_tags=None)):
            yield f"backend = {name!r}: no backend of torch.compile{did_you_mean(name, known)}"
        for why in job.stating("sizes_from_values"):
            yield f"compiles a block as one graph, but {why}"
        if self.config.mode in ("reduce-overhead", "max-autotune"):
            for why in job.stating("moves_parameters"):
                yield (
                    f'mode = "{self.config.mode}" captures CUDA graphs, which replay fixed addresses, but {why}; use '
                    'mode = "max-autotune-no-cudagraphs" or "default"'
                )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Elementwise operations of a block are merged."""
        return replace(costs, fused=True)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Wrap the forward of each block of this model part in torch.compile.

        Raises:
            ConfigError: PyTorch's compiler can start no process, or keep nothing.
        """
        if self.config.backend == "inductor":
            check_python()
            named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            check_writable(Path(named) if named else temporary_folder(), "TORCHINDUCTOR_CACHE_DIR")
        compiled = partial(torch.compile, backend=self.config.backend, mode=self.config.mode, fullgraph=True)
        for name, _ in part.layers(context.spec):
            part.wrap_forward(name, "compile", compiled)
