"""Peak memory of the ranks of each pipeline stage, in bytes.

Activations are the saved tensors of a micro batch times the micro batches in flight. The schedule is replayed, the
working set of each backward is added, and the largest sum counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan.contracts.base.cost import Action, Costs, Stage
from titan.contracts.base.layout import Layout
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.activations import LayerMemory, recomputed
from titan.planner.step.layout import ranks_of
from titan.planner.step.parameters import Tensors
from titan.planner.step.schedule import representative
from titan.planner.step.stage_memory import StageMemory

GIB = 2.0**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by purpose.

    parameters, gradients, optimizer: state, after sharding.
    activations: saved tensors, and the working set of the operation at the peak.
    buffers: gathered parameters, gradients during reduction, and receive buffers for hidden states.
    cached: what PyTorch's allocator reserves and no tensor uses at the peak: fragmentation, and free blocks of a
        stream's pool, which other streams cannot use. The pool of FSDP's copies for all-gathers is left out.
    overhead: what driver and communicators allocate.
    host: in the host's memory, which the total leaves out.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    cached: float
    overhead: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of the process on the device: the sum of all fields but `host`."""
        return self.reserved + self.overhead

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak: `torch.cuda.max_memory_allocated`."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def reserved(self) -> float:
        """Bytes that PyTorch's allocator takes from the device: `torch.cuda.max_memory_reserved`."""
        return self.allocated + self.cached

    def gib(self) -> dict[str, float]:
        """All fields and the total, in GiB; `host` only where there is some."""
        fields = {**vars(self), "total": self.total}
        return {name: value / GIB for name, value in fields.items() if value or name != "host"}

    def as_json(self) -> dict[str, Any]:
        """What `titan plan --json` prints of a stage's memory, in GiB."""
        sums = {"allocated_gib": self.allocated / GIB, "reserved_gib": self.reserved / GIB}
        return {"memory_gib": self.gib(), **sums}


def kind(stage: Stage, costs: Costs) -> tuple[int, ...]:
    """What determines the memory and time of a stage: layers, recomputed layers, embeddings, head."""
    return len(stage.layers), recomputed(stage.layers, costs.recompute), stage.embeddings, stage.head


def peak_bytes(costs: Costs, layout: Layout, device: DeviceMemory) -> float:
    """Peak memory of the fullest rank, in bytes."""
    return max(memory.total for memory in memories(costs, layout, device))


def memories(costs: Costs, layout: Layout, device: DeviceMemory) -> list[Memory]:
    """Peak memory on the ranks of each pipeline rank, first to last."""
    ways = ranks_of(costs.stacks_over, layout)
    tensors, layer = Tensors(costs, ways), LayerMemory(costs, device.fused_norms or costs.fused, ways)
    alike = {kind(stage, costs): stage for stage in costs.stages}
    made = {key: StageMemory(stage, costs, layout, tensors, layer) for key, stage in alike.items()}
    return memory_of(costs, [made[kind(stage, costs)] for stage in costs.stages], device)


def memory_of(
    costs: Costs, stages: Sequence[StageMemory], device: DeviceMemory, most: float = math.inf
) -> list[Memory]:
    """Peak memory on the ranks of each pipeline rank, first to last; `stages` in the order of `costs.stages`.

    most: bytes; a pipeline rank that needs more is the last one looked at.
    """
    homes = [stage.rank for stage in costs.stages]
    places = 1 + max(homes)
    order = representative(costs.order, costs.micro_batches, len(stages), places)
    found: list[Memory] = []
    for place in range(places):
        found.append(_of_place(place, stages, homes, order[place], costs, device))
        if found[-1].total > most:
            break
    return found


