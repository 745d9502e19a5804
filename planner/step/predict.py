"""Step time and memory of a job: `Costs`, a layout and a cluster become a `Prediction`.

1. Time the forward and backward of each stage, operation by operation, with non-overlapped collectives (`work`). 2.
Simulate the schedule, action by action (`schedule`, `steady_state`). 3. Add the work that runs once per step:
data-parallel communication and the optimizer.

The step ends when the last rank ends. The breakdown of its time is that of this rank.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from titan.contracts.base.cost import Costs, Recompute, Stage
from titan.contracts.base.layout import Layout
from titan.planner.machine.cluster import Cluster
from titan.planner.machine.host import short_of
from titan.planner.machine.kernels import Device
from titan.planner.machine.network import Network
from titan.planner.step.activations import LayerMemory, recomputed
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import group_of
from titan.planner.step.memory import GIB, Memory, kind, memory_of
from titan.planner.step.schedule import Timeline, simulate
from titan.planner.step.stage_memory import StageMemory
from titan.planner.step.steady_state import Steps
from titan.planner.step.work import COMMUNICATION, Parts, StageWork


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a job on a cluster.

    world_size: ranks.  tokens: per step, over all ranks.  step_time_s: seconds per step.
    model_tflops_per_device, hardware_tflops_per_device: TFLOP/s of matmuls, with attention's full S x S square; the
        hardware's include recomputation.  mfu, hfu: the same as shares of the device's peak.
    time_s: purpose -> seconds on the rank that ends last; the sum is step_time_s.
    overlapped_s: family -> seconds of communication that overlap computation on that rank.
    memory: per pipeline rank.  layers: per pipeline rank, the layers of its stages.
    fits: whether every rank's memory fits into the device, and what it keeps on the host into that of the node.
    energy_j, price: joules and price of a step over all ranks; 0 where the cluster file has no power or price. Ranks
        that wait for work draw idle power, others full power.
    timeline: of the simulated schedule.
    """

    world_size: int
    step_time_s: float
    tokens: int
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    mfu: float
    hfu: float
    time_s: dict[str, float]
    overlapped_s: dict[str, float]
    memory: tuple[Memory, ...]
    layers: tuple[tuple[range, ...], ...]
    fits: bool
    energy_j: float
    price: float
    timeline: Timeline

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.step_time_s

    @property
    def peak_gib(self) -> float:
        """Memory of the fullest rank, in GiB."""
        return max(memory.total for memory in self.memory) / GIB

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the rank waits for the work of other ranks."""
        return self.time_s["bubble"] / self.step_time_s

    def as_json(self) -> dict[str, Any]:
        """The stable fields that `titan plan --json` prints."""
        return {
            "world_size": self.world_size,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / self.world_size,
            "model_tflops_per_device": self.model_tflops_per_device,
            "hardware_tflops_per_device": self.hardware_tflops_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble_fraction": self.bubble_fraction,
            "fits": self.fits,
            "energy_j": self.energy_j,
            "price": self.price,
            "time_s": self.time_s,
            "overlapped_s": self.overlapped_s,
            "stages": [
                {**memory.as_json(), "layers": [list(layers) for layers in held]}
                for memory, held in zip(self.memory, self.layers, strict=True)
            ],
        }


OF_STAGES = ("stages", "order", "pipeline_axis", "receive_buffers", "transfers_kept")
NOT_OF_STAGES = tuple(field.name for field in fields(Costs) if field.name not in OF_STAGES)
"""What stays the same however a job is cut."""


class StageLoad(NamedTuple):
    """Counts of what a pipeline rank has.

    before: layers that a micro batch passes before the first of this rank.  layers: of this rank.
    again: of the layers, those that are recomputed.  embeddings, head: 1 where the rank has them, else 0.
    """

    before: int
    layers: int = 0
    again: int = 0
    embeddings: int = 0
    head: int = 0


def stage_loads(stages: Sequence[Stage], recompute: Recompute | None) -> list[StageLoad]:
    """The loads of all pipeline ranks; of ranks with equal loads, only the last."""
    before, held = 0, dict[int, StageLoad]()
    for rank, layers, embeddings, head in stages:
        p = held.get(rank, StageLoad(before))
        again = p.again + recomputed(layers, recompute)
        held[rank] = StageLoad(p.before, p.layers + len(layers), again, p.embeddings + embeddings, p.head + head)
        before += len(layers)
    return list({place[1:]: place for place in sorted(held.values())}.values())


class StageCostCache:
    """Seconds and bytes of stages, computed once per kind of stage, for jobs that differ only in their pipelines.

    embeddings_s, layer_s, head_s, again_s: lower bounds in seconds per micro batch, of embeddings, one layer, head, and
        the recomputation of one layer: computation and non-overlapped communication.
    once_s: lower bound in seconds per layer and step.
    """

    def __init__(self, parts: Parts, cluster: Cluster) -> None:
        self.parts, self._fused_norms = parts, cluster.kernels.fused_norms or parts.costs.fused
        seen = {key: sum(families.values()) for key, families in parts.exposed.items()}
        embeddings, layer, head = (
            sum(seen.get((where, when), 0.0) for when in ("forward", "backward"))
            for where in ("embeddings", "layer", "head")
        )
        unit, once = parts.layer_unit_s()
        self.embeddings_s, self.head_s = sum(parts.embeddings) + embeddings, sum(parts.head) + head
        self.layer_s = sum(parts.layer) + layer + unit
        self.again_s = parts.again + seen.get(("layer", "recompute"), 0.0)
        self.once_s = once + parts.layer_update_s()
        self._work: dict[tuple[int, ...], StageWork] = {}
        self._memory: dict[tuple[int, ...], StageMemory] = {}

    def lower_bound(self, rounds: float, ranks: int) -> tuple[float, float]:
        """(lower bound of the step, mean computation per rank) in seconds, however the layers are distributed.

        rounds: micro batches per step.  ranks: of the pipeline.

        The slowest rank takes at least the mean, and rank n waits until a micro batch has passed a layer on each of the
        n - 1 ranks before. The rank with the most layers has at least the mean number, rounded up.
        """
        stages, recompute = self.parts.costs.stages, self.parts.costs.recompute
        layers = sum(len(stage.layers) for stage in stages)
        again = sum(recomputed(stage.layers, recompute) for stage in stages)
        busy = rounds * (self.embeddings_s + self.head_s + layers * self.layer_s + again * self.again_s) / ranks
        mean = busy + layers * self.once_s / ranks + (ranks - 1) / 2 * self.parts.layer.forward
        each = self.layer_s + (self.again_s if again == layers else 0.0)
        return max(mean, math.ceil(layers / ranks) * (rounds * each + self.once_s)), busy

    def lower_bound_of(self, places: Iterable[StageLoad]) -> float:
        """Lower bound of the step in seconds, for this distribution of layers: a rank's work after its first wait."""
        rounds, forward = self.parts.costs.micro_batches, self.parts.layer.forward
        embeddings, layer, again, head = (
            rounds * s for s in (self.embeddings_s, self.layer_s, self.again_s, self.head_s)
        )
        layer += self.once_s
        return max(
            p.before * forward + p.layers * layer + p.again * again + p.embeddings * embeddings + p.head * head
            for p in places
        )

    def work(self, stage: Stage) -> StageWork:
        """Seconds of a stage per micro batch and per step."""
        key = kind(stage, self.parts.costs)
        if key not in self._work:
            self._work[key] = StageWork(stage, self.parts)
        return self._work[key]

    @cached_property
    def _layer(self) -> LayerMemory:
        return LayerMemory(self.parts.costs, self._fused_norms, self.parts.ways)

    def memory(self, stage: Stage) -> StageMemory:
        """Bytes of a stage: state, activations and working sets."""
        key = kind(stage, self.parts.costs)
        if key not in self._memory:
            self._memory[key] = StageMemory(stage, self.parts.costs, self.parts.layout, self.parts.tensors, self._layer)
        return self._memory[key]


