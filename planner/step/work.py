"""Seconds of a pipeline stage per micro batch and per step: computation, and non-overlapped communication.

Collectives of shard units run beside computation: while one unit computes, the next unit is gathered and the gradients
of the unit before are reduced. Only non-overlapped time adds to the step, as do the first gather and the last
reduction, which have no computation beside them.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from titan.contracts.base.cost import Attention, CollectiveCost, Costs, Elementwise, Matmul, Operation, Stage
from titan.contracts.base.layout import Layout
from titan.planner.machine.kernels import Device, Seconds
from titan.planner.machine.network import Group, Network
from titan.planner.step.activations import LayerMemory, recomputed
from titan.planner.step.layout import group_of, narrowed, ranks_of, sharing
from titan.planner.step.parameters import NONE, Count, Tensors, added, state_bytes

COMMUNICATION = ("tp", "cp", "ep", "dp", "worker", "pp")
"""Under which names communication is reported."""


Families = dict[tuple[str, str], dict[str, float]]
"""(where, when) -> family -> seconds."""


class Unit(NamedTuple):
    """Equal neighboring shard units.

    times: how many.  params: parameters of each on this rank.  forward, backward: seconds of computation of each.
    """

    times: int
    params: Count
    forward: float
    backward: float


OF_OPERATIONS = (
    "embeddings",
    "layer",
    "head",
    "styles",
    "tied",
    "splits",
    "seq_len",
    "micro_batch",
    "itemsize",
    "dtype",
    "wide_dtype",
    "fused",
    "accumulate_bytes",
    "copied_bytes",
)
"""What of `Costs` decides how long operations take, and which tensors they have."""


class Parts:
    """Seconds of embeddings, one layer and the head per micro batch, whichever stages have them.

    embeddings, layer, head: seconds forward, of backward for inputs, and of backward for weights; the layer's with
        adding its gradients to those of earlier micro batches.  tensors: parameters.
    ways: ranks that each hold a part of the weights of every stack.
    attention: those of the layer that its attention takes.  again: seconds to recompute a layer.
    exposed, overlapped: (where, when) -> family -> seconds per micro batch of collectives between operations or within
        attention, that add to the step, and that computation hides.
    unit_collectives: (per, when, collectives) of shard units.  step_collectives: those of the whole step.

    like: of a job on the same device; where its operations are equal, they are not timed again.
    """

    embeddings: Seconds
    layer: Seconds
    attention: Seconds
    head: Seconds
    tensors: Tensors

    def __init__(
        self, costs: Costs, layout: Layout, device: Device, network: Network, like: "Parts | None" = None
    ) -> None:
        self.costs, self.layout, self.device, self.network = costs, layout, device, network
        self.ways = ranks_of(costs.stacks_over, layout)
        alike = like is not None and all(getattr(like.costs, name) == getattr(costs, name) for name in OF_OPERATIONS)
        if like is not None and like.ways == self.ways and alike:
            self.embeddings, self.layer, self.head, self.tensors = like.embeddings, like.layer, like.head, like.tensors
            self.attention = like.attention
        else:
            self.tensors = Tensors(costs, self.ways)
            self.embeddings = self._seconds(costs.embeddings, costs.wide_dtype)
            self.layer = self._seconds(costs.layer, costs.dtype)
            self.layer = self.layer._replace(weights=self.layer.weights + self.adding_s(self.tensors.layer))
            self.attention = self._seconds((op for op in costs.layer if isinstance(op, Attention)), costs.dtype)
            self.head = self._seconds(costs.head, costs.wide_dtype)
        self.again = self._again()
        self._timed: dict[tuple[int, Count], float] = {}
        self._families = {axis.name: axis.family for axis in layout.axes}
        self.exposed, self.overlapped = self._between_operations()
        units = [cost for cost in costs.collectives if cost.where == "unit"]
        self.unit_collectives = [
            (per, when, [t for t in units if (t.per, t.when) == (per, when)])
            for per, when in dict.fromkeys((t.per, t.when) for t in units)
        ]
        self.step_collectives = [cost for cost in costs.collectives if cost.where == "step"]

    def _seconds(self, operations: Iterable[Operation], dtype: str) -> Seconds:
        total = [0.0, 0.0, 0.0]
        for op in operations:
            for i, seconds in enumerate(self.device.operation(op, self.costs, dtype, self.ways)):
                total[i] += seconds
        return Seconds(*total)

    def adding_s(self, params: Count) -> float:
        """Seconds per micro batch to copy these parameters and their gradients, and to add these to earlier ones."""
        bytes_ = self.costs.accumulate_bytes + self.costs.copied_bytes
        return self.device.moving(params.total * (bytes_ > 0), bytes_)

    def _again(self) -> float:
        """Seconds to recompute what a layer recomputes: all, attention with scores, or elementwise operations too."""
        costs = self.costs
        if costs.recompute is None:
            return 0.0
        if costs.recompute.saved == "share":
            return (1 - costs.recompute.share) * self.layer.forward
        if costs.recompute.saved == "input":
            again = costs.recompute.full_layer or costs.needs_last_product
            last = [] if again else [op for op in costs.layer if isinstance(op, Matmul)][-1:]
            return self.layer.forward - self._seconds(last, costs.dtype).forward
        cores = [op for op in costs.layer if isinstance(op, Attention)]
        if costs.recompute.saved == "all_but_scores":
            return sum(self.device.core_again(op, costs, both=costs.recompute.full_layer) for op in cores)
        cheap = [op for op in costs.layer if isinstance(op, Elementwise)]
        cores_again = [op for op in cores if not op.is_product]
        return self._seconds([*cheap, *cores_again], costs.dtype).forward

    def family(self, cost: CollectiveCost) -> str:
        """The name under which a collective's seconds are reported, one of `COMMUNICATION`."""
        return self._families[cost.axes[0]]

    def seconds(self, cost: CollectiveCost, params: Count = NONE) -> float:
        """Seconds of a collective; `params`: parameters that it moves, where it moves parameters."""
        key = (id(cost), params)
        if key not in self._timed:
            self._timed[key] = self._collective(cost, params)
        return self._timed[key]

    def _collective(self, cost: CollectiveCost, params: Count) -> float:
        costs, group = self.costs, group_of(cost.axes, self.layout)
        shards = sharing(cost.sharded_over, costs, self.layout)
        if not cost.per_parameter:
            return self._transfer(cost, group, costs.share(cost.region), shards.plain)
        seconds = self._transfer(cost, group, params.plain, shards.plain)
        if params.stacked:  # gathered and reduced by themselves, among the ranks that hold the same weights
            group = narrowed(group, sharing(cost.axes, costs, self.layout).stacked)
            seconds += self._transfer(cost, group, params.stacked, shards.stacked)
        return seconds

    def _transfer(self, cost: CollectiveCost, group: Group, numbers: float, shards: int) -> float:
        """Seconds in one group.  numbers: tokens or parameters.  shards: ranks that sharded the tensor before."""
        size = cost.numel * numbers * (cost.itemsize or self.costs.itemsize) / shards
        if cost.collective == "send":
            return cost.count * self.network.send(group, size) if group.size > 1 else 0.0
        return cost.count * (self.network.collective(cost.collective, group, size) + self._beyond(cost, group))

    def _beyond(self, cost: CollectiveCost, group: Group) -> float:
        """Overhead seconds of a collective, besides its transfer."""
        if group.size == 1:
            return 0.0
        if self.family(cost) == "tp":
            return self.device.kernels.tp_overhead_us * 1e-6
        gathers = cost.where == "unit" and cost.collective != "all_reduce"
        return self.device.kernels.fsdp_overhead_us * 1e-6 if gathers else 0.0

    def update_s(self, params: Count, hosted: float) -> float:
        """Seconds of the optimizer's update of this many parameters, before they are shared over ranks.

        hosted: bytes of state that come from the host and go back.
        """
        shards = sharing(self.costs.updated_over, self.costs, self.layout)
        own = params.plain / shards.plain + params.stacked / shards.stacked
        if self.costs.update_on_host:
            return own * self.costs.update_bytes / (self.device.cluster.device.host_update_gb_s * 1e9)
        # The link works both ways at once, beside the update.
        return max(self.device.update(own * self.costs.update_bytes), self.device.to_host(hosted))

    def hosted(self, stage: Stage) -> float:
        """Bytes of a stage's state in the host's memory, on one rank."""
        there = (held for held in self.costs.state if held.on_host)
        return sum(state_bytes(held, stage, self.costs, self.layout, self.tensors) for held in there)

    def layer_update_s(self) -> float:
        """Seconds of the optimizer's update of one layer."""
        return self.update_s(self.tensors.layer, self.hosted(Stage(0, range(1), embeddings=False, head=False)))

    def matrix_s(self, layers: int) -> float:
        """Seconds of the matrix products of the update of that many layers, on the rank with most of them.

        A matrix is not divided: the rank has its share of all, and at least the longest.
        """
        work, costs = self.costs.matrix_work, self.costs
        if work is None:
            return 0.0
        total = longest = 0.0
        for op in costs.layer:
            if isinstance(op, Matmul):
                m, n = sorted((op.inputs, op.outputs))
                flops_per_s = 2.0 * m * m * n / self.device.product(m, n, m, costs.wide_dtype, costs.itemsize)
                seconds = (work.square * m * m * n + work.cube * m**3) / flops_per_s
                total, longest = total + layers * op.of_layers * op.stack * seconds, max(longest, seconds)
        return max(total / ranks_of(work.over, self.layout), longest) if layers else 0.0

    def layer_unit_s(self) -> tuple[float, float]:
        """Least non-overlapped seconds of gathering and reducing one layer: (per micro batch, per step)."""
        seen = {"micro_batch": 0.0, "step": 0.0}
        for per, when, collectives in self.unit_collectives:
            # What is kept of the last unit may be kept of any.
            seconds = sum(self.seconds(t, self.tensors.layer) for t in collectives if not t.skip_last_unit)
            beside = self.layer.forward if when == "forward" else self.layer.backward + self.again
            seen[per] += self.unit_s(collectives, seconds, beside)[0]
        return seen["micro_batch"], seen["step"]

    def unit_s(self, collectives: Iterable[CollectiveCost], seconds: float, beside: float) -> tuple[float, float]:
        """Of the seconds of a unit's collectives: (those that add to the step, those that overlap computation)."""
        covered = min(seconds, beside) if all(t.overlaps for t in collectives) else 0.0
        return seconds - covered + self.device.kernels.overlap_slowdown * covered, covered

    def _between_operations(self) -> tuple[Families, Families]:
        """`exposed` and `overlapped`."""
        exposed: Families = defaultdict(lambda: defaultdict(float))
        overlapped: Families = defaultdict(lambda: defaultdict(float))
        again = self.costs.recompute
        free = self._seconds_of_layer()  # what one collective overlaps is not there for the next one
        for cost in self.costs.collectives:
            # What selective recompute keeps of a layer includes the results of its collectives.
            kept = cost.when == "recompute" and (again is None or again.saved != "input")
            if cost.where in ("embeddings", "layer", "attention", "head") and not kept:
                where = "layer" if cost.where == "attention" else cost.where
                seconds, family = cost.of_layers * self.seconds(cost), self.family(cost)
                covered = min(cost.of_layers * self._covered(cost), free.get(cost.when, 0.0))
                free[cost.when] = free.get(cost.when, 0.0) - covered
                exposed[where, cost.when][family] += seconds - covered * (1 - self.device.kernels.overlap_slowdown)
                if covered:
                    overlapped[where, cost.when][family] += covered
        return exposed, overlapped

    def _seconds_of_layer(self) -> dict[str, float]:
        """Phase -> seconds of computation in one layer."""
        return {"forward": self.layer.forward, "recompute": self.again, "backward": self.layer.backward}

    def _covered(self, cost: CollectiveCost) -> float:
        """Seconds of a collective that overlap computation, if nothing else does."""
        if not cost.overlaps or cost.where not in ("layer", "attention"):
            return 0.0
        beside = self._seconds_of_layer()
        if cost.where == "attention":
            core = self.attention
            blocks = {"forward": core.forward, "recompute": core.forward, "backward": core.backward}
            share = sum(op.of_layers for op in self.costs.layer if isinstance(op, Attention))
            beside = {when: seconds / share * cost.count / (cost.count + 1) for when, seconds in blocks.items()}
        return min(self.seconds(cost), beside.get(cost.when, 0.0))


