"""Exact search for the best layouts of a job on a cluster: branch and bound, lowest bound first.

Lower bounds of the objective, each tighter than the one before:

1. A group of layouts with the same degrees and micro batch: its computation, divided evenly over the ranks.
2. With options chosen for all techniques but those that cut the model into stages: the same plus communication.
3. A full layout: the work of its busiest rank without any wait for other ranks.

A full layout that is not pruned is timed stage by stage, dropped if its memory exceeds the limit (`MEMORY_LIMIT`), and
simulated. The search ends when the lowest bound exceeds the worst of the layouts kept, so no layout is missed.

The cut of the model into stages must follow from the technique's options, the degrees and the micro batch.
"""

import bisect
import gc
import heapq
import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from titan.config import Job
from titan.contracts.base.cost import REGIONS, Costs, Recompute, Stage
from titan.contracts.base.layout import Layout
from titan.errors import ResourceError
from titan.planner.machine.host import short_of
from titan.planner.search.space import Choice, Chosen, Space
from titan.planner.step.layout import costs_of, cut, uncut
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Planner, Prediction, StageCostCache, StageLoad, stage_loads

Objective = Literal["time", "price", "energy"]
Group = tuple[float, Space, Layout, int]
"""Bound, space, layout, micro batch."""
Places = Callable[[Recompute | None], list[StageLoad]]
"""Loads of the pipeline's ranks, as a function of the recomputation."""
Cuts = dict[Chosen, Places]
"""Loads by the options of techniques that cut the model, for one group."""

FEW = 200
"""Groups below which a single process is faster than starting workers."""


@dataclass(frozen=True)
class Found:
    """A layout that the search kept, and its prediction."""

    choice: Choice
    prediction: Prediction

    def value(self, objective: Objective) -> float:
        """Cost of a step: seconds for "time", the cluster's currency for "price", joules for "energy"."""
        p = self.prediction
        return {"time": p.step_time_s, "price": p.price, "energy": p.energy_j}[objective]


@dataclass
class Result:
    """The best layouts, best first, and counts of the others.

    layouts: combinations of degrees and micro batch.  by_bound: those of them pruned by lower bound.
    Counts of full layouts (with all options): refused by a plugin's check; slower: pruned by lower bound; too_large:
    memory above the limit, or more in the host's memory than it has; simulated.
    refusal: what the first check that refused a layout said.
    tightest: (lower bound of bytes per rank, layout) of the one that exceeds the limit least.
    host_short: what the host's memory lacks for the first layout that fits into the devices.
    """

    best: list[Found] = field(default_factory=list)
    layouts: int = 0
    by_bound: int = 0
    refused: int = 0
    slower: int = 0
    too_large: int = 0
    simulated: int = 0
    refusal: str = ""
    tightest: tuple[float, Choice] | None = None
    host_short: str = ""


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
    """Find the `keep` layouts with the lowest step time, price or energy per step whose memory is within the limit.

    job: loaded for one rank.  spaces: search spaces, one per number of ranks.  progress: called with (groups done,
    groups in all) of the first worker.  workers: processes that share the groups (Linux only).
    """
    frozen = gc.get_freeze_count()
    gc.freeze()  # what has been imported is not gone through at each collection, nor copied where workers are forked
    try:
        run = Search(job, planner, keep, objective)
        groups = sorted(run.groups(spaces), key=itemgetter(0))
        if workers == 1 or len(groups) < FEW or sys.platform != "linux":
            return run.through(groups, progress)
        return _merged(_shared_out(run, groups, progress, workers), keep, objective)
    finally:
        if not frozen:  # or the caller's would thaw with it
            gc.unfreeze()


def _shared_out(
    run: "Search", groups: Sequence[Group], progress: Callable[[int, int], None], workers: int
) -> list[Result]:
    """What each worker finds. Each in turn takes the next best group."""
    # Forked, they have the job and the plugins, and send back plain data.
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
        try:
            results.append(receiver.recv())
        except EOFError:
            what = "a process of the search was killed, possibly for lack of memory"
            raise ResourceError(f"{what}; free memory, or narrow the search by degrees in [mesh]") from None
        process.join()
    return results


