"""Memory of a rank in the frameworks of published rows: model state, pipeline stages and recomputation.

Times are predicted with a selective recompute that takes as long as computing every second layer again. Bytes are asked
of what the framework itself computes again (`as_held`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from titan.contracts.base.cost import Attention, Costs, Matmul, Order, PersistentState, Recompute, SavedTensor, Stage
from titan.plugins.parallel.pipeline.orders import order

from .describe import Framework
from .rows import Row

SHARDED = ("dp_shard", "cp")
"""Axes over which state is sharded and gradients are reduced. Context parallelism is one of them in torchtitan (mesh
dp_shard_cp, parallelize_llama.py) and in Megatron-Core (data-parallel groups with_context_parallel)."""


def held(job: Row, framework: Framework, gradient: int) -> tuple[PersistentState, ...]:
    """Model state per parameter, by component. gradient: bytes of an accumulated gradient."""
    shard = SHARDED
    adds, several = framework.accumulate == "add", bool(framework.accumulate)
    updated = 12 + framework.readied[job.zero > 0] * (several and gradient == 2)
    if job.zero == 3:
        kept, moments = (2.0, updated) if adds else (2.0, 0.0) if framework.offloaded else (4.0, 8.0)
        return (
            PersistentState(component="parameters", bytes_per_param=kept, axes=shard),
            PersistentState(component="gradients", bytes_per_param=kept, axes=shard),
            PersistentState(component="optimizer", bytes_per_param=moments, axes=shard),
            PersistentState(component="buffers", bytes_per_param=2, gathered_units=3),
            PersistentState(component="buffers", bytes_per_param=2 + gradient, gathered_units=1),
        )
    beside = 0.0
    if adds and gradient == 4:
        beside = 2.0 * (job.dp > 1 or not framework.drops_narrow)
        beside += framework.unaccounted * ("fp32 grad" in job.precision)
    # Without a table the largest unit is a layer, of which one tensor is cast; but such ranks are not the fullest.
    cast = (PersistentState(component="buffers", bytes_per_param=4, gathered_units=1),) * (
        framework.casts and gradient == 4
    )
    return (
        PersistentState(component="parameters", bytes_per_param=2),
        PersistentState(component="gradients", bytes_per_param=gradient + beside),
        PersistentState(component="optimizer", bytes_per_param=updated, axes=shard if job.zero else ()),
        *cast,
    )


def recompute_of(job: Row, framework: Framework) -> str:
    """Recomputation of a row: as stated, else the default of its framework, by whose terms selective is meant."""
    said = framework.recompute if "recompute" in job.guessed else job.recompute
    return framework.selective if said == "selective" else said


def as_held(job: Row, framework: Framework, costs: Costs) -> Costs:
    """The costs of a job for memory; for time, see `costs_of`."""
    said = recompute_of(job, framework)
    if said == "products":
        narrow = costs.dtype == "float8" and not framework.saves_narrow
        return replace(costs, recompute=Recompute(also=_saved_by_products(job, framework, costs, narrow)))
    return costs


def _saved_by_products(job: Row, framework: Framework, costs: Costs, narrow: bool) -> tuple[SavedTensor, ...]:
    """Results that per-operation recomputation saves: of attention, of reductions, and of every second product.

    narrow: the products are float8 products, which it does not save.
    """
    products = [] if narrow else [op for op in costs.layer if isinstance(op, Matmul)][::2]
    found = [
        SavedTensor(numel=op.outputs, region="seq_full" if costs.style(op.module) == "row" else "tp_sharded")
        for op in products
    ]
    found += [
        SavedTensor(numel=job.hidden, region="tp_sharded"),
        SavedTensor(numel=job.heads, region="tp_sharded", itemsize=4),
    ]
    if narrow and framework.saves_magnitudes:
        # Of the inputs of q, k and v; of the projection; of gate and up; and of down. A compiler merges equal ones.
        found += [
            SavedTensor(numel=2 * job.hidden, region="seq_full"),
            SavedTensor(numel=job.hidden + job.ffn, region="tp_sharded"),
        ]
    if job.sequence_parallel:
        found.append(SavedTensor(numel=2 * job.hidden, region="hidden"))
    return tuple(found)


def as_reserved(job: Row, framework: Framework, held: Costs) -> Costs:
    """The costs whose memory shows in the allocator's reserved memory.

    The attention scores of the one layer that is recomputed at a time do not show: they lie in blocks that the
    allocator has cached since the update. Runs that differ in nothing but 16 to 256 heads take the same memory within 2
    GB; their scores differ by 2.6.
    """
    if recompute_of(job, framework) != "full" or not framework.accumulate:
        return held
    layer = (
        replace(op, saved=tuple(s for s in op.saved if not s.scores)) if isinstance(op, Attention) else op
        for op in held.layer
    )
    return replace(held, layer=tuple(layer))


@cache
def _order(schedule: str, ranks: int, stages: int) -> Callable[[int], Order]:
    return partial(order, schedule, ranks, stages)


def stages_of(job: Row, cut: str) -> tuple[tuple[Stage, ...], Callable[[int], Order]]:
    """Pipeline stages and schedule of a row; embedding and head count as a layer each where the framework does so."""
    stages = job.pp * job.chunks
    extra = 2 if job.ends_count else 0
    ends = [min(max(end - extra // 2, 0), job.layers) for end in _ends(job, job.layers + extra, stages, cut)]
    ends[-1] = job.layers
    starts = [0, *ends[:-1]]
    layers = [range(a, b) for a, b in zip(starts, ends, strict=True)]
    found = tuple(Stage(s % job.pp, these, s == 0, s == stages - 1) for s, these in enumerate(layers))
    return found, _order("1F1B" if job.chunks == 1 else "Interleaved1F1B", job.pp, stages)


def _ends(job: Row, items: int, stages: int, cut: str) -> list[int]:
    """Last layer of each stage, exclusive."""
    numbers = range(1, stages + 1)
    if cut == "first":
        return [min(math.ceil(items / stages) * s, items) for s in numbers]
    if cut == "last":
        return [items // stages * s + max(0, s - stages + items % stages) for s in numbers]
    if cut == "products":
        whole = items + job.vocab * job.hidden / job.layer_params
        return [min(math.floor(whole * s / stages) + 1, items) for s in numbers]
    return [round(items * s / stages) for s in numbers]
