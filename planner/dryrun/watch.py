"""Observes every operation of a step below autograd and DTensor: allocations, FLOPs and collectives."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan.contracts import ModelPart
from titan.contracts.base import collectives
from titan.contracts.base.collectives import Operation
from titan.contracts.host import allocating_on_host, locals_of, on_host
from titan.planner.dryrun import work
from titan.planner.dryrun.memory import Account
from titan.planner.dryrun.meta_tensors import MetaTensorMode
from titan.planner.dryrun.operations import CAST
from titan.planner.dryrun.step_position import PositionTracker

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, COMMUNICATION, OTHER, HOST = "gathered", "communication", "other", "host"

PERSISTENT = "persistent"
"""What stands for an operation where a tensor exists before the step."""

_CAST = CAST.overloadpacket


class Watch:
    """Observes the steps of these model parts.

    group: finds a process group by its name.  hosted: weights, gradients and state are in the host's memory.

    memory: recorded storages.  flops: FLOPs by module and phase.  sent: calls by (collective,
    group name, bytes, bytes that this rank sends).  computing: unsharded parameters that modules compute with, by id.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        group: Callable[[str], dist.ProcessGroup],
        on_micro_batch: Callable[[], object],
        hosted: bool = False,
    ) -> None:
        self.parts, self._group = parts, group
        self._trained = {"parameters": HOST, "gradients": HOST, "optimizer": HOST} if hosted else {}
        self.memory = Account()
        self.position = PositionTracker(parts, self._see_gathered, on_micro_batch)
        self.flops: dict[str, Counter[str]] = defaultdict(Counter)
        self.sent: Counter[tuple[str, str, int, float]] = Counter()
        self._swept = False
        self._idle: set[object] = set()  # operations that add nothing but their results
        self.computing: dict[int, nn.Parameter] = {}

    def _look(self, function: Operation, args: Any, kwargs: Any, out: Any) -> None:
        packet = function.overloadpacket
        place = self.position.now()
        self.memory.at(place)
        if self.position.in_node:
            self._swept = False
        made = (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ()
        for tensor in made:
            if isinstance(tensor, Tensor):
                self.memory.add(tensor, packet.__name__, HOST if allocating_on_host() else "")
        if packet in self._idle:
            return
        if packet is _CAST:
            self._see_cast(args[0], out)
        elif not (collectives.is_collective(function) or work.computes(packet)):
            self._idle.add(packet)
        if collectives.is_collective(function):
            group, kind = collectives.group_of(function, args, self._group), collectives.kind_of(function)
            sent = collectives.bytes_to_others(function, (*args, out), group.size(), group.rank())
            self.sent[kind, group.group_name, collectives.payload(args, out), sent] += 1
            for tensor in collectives.tensors_of(args) if collectives.in_place(function) else ():
                self.memory.tag(tensor, COMMUNICATION)
            return
        flops, again = work.flops_of(function, args, kwargs, out)
        if flops:
            self.flops[place.module][place.phase] += flops - again
            self.flops[place.module]["recompute"] += again

    # --- what a storage is for ------------------------------------------------------------------------------------

    def hold(self, tensors: Sequence[Tensor], component: str) -> None:
        """Record tensors that exist before the step, with their component; those of techniques on the host as such."""
        for tensor in tensors:
            for local in locals_of(tensor):
                self.memory.add(local, PERSISTENT, HOST if on_host(local) else self._trained.get(component, component))

    def _see_gathered(self, module: nn.Module) -> None:
        """Tag the unsharded parameters that a module computes with, and watch for their gradients."""
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            for local in locals_of(parameter):
                self.memory.tag(local, GATHERED, ("", COMMUNICATION))
            if id(parameter) not in self.computing and parameter.requires_grad and parameter.is_leaf:
                self.computing[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(self._see_gradient)  # type: ignore[no-untyped-call]

    def _see_gradient(self, parameter: Tensor) -> None:
        for local in locals_of(parameter.grad) if parameter.grad is not None else ():
            self.memory.tag(local, GRADIENTS, ("", COMMUNICATION))

    def _see_cast(self, before: Tensor, after: Tensor) -> None:
        """Tag a gradient cast to its accumulation dtype as a gradient.

        A split backward assigns gradients without autograd; they are looked up at the first cast after it.
        """
        if self.memory.place.phase != "backward":
            return
        if not self.position.in_node and not self._swept:
            self.sweep()
            self._swept = True
        record = self.memory.find(before)
        if record is not None and record.component == GRADIENTS:
            self.memory.tag(after, GRADIENTS)

    def sweep(self) -> None:
        """Tag the present gradients of all parameters, and the parameter shards that FSDP padded at first use."""
        held = [parameter for part in self.parts for _, parameter in part.parameters()]
        for parameter in held:
            for local in locals_of(parameter):
                self.memory.tag(local, self._trained.get(PARAMETERS, PARAMETERS))
            if self._trained and parameter.grad is not None:
                for local in locals_of(parameter.grad):
                    self.memory.tag(local, HOST, ("", COMMUNICATION, GRADIENTS))
        for parameter in (*held, *self.computing.values()):
            self._see_gradient(parameter)

    # --- on and off -----------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, mode: MetaTensorMode) -> Iterator[None]:
        """Observe all operations under this mode while the context is open."""
        mode.look = self._look
        try:
            with self.memory.resizes(), self.position.hooked():
                yield
        finally:
            mode.look = None
