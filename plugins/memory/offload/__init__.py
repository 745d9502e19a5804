"""Offloading: what a step does not need all the time is kept in the host's memory.

optimizer    State of the optimizer. Each update brings it to the device, some parameters at a time, updates them there
             with the optimizer's own kernels, and takes it back, the copies beside each other and beside the update.
             ZeRO-Offload (arXiv 2101.06840) updates on the host's processors instead. Of P parameters of a rank:

             state to the device and back    8 P bytes each way for the two float32 means of AdamW
             update on the host              4 P of gradients to the host, 4 P of weights back

             The link works both ways at once: 8 P against 4 P + 4 P, one after the other per parameter. On the host, an
             update of AdamW also reads and writes 28 P bytes of memory, which all devices of a node share: at 8 devices
             and 400 GB/s that is 0.56 ns per parameter, where 8 bytes over a link of 25 GB/s take 0.32 ns. Updating on
             the device works for every optimizer that updates parameter by parameter, and changes no bit.

parameters   Shards of weights and of gradients, and so the optimizer's state and update, on the host's processors
             (FSDP2's CPUOffloadPolicy). A shard goes to the device where its unit is gathered, 4 P bytes per gather,
             and its gradient to the host once it is reduced, 4 P. The update reads and writes 28 P bytes of the host's
             memory with AdamW. Only for weights that are sharded, and not with axes whose ranks sum gradients
             afterwards, as tensor parallelism does: these are on the host by then.

activations  What each layer saves for backward, but for small tensors. It is copied to the host while the next layer
             computes, and fetched while the layer after it computes its backward: two layers' worth stays on the
             device (vDNN, arXiv 1602.08124). With recomputation of whole layers these are the layers' inputs.

Cost: the bytes above per step, and what layers save once each way per micro batch, beside their computation. On the
device three buffers of `buffer_mib` during the update, or of the state of the largest parameter. On the host all of the
state of a node's ranks, and all that their layers save.

Limits: on a CPU the device's memory is the host's, so nothing is gained. PyTorch rounds page-locked allocations up to a
power of 2. The host waits for the device once per step, to learn whether the update is to be skipped. A plan does not
time the copies of shards of weights and gradients over the link: where these take longer than what runs beside them,
steps take longer than planned.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan.contracts import (
    BuildContext,
    Costs,
    Fact,
    Job,
    ModelPart,
    ModelSpec,
    NamedParameter,
    Technique,
    kind_of,
    option,
    register,
)
from titan.contracts.plugin.registry import lacking
from titan.plugins.memory.offload.activations import SMALLEST, Offloader
from titan.plugins.memory.offload.state import in_place, streamed

_log = logging.getLogger("titan.offload")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.offload]`: what is kept in the host's memory."""

    parameters: bool = option(False, "shards of weights and gradients, and the update with the optimizer's state")
    activations: bool = option(False, "what layers save for backward, which is fetched a layer ahead")
    optimizer: bool = option(True, "state of the optimizer, which each update brings to the device and back")
    buffer_mib: float = option(
        64.0,
        "optimizer: state that is brought to the device at once; three such buffers are in use",
        unit="MiB",
        above=0,
    )


@register
class Offload(Technique):
    """Keeps optimizer state, weights and gradients, or what layers save, in the host's memory."""

    name = "offload"
    Config = Config
    config: Config
    phase = "shard"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._gains = True
        self._offloader: Offloader | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """What cannot be kept on the host, and optimizers that update all parameters together."""
        for key in ("optimizer", "parameters") if not job.separable_updates else ():
            if getattr(self.config, key):
                yield (
                    f"{key} = true: updates each parameter by itself, which [optimizer] name = "
                    f"{job.table['optimizer']['name']!r} cannot; set plugins.offload.{key} = false"
                )
        for why in job.stating("sizes_from_values") if self.config.activations else ():
            yield f"activations = true: uses the host's memory again for tensors of the same size, but {why}"
        yield from self._parameters_elsewhere(job, spec) if self.config.parameters else ()

    def _parameters_elsewhere(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Where weights on the host cannot be used: nothing gathers them, or gradients are summed where they lie."""
        if not job.provides("gathered_parameters"):
            yield f"parameters = true: {lacking('gathered_parameters')}, or set plugins.offload.parameters = false"
        for axis in job.layout.axes:
            degree, apart = job.layout.degree(axis.name), axis.weights == "layers" and not spec.tied
            if degree > 1 and axis.weights != "copies" and not apart:
                yield (
                    f"parameters = true: gradients are on the host, where ranks along mesh.{axis.name} = {degree} "
                    f"cannot sum them; set mesh.{axis.name} = 1 or plugins.offload.parameters = false"
                )
        if job.provides("summed_replicas"):
            yield "parameters = true: gradients are on the host, where replicas cannot sum them; set it to false"

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        if not (self.config.optimizer or self.config.parameters or self.config.activations):
            yield "optimizer, parameters and activations are false, so nothing is offloaded; set one, or remove it"

    def facts(self) -> dict[Fact, str]:
        key = "parameters" if self.config.parameters else "optimizer"
        if not getattr(self.config, key):
            return {}
        fact: Fact = "weights_on_host" if self.config.parameters else "state_on_host"
        what = "weights" if self.config.parameters else "the optimizer's state"
        return {
            fact: f"[plugins.offload] {key} = true keeps {what} on the host; set it to false",
            "wraps_optimizer": f"[plugins.offload] {key} = true wraps the optimizer; set it to false",
        }

    def cost(self, costs: Costs, job: Job) -> Costs:
        """What is on the host, and three buffers of state on the device during the update."""
        if self.config.activations:
            costs = replace(costs, activations_on_host=SMALLEST)
        if self.config.parameters:
            there = ("parameters", "gradients")
            state = tuple(replace(each, on_host=each.on_host or each.component in there) for each in costs.state)
            return replace(costs, state=state, optimizer_on_host=True, update_on_host=True)
        if not self.config.optimizer:
            return costs
        return replace(costs, optimizer_on_host=True, update_buffers=3 * self.config.buffer_mib * 2**20)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Watch the layers; remember whether there is something to gain."""
        self._gains = kind_of(context.device) != "cpu"
        if self.config.activations:
            self._offloader = self._offloader or Offloader(context.device)
            self._offloader.watch(part, context.spec)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run begins: say where offloading is in vain. There is no state of its own."""
        if not self._gains:
            _log.warning("offload: the memory of a CPU is the host's, so nothing is gained; numbers stay the same")

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
    ) -> torch.optim.Optimizer:
        if self.config.parameters:
            return in_place(optimizer)
        return streamed(optimizer, self.config.buffer_mib * 2**20) if self.config.optimizer else optimizer