class Planner:
    """Predicts jobs on one cluster, and reuses results between similar layouts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.device, self.network = cluster, Device(cluster), Network(cluster)
        self._steps: dict[Any, Steps] = {}
        self._last: tuple[Any, StageCostCache] | None = None

    def predict(self, costs: Costs, layout: Layout, *, keep: bool = False) -> Prediction:
        """The predicted step of these costs on this layout.

        keep: also keep all actions in the timeline, for plots.

        Raises:
            ConfigError: the cluster file has no rates for the compute dtype.
        """
        draft = self.draft(costs, layout)
        return draft.finish(draft.memory(), keep=keep)

    def stage_costs(self, costs: Costs, layout: Layout) -> "StageCostCache":
        """The cache of stages for jobs that differ from this one only in their pipelines; the last one is kept."""
        key = (layout.degrees, *(getattr(costs, name) for name in NOT_OF_STAGES))
        if self._last is None or self._last[0] != key:
            like = self._last[1].parts if self._last else None
            self._last = key, StageCostCache(Parts(costs, layout, self.device, self.network, like), self.cluster)
        return self._last[1]

    def draft(self, costs: Costs, layout: Layout, alike: "StageCostCache | None" = None) -> "UnscheduledStep":
        """The timed stages of a step, before the schedule is simulated. alike: the cache to use, if at hand."""
        return UnscheduledStep(self, costs, layout, alike or self.stage_costs(costs, layout))

    def speed(self, layout: Layout) -> float:
        """A rank's share of its full speed while all ranks compute: below 1 where ranks share processors."""
        processors, ranks = self.cluster.device.full_speed_ranks, layout.world_size
        return min(1.0, processors / min(ranks, self.cluster.ranks_per_node or ranks)) if processors else 1.0

    def steps(self, costs: Costs) -> Steps:
        """The simulator of this pipeline order, shared by all jobs with the same order."""
        if costs.order not in self._steps:
            self._steps[costs.order] = Steps(costs.order, 1 + max(stage.rank for stage in costs.stages))
        return self._steps[costs.order]