class StageWork:
    """Seconds of one stage.

    forward, inputs, weights: of its actions F, I and W per micro batch, with non-overlapped communication; B is I plus
        W.
    each: purpose -> seconds per micro batch.  once: purpose -> seconds per step.
    hidden: family -> seconds per step of communication that overlaps computation.
    """

    def __init__(self, stage: Stage, parts: Parts) -> None:
        self.stage, self.parts = stage, parts
        costs, layers, again = parts.costs, len(stage.layers), recomputed(stage.layers, parts.costs.recompute)
        compute = [
            layers * layer + stage.embeddings * embeddings + stage.head * head
            for layer, embeddings, head in zip(parts.layer, parts.embeddings, parts.head, strict=True)
        ]
        self.each: dict[str, float] = defaultdict(float)
        self.once: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        compute[2] += parts.adding_s(self._of_ends())
        self.each["forward"], self.each["backward"] = compute[0], compute[1] + compute[2]
        self.each["recompute"] = again * parts.again
        waits = self._waits_for_host(layers, again)
        for number, when in enumerate(("forward", "backward")):
            compute[number] += waits[number]
            self.each[when] += waits[number]
        self.forward = compute[0] + self._between("forward")
        self.inputs = compute[1] + self.each["recompute"] + self._between("backward") + self._between("recompute")
        self.weights = compute[2]
        self._units = self._shard_units()
        for per, when, collectives in parts.unit_collectives:
            self._beside(collectives, per == "micro_batch", when == "forward")
        self._once_a_step(costs)

    def _waits_for_host(self, layers: int, again: int) -> tuple[float, float]:
        """Seconds, forward and backward, by which copies of saved tensors take longer than the layers beside them."""
        parts = self.parts
        if not parts.costs.activations_on_host:
            return 0.0, 0.0
        memory = LayerMemory(parts.costs, parts.device.kernels.fused_norms or parts.costs.fused, parts.ways)
        waits = [0.0, 0.0]
        for count, size, more in ((layers - again, memory.hosted, 0.0), (again, memory.hosted_again, parts.again)):
            copied = parts.device.to_host(size)
            waits[0] += count * max(0.0, copied - parts.layer.forward)
            waits[1] += count * max(0.0, copied - parts.layer.backward - more)
        return waits[0], waits[1]

    def _of_ends(self) -> Count:
        """Parameters of the stage's embeddings and head; a tied table counts once."""
        sizes, layers = self.parts.tensors.sizes(self.stage), len(self.stage.layers)
        whole, layer = added(sizes), self.parts.tensors.layer
        return Count(whole.plain - layers * layer.plain, whole.stacked - layers * layer.stacked)

    def _between(self, when: str) -> float:
        """Non-overlapped seconds of collectives between operations, per micro batch; added to `each` by family."""
        again = when == "recompute"
        counts = {
            "layer": recomputed(self.stage.layers, self.parts.costs.recompute) if again else len(self.stage.layers),
            "embeddings": int(self.stage.embeddings),
            "head": int(self.stage.head),
        }
        total = 0.0
        for where, count in counts.items():
            for family, seconds in self.parts.exposed[where, when].items():
                self.each[family] += count * seconds
                total += count * seconds
            for family, seconds in self.parts.overlapped[where, when].items():
                self.hidden[family] += count * seconds * self.parts.costs.micro_batches
        return total

    def _shard_units(self) -> list[Unit]:
        parts, stage = self.parts, self.stage
        sizes, layers = parts.tensors.sizes(stage), len(stage.layers)
        before = len(sizes) - layers - (1 if stage.head or (parts.costs.tied and stage.embeddings) else 0)
        each = 1 / max(before, 1)
        found = [
            Unit(1, size, parts.embeddings.forward * each, parts.embeddings.backward * each) for size in sizes[:before]
        ]
        if layers:
            again = parts.again * recomputed(stage.layers, parts.costs.recompute) / layers
            found.append(Unit(layers, sizes[before], parts.layer.forward, parts.layer.backward + again))
        for size in sizes[before + layers :]:
            found.append(Unit(1, size, parts.head.forward * stage.head, parts.head.backward * stage.head))
        return found

    def _beside(self, collectives: list[CollectiveCost], each: bool, forward: bool) -> None:
        """Add the collectives of shard units.  each: per micro batch, not per step.  forward: beside the forward."""
        parts, exposed, hidden, alone = self.parts, 0.0, 0.0, 0.0
        family = parts.family(collectives[0])
        for number, unit in enumerate(self._units):
            end = unit.times == 1 and number == len(self._units) - 1
            seconds = sum(parts.seconds(t, unit.params) for t in collectives if not (t.skip_last_unit and end))
            seen, covered = parts.unit_s(collectives, seconds, unit.forward if forward else unit.backward)
            exposed += unit.times * seen
            hidden += unit.times * covered
            if number == 0:
                # Forward's first gather has nothing beside it, nor has the reduction that backward ends with.
                alone = covered
        exposed += alone
        self.hidden[family] += (hidden - alone) * (parts.costs.micro_batches if each else 1)
        if not each:
            self.once[family] += exposed
            return
        self.each[family] += exposed
        if forward:
            self.forward += exposed
        else:
            self.inputs += exposed

    def _once_a_step(self, costs: Costs) -> None:
        parts = self.parts
        params = added(Count(*(unit.times * each for each in unit.params)) for unit in self._units)
        for cost in parts.step_collectives:
            moved = added(parts.tensors.sizes(self.stage, kinds=cost.kinds)) if cost.kinds else params
            self.once[parts.family(cost)] += parts.seconds(cost, moved)
        self.once["optimizer"] += parts.update_s(params, parts.hosted(self.stage))
        self.once["optimizer"] += parts.matrix_s(len(self.stage.layers))
