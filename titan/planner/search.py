"""The best layouts of a job on a cluster, out of all there are.

Branch and bound: layouts are grouped by degrees and micro batch; the computation of a group's micro batches, shared
out evenly over its stages, is a time that no layout of the group can beat. Groups are gone through from the lowest
bound on, until it exceeds the worst of the layouts that are kept. What does not fit into memory is dropped before it is
simulated. So all layouts are looked at, most of them by their bound alone.
"""

import bisect
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

from titan.config import Job
from titan.cost import REGIONS, Costs
from titan.mesh import Layout
from titan.planner.layout import costs_of, cut, uncut
from titan.planner.memory import GIB, recomputed
from titan.planner.predict import Alike, Planner, Prediction
from titan.planner.space import Choice, Chosen, Space
from titan.planner.work import Parts

Objective = Literal["time", "price", "energy"]
Group = tuple[float, Space, Layout, int]
"""Bound, space, layout, micro batch."""

FEW = 200
"""Groups that one process goes through before another one has started."""


@dataclass(frozen=True)
class Found:
    """A layout and what is predicted of it."""

    choice: Choice
    prediction: Prediction

    def value(self, objective: Objective) -> float:
        """What a step costs by an objective: seconds, price, joules."""
        p = self.prediction
        return {"time": p.step_time_s, "price": p.price, "energy": p.energy_j}[objective]


@dataclass
class Result:
    """The best layouts, best first, and what became of the others.

    layouts: combinations of degrees and micro batch.  by_bound: of them, ruled out by their bound.  Of layouts with
    their options, refused: by a plugin's check; slower: than the best even if no rank waits; too_large: for the memory.
    tightest: (bytes, layout) of the one that lacks least memory.
    """

    best: list[Found] = field(default_factory=list)
    layouts: int = 0
    by_bound: int = 0
    refused: int = 0
    slower: int = 0
    too_large: int = 0
    simulated: int = 0
    tightest: tuple[float, Choice] | None = None


def search(
    job: Job,
    planner: Planner,
    spaces: Sequence[Space],
    *,
    keep: int = 10,
    objective: Objective = "time",
    progress: Callable[[int, int], None] = lambda done, of: None,
    workers: int = 1,
) -> Result:
    """The `keep` best layouts of a job that fit, by the seconds, the price or the energy of a token.

    progress: told how many groups are done, of how many (the first worker's).  workers: processes that share them.
    """
    run = _Search(job, planner, keep, objective)
    groups = sorted(run.groups(spaces), key=itemgetter(0))
    if workers == 1 or len(groups) < FEW or sys.platform != "linux":
        return run.through(groups, progress)
    # Forked, they have the job and the plugins, and send back plain data. Each in turn takes the next best group.
    context = multiprocessing.get_context("fork")
    others = []
    for number in range(1, workers):
        receiver, sender = context.Pipe(duplex=False)
        part = groups[number::workers]
        process = context.Process(target=lambda to, part: to.send(run.through(part)), args=(sender, part))
        process.start()
        sender.close()
        others.append((process, receiver))
    results = [run.through(groups[::workers], progress)]
    for process, receiver in others:
        results.append(receiver.recv())
        process.join()
    return _merged(results, keep, objective)


def _merged(results: Sequence[Result], keep: int, objective: Objective) -> Result:
    """What several searches have found together."""
    best = sorted((found for result in results for found in result.best), key=lambda f: f.value(objective))[:keep]
    counts = {
        name: sum(getattr(result, name) for result in results)
        for name in ("layouts", "by_bound", "refused", "slower", "too_large", "simulated")
    }
    tightest = [result.tightest for result in results if result.tightest is not None]
    return Result(best=best, tightest=min(tightest, key=itemgetter(0), default=None), **counts)