class UnscheduledStep:
    """A step whose stages are timed, but whose schedule is not simulated yet."""

    def __init__(self, planner: Planner, costs: Costs, layout: Layout, alike: "StageCostCache") -> None:
        self.planner, self.costs, self.layout, self._alike = planner, costs, layout, alike
        self.work = [self._alike.work(stage) for stage in costs.stages]
        self.by_place: list[list[StageWork]] = [[] for _ in range(1 + max(stage.rank for stage in costs.stages))]
        for stage, work in zip(costs.stages, self.work, strict=True):
            self.by_place[stage.rank].append(work)
        self.once = [sum(sum(w.once.values()) for w in mine) for mine in self.by_place]

    def memory(self, most: float = math.inf) -> list[Memory]:
        """Peak memory of each pipeline rank, first to last; none after one that needs more than `most` bytes."""
        stages = [self._alike.memory(stage) for stage in self.costs.stages]
        return memory_of(self.costs, stages, self.planner.cluster.memory, most)

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of the step in seconds, under any schedule.

        A rank starts when the first micro batch has passed the stages before it. It then has all of its work to do.
        When only backward of the weights is left, one micro batch still has to pass backward through those stages, and
        the first of them to end its step.
        """
        least, begins, returns, first = 0.0, 0.0, 0.0, self.once[self.costs.stages[0].rank]
        seen: set[int] = set()
        for stage, work in zip(self.costs.stages, self.work, strict=True):
            if stage.rank not in seen:
                seen.add(stage.rank)
                mine, rounds = self.by_place[stage.rank], self.costs.micro_batches
                passing = rounds * sum(w.forward + w.inputs for w in mine)
                weights = rounds * sum(w.weights for w in mine)
                least = max(least, begins + passing + max(weights + self.once[stage.rank], returns + first))
            begins, returns = begins + work.forward, returns + work.inputs
        return least

    @property
    def busy_s(self) -> float:
        """Mean seconds per rank of computation on micro batches."""
        return self.costs.micro_batches * sum(w.forward + w.inputs + w.weights for w in self.work) / len(self.by_place)

    def finish(self, memory: Sequence[Memory], *, keep: bool = False) -> Prediction:
        """Simulate the schedule and return the prediction; `memory` from `memory()`."""
        costs, layout, cluster, by_place = self.costs, self.layout, self.planner.cluster, self.by_place
        timeline = self._simulate(keep)
        ends = [end + once for end, once in zip(timeline.ends, self.once, strict=True)]
        last = max(range(len(ends)), key=ends.__getitem__)
        step, world = self._shared(ends[last], timeline), layout.world_size
        tokens = costs.tokens * costs.micro_batches * layout.degree_of("dealt")
        model, hardware = (flops * tokens / step / world / 1e12 for flops in flops_per_token(costs))
        peak, idle = cluster.peak(costs.wide_dtype) / 1e12, sum(timeline.idle) / len(timeline.idle)
        return Prediction(
            world_size=world,
            step_time_s=step,
            tokens=tokens,
            model_tflops_per_device=model,
            hardware_tflops_per_device=hardware,
            mfu=model / peak,
            hfu=hardware / peak,
            time_s=_adding_up(_spent(by_place[last], costs.micro_batches, timeline, last), step),
            overlapped_s=_summed(w.hidden for w in by_place[last]),
            memory=tuple(memory),
            layers=tuple(tuple(s.layers for s in costs.stages if s.rank == place) for place in range(len(by_place))),
            energy_j=world * (cluster.device.idle_w * idle + cluster.device.power_w * (step - idle)),
            price=cluster.device.price * world * step / 3600,
            fits=all(m.total <= cluster.device.memory_gib * GIB for m in memory)
            and not short_of(cluster.memory, [m.host for m in memory], world),
            timeline=timeline,
        )

    def _shared(self, end: float, timeline: Timeline) -> float:
        """The step's seconds where ranks share processors: one that waits leaves its share to the others.

        Then all of the work takes as long as if none ever waited, and no less than the schedule at full speed.
        """
        if (speed := self.planner.speed(self.layout)) == 1:
            return end
        work = zip(timeline.busy, timeline.exposed, self.once, strict=True)
        return max(end * speed, sum(map(sum, work)) / len(timeline.busy))

    def _simulate(self, keep: bool) -> Timeline:
        costs, work = self.costs, self.work
        times = {
            "F": [w.forward for w in work],
            "B": [w.inputs + w.weights for w in work],
            "I": [w.inputs for w in work],
            "W": [w.weights for w in work],
        }
        send = 0.0
        if costs.pipeline_axis:
            hidden, network = costs.dim * costs.share("hidden") * costs.itemsize, self.planner.network
            slices = group_of(costs.sent_over, self.layout)
            send = network.send(group_of([costs.pipeline_axis], self.layout), hidden / slices.size)
            send += network.collective("all_gather", slices, hidden)
        if keep:
            return simulate(costs.order(costs.micro_batches), times, send, blocking=costs.blocking, keep=True)
        return self.planner.steps(costs).simulate(costs.micro_batches, times, send, blocking=costs.blocking)


def _summed(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _spent(work: Sequence["StageWork"], micro_batches: int, timeline: Timeline, rank: int) -> dict[str, float]:
    """The step's seconds on a rank by what they are spent on."""
    spent = dict.fromkeys(("forward", "backward", "recompute", *COMMUNICATION, "bubble", "optimizer"), 0.0)
    for stage in work:
        for key, seconds in stage.each.items():
            spent[key] += micro_batches * seconds
        for key, seconds in stage.once.items():
            spent[key] += seconds
    spent["pp"] += timeline.exposed[rank]
    spent["bubble"] += timeline.ends[rank] - timeline.busy[rank] - timeline.exposed[rank]
    return spent


def _adding_up(spent: dict[str, float], step: float) -> dict[str, float]:
    """Seconds that a rank would spend, as parts of a step that took another time; the bubble gives way first."""
    work = sum(spent.values()) - spent["bubble"]
    spent["bubble"] = max(0.0, step - work)
    return {key: seconds * min(1.0, step / work) if key != "bubble" else seconds for key, seconds in spent.items()}
