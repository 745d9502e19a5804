"""Context parallelism from outside, the shortest: every rank gathers all keys and values, and masks the later ones.

Shows axes that slice sequences, the cut of a batch, and another operation for the model's attention. Gradients are
summed over the axis by whoever shards or replicates parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from titan.contracts import Axis, Batch, BuildContext, Job, ModelPart, ModelSpec, Technique, register
from titan.layers.attention import AttentionCore, attend


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Slicer(Technique):
    """Cuts each sequence into contiguous slices over `mesh.slicer`."""

    name = "slicer"
    Config = Config
    phase = "convert"
    axes = (Axis(name="slicer", data="sliced", weights="copies", topology_order=31, doc="ranks that slice sequences"),)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rank, self._ranks = 0, 1

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        ranks = job.layout.degree("slicer")
        if job.data.seq_len % ranks:
            yield f"[data] seq_len = {job.data.seq_len} cannot be cut into mesh.slicer = {ranks} slices"

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        self._rank, self._ranks = context.mesh.at("slicer"), context.mesh.layout.degree("slicer")
        if self._ranks > 1:
            part.length_multiple *= self._ranks
            for module in part.module.modules():
                if isinstance(module, AttentionCore):
                    operation = partial(_attend, context.mesh.group("slicer").group_name, module.window)
                    module.use(operation, self.name, follows=("window",))

    def batch(self, batch: Batch) -> Batch:
        def own(whole: Tensor) -> Tensor:
            return whole.chunk(self._ranks, dim=1)[self._rank].contiguous()

        return replace(batch, tokens=own(batch.tokens), labels=own(batch.labels), positions=own(batch.positions))


def _attend(
    name: str, window: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None
) -> Tensor:
    k, v = (all_gather_tensor_autograd(t.contiguous(), 2, name) for t in (k, v))
    places = torch.arange(k.shape[2], device=k.device)
    seen = places <= positions[..., None]  # [B, S, T]
    if window:
        seen &= places > positions[..., None] - window
    if documents is not None:
        seen &= documents[:, None] == documents.gather(1, positions)[..., None]
    return attend(q, k, v, seen[:, None])