class _Search:
    """A search on its way; `values` are the objectives of the best, in order."""

    def __init__(self, job: Job, planner: Planner, keep: int, objective: Objective) -> None:
        self.job, self.planner, self.keep, self.objective = job, planner, keep, objective
        self.result = Result()
        self.values: list[float] = []
        self._micro: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.least = {
            "time": 1.0,
            "price": planner.cluster.device.price / 3600,
            "energy": planner.cluster.device.idle_w,
        }[objective]
        self.room = planner.cluster.device.memory_gib * GIB

    def through(self, groups: Sequence[Group], progress: Callable[[int, int], None] = lambda done, of: None) -> Result:
        """Look at groups in the order of their bounds."""
        self.result.layouts = len(groups)
        for number, (bound, space, layout, micro_batch) in enumerate(groups):
            progress(number, len(groups))
            if self._hopeless(bound):
                self.result.by_bound = len(groups) - number
                break
            for options, staged in space.options(layout):
                self._look_through(space, Choice(layout, micro_batch, options), staged)
        progress(len(groups), len(groups))
        return self.result

    def _hopeless(self, bound: float) -> bool:
        return len(self.values) == self.keep and bound >= self.values[-1]

    def groups(self, spaces: Sequence[Space]) -> Iterator[Group]:
        """(bound, space, layout, micro batch) of each combination that divides the batch."""
        alone = replace(costs_of(self.job), recompute=None, traffic=(), fused=True)
        for space in spaces:
            for layout in space.layouts():
                for micro_batch in space.micro_batches(layout):
                    yield self._bound(alone, layout, micro_batch), space, layout, micro_batch

    def _bound(self, alone: Costs, layout: Layout, micro_batch: int) -> float:
        """What a layout takes at least: its computation, shared out evenly, none of it twice."""
        slices, sequence, batch = (layout.role_degree(role) for role in ("model", "sequence", "batch"))
        whole = {region: sequence * (1 if region == "whole" else slices) for region in REGIONS}
        costs = replace(alone, splits=whole, micro_batch=micro_batch)
        key = (slices, sequence, micro_batch)
        if key not in self._micro:
            parts = Parts(costs, layout, self.planner.device, self.planner.network)
            layers = sum(len(stage.layers) for stage in alone.stages)
            self._micro[key] = sum(parts.stem) + sum(parts.head) + layers * sum(parts.layer), parts.layer.forward
        rounds, stages = self.job.train.global_batch_size / micro_batch / batch, layout.role_degree("stage")
        micro, first = self._micro[key]
        # The last rank waits for a micro batch to come through a layer on each of the others.
        return self._value(micro * rounds / stages + (stages - 1) * first, layout)

    def _value(self, seconds: float, layout: Layout) -> float:
        return seconds if self.objective == "time" else seconds * layout.world_size * self.least

    def _look_through(self, space: Space, choice: Choice, staged: Sequence[Chosen]) -> None:
        """A layout's choices for techniques that do not cut the model, with all of those for the ones that do."""
        result, job = self.result, space.job_of(choice)
        if job is None:
            result.refused += len(staged)
            return
        whole = uncut(job)
        alike = self.planner.alike(whole, choice.layout)
        if self._hopeless(self._value(self._evenly(alike), choice.layout)):
            result.slower += len(staged)
            return
        if (least := self._state(alike)) > self.room:
            self._lacks(least, choice, len(staged))
            return
        for more in staged:
            self._look_at(space, replace(choice, options=(*choice.options, *more)), whole, alike)

    def _state(self, alike: Alike) -> float:
        """Bytes of state that the ranks of the best of all cuts into stages hold at least."""
        held = alike.memory(alike.parts.costs.stages[0]).held
        return sum(held.values()) / alike.parts.layout.role_degree("stage")

    def _evenly(self, alike: Alike) -> float:
        """Seconds of a step if every stage had the same share of the work, and no rank waited but for the first one."""
        costs, stages = alike.parts.costs, alike.parts.layout.role_degree("stage")
        layers = sum(len(stage.layers) for stage in costs.stages)
        again = sum(recomputed(stage.layers, costs) for stage in costs.stages)
        micro = alike.stem_s + layers * alike.layer_s + again * alike.again_s + alike.head_s
        return micro * costs.micro_batches / stages + (stages - 1) * alike.parts.layer.forward

    def _at_least(self, costs: Costs, alike: Alike) -> float:
        """Seconds of a step by its micro batches alone: of each rank, from when the first has come through to it."""
        works = [0.0] * (1 + max(stage.rank for stage in costs.stages))
        begins: dict[int, float] = {}
        begun, forward, layer_s = 0.0, alike.parts.layer.forward, alike.layer_s
        for rank, layers, stem, head in costs.stages:
            begins.setdefault(rank, begun)
            begun += len(layers) * forward
            works[rank] += len(layers) * layer_s + stem * alike.stem_s + head * alike.head_s
            if costs.recompute is not None:
                works[rank] += recomputed(layers, costs) * alike.again_s
        return max(begins[rank] + costs.micro_batches * work for rank, work in enumerate(works))

    def _look_at(self, space: Space, choice: Choice, whole: Costs, alike: Alike) -> None:
        result, job = self.result, space.job_of(choice)
        if job is None or not space.allows(job):
            result.refused += 1
            return
        costs = cut(whole, job)
        if self._hopeless(self._value(self._at_least(costs, alike), choice.layout)):
            result.slower += 1
            return
        draft = self.planner.draft(costs, choice.layout, alike)
        if self._hopeless(self._value(draft.least_s, choice.layout)):
            result.slower += 1
            return
        memory = draft.memory()
        most = max(m.total for m in memory)
        if most > self.room:
            self._lacks(most, choice, 1)
            return
        result.simulated += 1
        self._keep(Found(choice, draft.finish(memory)))

    def _lacks(self, most: float, choice: Choice, count: int) -> None:
        self.result.too_large += count
        if self.result.tightest is None or most < self.result.tightest[0]:
            self.result.tightest = (most, choice)

    def _keep(self, found: Found) -> None:
        value = found.value(self.objective)
        at = bisect.bisect_right(self.values, value)
        self.values.insert(at, value)
        self.result.best.insert(at, found)
        del self.values[self.keep :], self.result.best[self.keep :]