def _merged(results: Sequence[Result], keep: int, objective: Objective) -> Result:
    """What several searches have found together."""
    best = sorted((found for result in results for found in result.best), key=lambda f: f.value(objective))[:keep]
    counts = {
        name: sum(getattr(result, name) for result in results)
        for name in ("layouts", "by_bound", "refused", "slower", "too_large", "simulated")
    }
    tightest = [result.tightest for result in results if result.tightest is not None]
    refusal = next((result.refusal for result in results if result.refusal), "")
    least = min(tightest, key=itemgetter(0), default=None)
    host_short = next((result.host_short for result in results if result.host_short), "")
    return Result(best=best, refusal=refusal, tightest=least, host_short=host_short, **counts)


@cache
def _places(stages: tuple[Stage, ...]) -> Places:
    """What the ranks of a pipeline hold; many jobs have the same."""
    return cache(partial(stage_loads, stages))


class _Node(NamedTuple):
    """Layouts that are still to be looked at.

    number: of those with the same bound, which comes first.  layouts: how many; 0 where that is not known yet.
    """

    bound: float
    number: int
    layouts: int
    look: Callable[[], None]


class Search:
    """A search on its way; `values` are the objectives of the best, in order."""

    def __init__(self, job: Job, planner: Planner, keep: int, objective: Objective) -> None:
        self.job, self.planner, self.keep, self.objective = job, planner, keep, objective
        self.result = Result()
        self.values: list[float] = []
        memory = planner.cluster.memory
        self.limit, self._reserved = memory.limit_gib * GIB, memory.reserved_gib * GIB
        self._waiting: list[_Node] = []
        self._numbers = itertools.count()
        self._alone: dict[tuple[int, ...], StageCostCache] = {}

    def through(self, groups: Sequence[Group], progress: Callable[[int, int], None] = lambda done, of: None) -> Result:
        """Expand the node with the lowest bound until no remaining bound is below the worst layout kept."""
        result = self.result
        result.layouts = result.by_bound = len(groups)
        for bound, *group in groups:
            self._wait(bound, 0, self._look_at_group, *group)
        while self._waiting and not self._hopeless(self._waiting[0].bound):
            heapq.heappop(self._waiting).look()
            progress(len(groups) - result.by_bound, len(groups))
        result.slower += sum(node.layouts for node in self._waiting)
        progress(len(groups), len(groups))
        return result

    def _wait(self, bound: float, layouts: int, look: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._waiting, _Node(bound, next(self._numbers), layouts, partial(look, *arguments)))

    def _hopeless(self, bound: float) -> bool:
        return len(self.values) == self.keep and bound >= self.values[-1]

    def groups(self, spaces: Sequence[Space]) -> Iterator[Group]:
        """(lower bound, space, layout, micro batch) of each combination that divides the global batch."""
        alone = replace(costs_of(self.job), recompute=None, collectives=(), fused=True, update_bytes=0.0)
        for space in spaces:
            for layout in space.layouts():
                for micro_batch in space.micro_batches(layout):
                    yield self.group_bound(alone, layout, micro_batch), space, layout, micro_batch

    def group_bound(self, alone: Costs, layout: Layout, micro_batch: int) -> float:
        """What a group costs at least: its computation, shared out evenly, none of it twice."""
        slices, sequence, batch = (layout.degree_of(fact) for fact in ("slices", "sliced", "dealt"))
        folding = tuple(axis.name for axis in layout.axes if axis.folds)
        key = (slices, sequence, micro_batch, *(layout.degrees[axis] for axis in folding))
        if key not in self._alone:
            whole = {region: sequence * (1 if region == "seq_full" else slices) for region in REGIONS}
            shared = replace(alone, splits=whole, micro_batch=micro_batch, stacks_over=folding)
            self._alone[key] = self.planner.stage_costs(shared, layout)
        rounds = self.job.train.global_batch_size / micro_batch / batch
        return self.lower_bound(*self._alone[key].lower_bound(rounds, layout.degree_of("layers")), layout)

    def lower_bound(self, least: float, busy: float, layout: Layout) -> float:
        """What a step costs at least that takes so long, and in which ranks are at work so long on average."""
        device, world = self.planner.cluster.device, layout.world_size
        least = max(least * self.planner.speed(layout), busy)
        if self.objective == "energy":
            return world * (device.idle_w * (least - busy) + device.power_w * busy)
        return least if self.objective == "time" else device.price * world * least / 3600

    def _look_at_group(self, space: Space, layout: Layout, micro_batch: int) -> None:
        """Degrees and micro batch: with all choices for techniques that do not cut the model."""
        self.result.by_bound -= 1
        cuts: Cuts = {}
        for options, staged in space.options(layout):
            choice = Choice(layout, micro_batch, options)
            if (alike := self._alike(space, choice)) is None:
                self._refuse("techniques are missing or conflict", len(staged))
                continue
            bound = self.lower_bound(*self.least_time(alike), layout)
            self._wait(bound, len(staged), self._look_at_plain, space, choice, staged, cuts)

    def _alike(self, space: Space, choice: Choice) -> StageCostCache | None:
        job = space.job_of(choice)
        return None if job is None else self.planner.stage_costs(uncut(job), choice.layout)

    @staticmethod
    def least_time(alike: StageCostCache) -> tuple[float, float]:
        """Seconds that a step takes at least, and that ranks are at work in it, however the layers are cut."""
        return alike.lower_bound(alike.parts.costs.micro_batches, alike.parts.layout.degree_of("layers"))

    def _look_at_plain(self, space: Space, choice: Choice, staged: Sequence[Chosen], cuts: Cuts) -> None:
        """These choices: with all of those for techniques that do cut it."""
        alike = self._alike(space, choice)  # made again: few get here, and together they would fill the memory
        assert alike is not None
        if (least := self.least_memory(alike)) > self.limit:
            self._lacks(least, choice, len(staged))
            return
        costs, (_, busy) = alike.parts.costs, self.least_time(alike)
        for more in staged:
            one = replace(choice, options=(*choice.options, *more))
            if more not in cuts:
                if (job := self._valid(space, one)) is None:
                    continue
                cuts[more] = _places(cut(costs, job).stages)
            least = alike.lower_bound_of(cuts[more](costs.recompute))
            self._wait(self.lower_bound(least, busy, one.layout), 1, self._look_at_one, space, one, alike)

    def least_memory(self, alike: StageCostCache) -> float:
        """Lower bound in bytes of the fullest rank's memory, however the model is cut into stages.

        It is the mean over the ranks of state, and of what they hold in a backward. No stage frees activations before
        the first micro batch has passed all stages, so all of that micro batch's activations are held at once.
        """
        whole = alike.memory(alike.parts.costs.stages[0])
        held, working = whole.held, whole.gathered + whole.summed + whole.kept
        total = held["parameters"] + held["optimizer"] + held["buffers"] + max(held["gradients"], working)
        return self._reserved + total / alike.parts.layout.degree_of("layers")

    def _look_at_one(self, space: Space, choice: Choice, alike: StageCostCache) -> None:
        result, job = self.result, self._valid(space, choice)
        if job is None:
            return
        draft = self.planner.draft(cut(alike.parts.costs, job), choice.layout, alike)
        if self._hopeless(self.lower_bound(draft.lower_bound_s, draft.busy_s, choice.layout)):
            result.slower += 1
            return
        # Too large, it matters as `tightest` alone: no use to look on once a rank has more than that one.
        memory = draft.memory(most=result.tightest[0] if result.tightest else math.inf)
        most = max(m.total for m in memory)
        if most > self.limit:
            self._lacks(most, choice, 1)
            return
        if short := short_of(self.planner.cluster.memory, [m.host for m in memory], choice.layout.world_size):
            result.too_large += 1
            result.host_short = result.host_short or f"{choice}: {short}"
            return
        result.simulated += 1
        self._keep(Found(choice, draft.finish(memory)))

    def _valid(self, space: Space, choice: Choice) -> Job | None:
        """The job with this layout; None, and counted, where it is refused."""
        job = space.job_of(choice)
        why = "techniques are missing or conflict" if job is None else space.refusal(job)
        if why:
            self._refuse(why, 1)
            return None
        return job

    def _refuse(self, why: str, count: int) -> None:
        self.result.refused += count
        self.result.refusal = self.result.refusal or why

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