def _of_place(
    place: int,
    stages: Sequence[StageMemory],
    homes: Sequence[int],
    actions: Sequence[Action],
    costs: Costs,
    device: DeviceMemory,
) -> Memory:
    mine = [stage for stage, home in zip(stages, homes, strict=True) if home == place]
    state = {name: sum(stage.held[name] for stage in mine) for name in mine[0].held}
    received = sum(
        (costs.receive_buffers + 1) * stage.layer.hidden * ((not stage.stage.embeddings) + (not stage.stage.head))
        for stage in mine
    )
    (activations, gradients, buffers), computing = peak(actions, stages)
    masks = max(stage.mask for stage in mine)
    activations += masks
    always = state["buffers"] + received + sum(stage.gathered for stage in mine)
    buffers, gradients = buffers + always, gradients + sum(stage.summed for stage in mine)
    computing += masks + always + sum(stage.summed - stage.sharded for stage in mine)
    hosted = sum(sum(stage.hosted.values()) for stage in mine) + _most_offloaded(actions, stages)
    update = min(costs.update_buffers, sum(stage.hosted["optimizer"] for stage in mine))
    together = costs.update_scratch is not None and costs.update_scratch.all_at_once
    update += state["buffers"] + (sum if together else max)(stage.scratch for stage in mine)
    if activations + gradients + buffers < masks + state["gradients"] + update:  # more than in any micro batch
        activations, gradients, buffers = masks, state["gradients"], update
    after = state["buffers"] + sum(stage.after for stage in mine)
    if activations + gradients + buffers < after:
        activations, gradients, buffers = 0.0, 0.0, after
    cached = device.fragmented * (activations + buffers)
    if costs.gather is not None and device.stream_pools:
        sharded = sum(stage.sharded for stage in mine)
        reducing = max(state["gradients"], sharded + max(stage.reducing for stage in mine))
        cached += max(computing, masks + update, after) + reducing - (activations + gradients + buffers)
    if costs.casts and device.stream_pools:
        cached = max(device.fragmented * buffers, *(stage.unfit for stage in mine))
    overhead = device.reserved_gib * GIB
    return Memory(state["parameters"], gradients, state["optimizer"], activations, buffers, cached, overhead, hosted)


def _most_offloaded(actions: Sequence[Action], stages: Sequence[StageMemory]) -> float:
    """Bytes in the host's memory of the saved tensors of a rank's layers, when they are most."""
    now = most = 0.0
    for kind_, number, _ in actions:
        now += stages[number].offloaded * ((kind_ == "F") - (kind_ in "BW"))
        most = max(most, now)
    return most


def peak(actions: Sequence[Action], stages: Sequence[StageMemory]) -> tuple[tuple[float, float, float], float]:
    """Peaks of a rank in bytes, over its actions in order, besides what is there all through the step.

    ((activations, gradients, buffers) at its worst moment, the peak of what is outside the stream of reductions).
    """
    now = left = largest = computing = 0.0
    most = (0.0, 0.0, 0.0)
    begun: set[int] = set()
    last = {number: index for index, (kind_, number, _) in enumerate(actions) if kind_ in "BW"}
    for index, (kind_, number, _) in enumerate(actions):
        stage = stages[number]
        moments = (stage.later if number in begun else stage.moments) if kind_ in "BI" else []
        if kind_ == "I":  # what the weights' gradients are made of stays
            moments = [moment._replace(gone=0.0) for moment in moments]
        if index == last.get(number):
            also = stage.awaited * (kind_ == "W")
            moments = [*moments, *(moment._replace(gone=moment.gone + also) for moment in stage.reductions)]
        if kind_ == "F":
            if now + stage.making + left > largest:
                largest, most = now + stage.making + left, (now + stage.making, left, 0.0)
            computing = max(computing, now + stage.making)
            now += stage.kept
        for gone, activations, gradients, buffers, reducing in moments:
            here = now - gone + activations + gradients + buffers + left
            if here - reducing > computing:
                computing = here - reducing
            if here > largest:
                largest, most = here, (now - gone + activations, gradients + left, buffers)
        if kind_ in "BI" and number not in begun:
            begun.add(number)
            left += stage.left
        if kind_ == "I":
            now += stage.awaited
            computing = max(computing, now)
            if now + left > largest:
                largest, most = now + left, (now, left, 0.0)
        if kind_ in "BW":
            now -= stage.kept + stage.awaited * (kind_ == "W")
    return most, computing
