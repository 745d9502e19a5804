"""Where a model is cut into stages, and on which rank each of them lives."""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from torch import nn

from titan.contracts import ModelSpec
from titan.errors import PluginError

ONE_STAGE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)


def takes(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Whether a schedule can run this many micro batches, as torch's classes have it."""
    if schedule == "1F1B":
        return micro_batches >= ranks
    if schedule == "DualPipeV":
        return micro_batches >= 2 * ranks
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return micro_batches % max(1, micro_batches // ranks) == 0
    return micro_batches >= 1


def placement(schedule: str, ranks: int, stages: int) -> list[int]:
    """The pipeline rank that holds each stage, by stage number; V-shaped schedules fold back."""
    if schedule in V_SHAPED:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


def cut(spec: ModelSpec, seq_len: int, stages: int, points: Sequence[str]) -> Sequence[range]:
    """The layer numbers of each stage: cut at `points`, or balanced by FLOPs and parameters."""
    if points:
        names = spec.layer_names()
        starts = [0, *(names.index(point) for point in points), len(names)]
        return [range(start, end) for start, end in pairwise(starts)]
    flops, params = spec.flops_per_token(seq_len) / 3, spec.params
    layer = spec.layer_flops_per_token(seq_len) / flops + spec.layer_params / params
    costs = [layer / 2] * spec.n_layers
    costs[0] += spec.embedding_params / params / 2
    costs[-1] += (spec.head_flops_per_token() / flops + spec.head_params / params) / 2
    return balanced(tuple(costs), stages)


@cache
def balanced(costs: tuple[float, ...], stages: int) -> Sequence[range]:
    """Cut into `stages` runs whose dearest is as cheap as can be; among those, with the least sum of squares."""
    until = [sum(costs[:end]) for end in range(len(costs) + 1)]
    runs = {(start, end): until[end] - until[start] for end in range(len(until)) for start in range(end)}
    cap = max(runs[run] for run in _best(runs, len(costs), stages, max)) * (1 + 1e-9)
    squares = {run: cost**2 for run, cost in runs.items() if cost <= cap}
    return [range(start, end) for start, end in _best(squares, len(costs), stages, operator.add)]


def _best(
    runs: Mapping[tuple[int, int], float], layers: int, stages: int, combine: Callable[[float, float], float]
) -> list[tuple[int, int]]:
    """The (start, end) of `stages` runs that cover all layers at the least combined cost."""
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
    for _ in range(stages):
        reached: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for (start, end), cost in runs.items():
            if start in best:
                total = combine(best[start][0], cost)
                if end not in reached or total < reached[end][0]:
                    reached[end] = (total, [*best[start][1], (start, end)])
        best = reached
    return best[layers][1]


def shared_names(spec: ModelSpec) -> frozenset[str]:
    """Names of the parameters that the first stage owns and the last holds too."""
    return frozenset(
        owner for alias, owner in spec.tied if _within(owner, spec.embeddings) and _within(alias, spec.head)
    )


def check_ends(model: nn.Module, spec: ModelSpec) -> None:
    """Every parameter must have a stage, and what is tied be owned by the embeddings.

    Raises:
        PluginError: one has none, or is not.
    """
    ends = (*spec.embeddings, *spec.head)
    astray = [name for name, _ in model.named_parameters() if not _within(name, (*ends, spec.layers))]
    astray += [alias for alias, owner in spec.tied if not (_within(alias, ends) and _within(owner, spec.embeddings))]
    if astray:
        raise PluginError(
            f"the model cannot be cut into stages: {', '.join(astray)} must be in its embeddings, layers or head, "
            "and may be tied only to a parameter of the embeddings"
        )


def _within(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def carve(model: nn.Module, spec: ModelSpec, layers: range, *, first: bool, last: bool) -> nn.Module:
    """A copy of the model that holds these layers, and what belongs to its ends."""
    kept = {*(spec.embeddings if first else ()), *spec.layer_names(layers), *(spec.head if last else ())}
    if last:
        kept |= {name for name in spec.embeddings if any(_within(owner, [name]) for owner in shared_names(spec))}
    try:
        module = copy.deepcopy(model)
    except TypeError as error:
        what = "a module holds what has no copy, such as a process group: hold its name"
        raise PluginError(f"the model cannot be cut into stages: {error}; {what}") from error
    for name in {*spec.embeddings, *spec.head, *spec.layer_names()} - kept:
        parent, _, child = name.rpartition(".")
        if parent == spec.layers:
            delattr(module.get_submodule(parent), child)
        else:
            setattr(module.get_submodule(parent), child, None)
    return module
