"""Converts a row of published measurements to the planner's input: costs and a layout."""

import math
from typing import Any

from titan.contracts.base.cost import (
    Attention,
    CollectiveCost,
    Costs,
    Elementwise,
    EmbeddingOp,
    Matmul,
    Operation,
    Recompute,
    Region,
    SavedTensor,
)
from titan.contracts.base.layout import Axis, Layout

from .describe import Framework
from .rows import Row, Skip
from .state import SHARDED, held, recompute_of, stages_of

AXES = (
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc="stages"),
    Axis(name="dp_replicate", data="dealt", weights="copies", topology_order=10, doc="replicas of state"),
    Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, doc="shards of state"),
    Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc="parts of a sequence"),
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc="parts of a layer"),
)
STYLES = {
    "embed": "embedding",
    "qkv": "column",
    "q": "column",
    "k": "column",
    "v": "column",
    "proj": "row",
    "up": "column",
    "gate": "column",
    "down": "row",
    "head": "head",
}
SPLIT_GRADIENTS = {"fp16": 2, "bf16": 2}


def layout_of(job: Row) -> Layout:
    """The layout of a row; data parallelism splits into replicas and shards if fewer ranks shard the optimizer."""
    shard = job.zero_group if job.zero else 1
    degrees = {"pp": job.pp, "dp_replicate": job.dp // shard, "dp_shard": shard, "cp": job.cp, "tp": job.tp}
    return Layout(AXES, degrees)


def dtypes(precision: str) -> tuple[str, str]:
    """(dtype of the layers' matrix products, dtype of all others) of a row's precision.

    Raises:
        Skip: the planner has no such dtype.
    """
    if "fp4" in precision:
        raise Skip(f"no cluster file has a peak for {precision}")
    wide = "float16" if precision.startswith("fp16") else "bfloat16"
    if "fp8" in precision or "float8" in precision:
        return "float8", wide
    return wide, wide


def costs_of(job: Row, framework: Framework) -> Costs:
    """Costs of a step of a row's job, as its framework runs it."""
    if job.schedule and "1f1b" not in job.schedule:
        raise Skip(f"schedule {job.schedule}: only 1F1B variants are predicted; see Schedules")
    dtype, wide = dtypes(job.precision)
    inside = job.tp * job.cp
    between = inside if job.sequence_parallel else job.cp
    splits: dict[Region, int] = {"hidden": between, "seq_full": job.cp, "tp_sharded": inside, "logits": inside}
    several = job.micro_batches > 1 and job.zero < 3
    gradient = gradient_bytes(job, framework)
    accumulated = (2 + 2 * gradient) * several * (framework.accumulate == "add")
    stages, ordered = stages_of(job, framework.cut)
    return Costs(
        seq_len=job.seq_len,
        dim=job.hidden,
        micro_batch=job.micro_batch,
        micro_batches=job.micro_batches,
        embeddings=(EmbeddingOp(module="embed", rows=padded(job, framework), width=job.hidden),),
        layer=_layer(job, framework, dtype, accumulated),
        head=_head(job, framework, accumulated),
        styles=STYLES,
        tied=framework.tied if job.tied is None else job.tied,
        splits=splits,
        itemsize=2,
        reduce_itemsize=gradient,
        dtype=dtype,
        wide_dtype=wide,
        fused=framework.compiled,
        state=held(job, framework, gradient),
        update_bytes=framework.update_bytes,
        updated_over=SHARDED if job.zero else (),
        collectives=(*_tensor_collectives(job, framework), *_data_collectives(job, framework, gradient)),
        recompute=_recompute(job, framework),
        stages=stages,
        order=ordered,
        pipeline_axis="pp" if job.pp > 1 else "",
        loss_chunks=framework.loss_chunks,
        blocking=framework.blocking_p2p,
        sent_over=("tp",) if framework.scatter_p2p and not job.sequence_parallel else (),
    )


def sends_narrow(job: Row, framework: Framework) -> bool:
    """Whether the weights, inputs and gradients of products are gathered in float8."""
    return framework.sends_narrow and "float8" in job.precision and "rowwise" not in job.precision


def gradient_bytes(job: Row, framework: Framework) -> int:
    """Of a gradient that is summed over micro batches and ranks."""
    wide = framework.wide_gradients == "all" or (framework.wide_gradients and job.precision.startswith("bf16"))
    return 4 if wide or "fp32 grad" in job.precision else 2


def _recompute(job: Row, framework: Framework) -> Recompute | None:
    said = recompute_of(job, framework)
    if said == "none":
        return None
    if said == "core":
        return Recompute(saved="all_but_scores", full_layer=not framework.early_stop)
    # Saving every second product comes to computing every second layer again.
    return Recompute(every=1 if said == "full" else 2, full_layer=not framework.early_stop)


def padded(job: Row, framework: Framework) -> int:
    """Words of the vocabulary as the table has them."""
    multiple = framework.vocab_multiple * job.tp
    return math.ceil(job.vocab / multiple) * multiple


def _norm(job: Row, framework: Framework) -> Elementwise:
    h, (forward, backward) = job.hidden, framework.norm
    if framework.norms_again and job.recompute == "none":
        backward += forward
    kept = SavedTensor(numel=h, region="hidden"), SavedTensor(numel=2, region="hidden", itemsize=4)
    return Elementwise(
        module="norm",
        region="hidden",
        forward=forward * h,
        backward=backward * h,
        params=2 if framework.bias else 1,
        width=h,
        saved=kept,
    )


def _added(job: Row, framework: Framework) -> Elementwise:
    """The sum of what came into a pair and what it made of it, after dropout; bias and mask on the way."""
    h, masked = job.hidden, 0.5 * framework.dropout
    kept = (SavedTensor(numel=h, region="hidden", itemsize=1),) if framework.dropout else ()
    return Elementwise(
        region="hidden", forward=(3 + masked) * h, backward=(1 + (1 + masked) * framework.dropout) * h, saved=kept
    )


def _layer(job: Row, framework: Framework, dtype: str, accumulated: float) -> tuple[Operation, ...]:
    h, f, d = job.hidden, job.ffn, job.head_dim
    q, kv, bias = h, round(job.kv_heads * d), framework.bias
    flash = framework.flash if job.flash is None else job.flash
    # Inputs of products in float8 are kept as such where the products cast them.
    narrow = 1 if dtype == "float8" and framework.narrow_inputs else 0
    taken = (SavedTensor(numel=h, region="hidden" if framework.regathers else "seq_full", itemsize=narrow),)
    attended = (
        SavedTensor(numel=2 * q + 2 * kv, region="tp_sharded"),
        SavedTensor(numel=job.heads, region="tp_sharded", itemsize=4),
    )
    if not flash:
        kinds = 2.5 if framework.dropout else 1
        attended = (
            SavedTensor(numel=2 * q + 2 * kv, region="tp_sharded"),
            SavedTensor(numel=kinds * job.heads, region="tp_sharded", scores=True),
        )
    entering: list[Operation] = (
        [Matmul(module="qkv", inputs=h, outputs=q + 2 * kv, bias=bias, saved=taken)]
        if framework.fused_qkv
        else [
            Matmul(module="q", inputs=h, outputs=q, bias=bias, saved=taken),
            *(Matmul(module=name, inputs=h, outputs=kv, bias=bias) for name in "kv"),
        ]
    )
    rotary = [Elementwise(region="tp_sharded", forward=2 * (q + kv), backward=2 * (q + kv))] if job.gated else []
    attention = Attention(heads=job.heads, kv_heads=job.kv_heads, head_dim=d, scores_written=not flash, saved=attended)  # type: ignore[arg-type]
    entering_down = SavedTensor(numel=f, region="tp_sharded", itemsize=narrow)
    up = [Matmul(module="up", inputs=h, outputs=f, bias=bias, saved=taken)]
    act = Elementwise(
        region="tp_sharded", forward=2 * f, backward=3 * f, saved=(SavedTensor(numel=f, region="tp_sharded"),)
    )
    if job.gated:
        fused_up = framework.fused_qkv and not framework.split_gate
        up = (
            [Matmul(module="up", inputs=h, outputs=2 * f, bias=bias, saved=taken)]
            if fused_up
            else [*up, Matmul(module="gate", inputs=h, outputs=f, bias=bias)]
        )
        kept = SavedTensor(numel=(3 if framework.gate_kept else 2) * f, region="tp_sharded")
        act = Elementwise(region="tp_sharded", forward=3 * f, backward=5 * f, saved=(kept,))
    ops: list[Operation] = [
        _norm(job, framework),
        *entering,
        *rotary,
        attention,
        Matmul(module="proj", inputs=q, outputs=h, bias=bias),
        _added(job, framework),
        _norm(job, framework),
        *up,
        act,
        Matmul(module="down", inputs=f, outputs=h, bias=bias, saved=(entering_down,)),
        _added(job, framework),
    ]
    if dtype == "float8":
        widths = [op.inputs + op.outputs for op in ops if isinstance(op, Matmul)]
        # A scale for each row takes its maximum and casts twice, for the operand as it is and as it lies in backward.
        passes = (4.5 if "rowwise" in job.precision else 1.5) * sum(widths)
        ops.append(Elementwise(region="tp_sharded", forward=passes, backward=passes))
    if accumulated:
        ops.append(_accumulation(job, job.layer_params, accumulated))
    return tuple(ops)


def _accumulation(job: Row, params: float, bytes_: float) -> Elementwise:
    """Gradients of a micro batch are added to the sum: bytes per parameter, entered as bytes per token."""
    return Elementwise(
        region="tp_sharded", forward=0.0, backward=params * bytes_ / 2 / (job.micro_batch * job.seq_len / job.cp)
    )


def _head(job: Row, framework: Framework, accumulated: float) -> tuple[Operation, ...]:
    words = padded(job, framework)
    forward, backward = framework.loss
    kept: tuple[SavedTensor, ...] = (
        SavedTensor(numel=words, region="logits"),
        SavedTensor(numel=framework.loss_kept[job.tp > 1] * words, region="logits", itemsize=4),
    )
    if framework.fused_loss or framework.loss_chunks > 1:
        kept = (SavedTensor(numel=words * framework.fused_loss, region="logits"),)
    ops: list[Operation] = [
        _norm(job, framework),
        Matmul(
            module="head", inputs=job.hidden, outputs=words, saved=(SavedTensor(numel=job.hidden, region="seq_full"),)
        ),
        Elementwise(region="logits", forward=forward * words, backward=backward * words, saved=kept),
    ]
    if accumulated:
        ops.append(_accumulation(job, job.hidden * words, accumulated))
    return tuple(ops)


def _tensor_collectives(job: Row, framework: Framework) -> list[CollectiveCost]:
    """Tensor-parallel collectives of a layer: two reductions forward, two backward, and again in recomputation."""
    found: list[CollectiveCost] = []
    if job.cp > 1:
        kv = 2 * job.hidden * (job.heads if framework.cp_repeats_heads else job.kv_heads) // job.heads
        for when, passes in (("forward", 1), ("backward", 2)):
            found.append(
                CollectiveCost(
                    axes=("cp",),
                    collective="all_gather",
                    where="layer",
                    when=when,  # type: ignore[arg-type]
                    numel=kv * job.cp * passes / job.tp,
                    overlaps=True,
                )
            )
    if job.tp == 1:
        return found
    kinds = {"all_gather": 1, "reduce_scatter": 1} if job.sequence_parallel else {"all_reduce": 1}
    for kind in kinds:
        narrow = kind == "all_gather" and sends_narrow(job, framework)
        settings: dict[str, Any] = {
            "axes": ("tp",),
            "collective": kind,
            "numel": job.hidden,
            "itemsize": 1 if narrow else 0,
        }
        again = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}[kind]
        # Where gate and up are products of their own, so are the sums of what backward makes of their input.
        back = 3 if job.gated and framework.split_gate else 2
        # A gradient is gathered before its products can begin; its sum runs beside the product of the weights.
        beside = framework.tp_overlap or (framework.tp_overlap_backward and kind != "all_gather")
        found += [
            CollectiveCost(where="layer", when=when, count=count, overlaps=framework.tp_overlap, **settings)
            for when, count in (("forward", 2), ("recompute", again))
        ]
        found.append(CollectiveCost(where="layer", when="backward", count=back, overlaps=beside, **settings))
    if job.sequence_parallel and framework.tp_overlap_backward:
        # The saved slices of the inputs of two products are gathered beside the products of their gradients.
        found.append(
            CollectiveCost(
                axes=("tp",),
                collective="all_gather",
                numel=job.hidden,
                where="layer",
                when="backward",
                count=2,
                overlaps=True,
            )
        )
    one: dict[str, Any] = {"axes": ("tp",), "collective": "all_reduce", "numel": job.hidden}
    return [
        *found,
        CollectiveCost(where="embeddings", when="forward", **one),
        CollectiveCost(where="head", when="backward", **one),
    ]


def _data_collectives(job: Row, framework: Framework, gradient: int) -> list[CollectiveCost]:
    """What data parallelism sends: sums of gradients, and parameters where the update or the weights are shared."""
    if job.dp * job.cp == 1:
        return []
    each: dict[str, Any] = {"per_parameter": True}
    shard: dict[str, Any] = {**each, "axes": SHARDED}
    hidden: dict[str, Any] = {"where": "unit", "when": "backward", "per": "step", "overlaps": True}
    after: dict[str, Any] = {"where": "step", "when": "update", "per": "step"}
    beside = hidden if framework.overlap_gradients else after
    if not job.zero:
        both = ("dp_replicate", *SHARDED)
        return [CollectiveCost(axes=both, collective="all_reduce", itemsize=gradient, numel=1, **each, **beside)]
    replicas = CollectiveCost(
        axes=("dp_replicate",),
        collective="all_reduce",
        sharded_over=SHARDED,
        itemsize=gradient,
        numel=1,
        **each,
        **beside,
    )
    summed = "all_reduce" if framework.summed_whole else "reduce_scatter"
    if job.zero < 3:
        when = (
            {"where": "unit", "when": "forward", "per": "step", "overlaps": True}
            if framework.gather_prefetch
            else after
        )
        return [
            CollectiveCost(collective=summed, itemsize=gradient, numel=1, **shard, **beside),  # type: ignore[arg-type]
            replicas,
            CollectiveCost(collective="all_gather", itemsize=2, **_messages(job, framework), **shard, **when),  # type: ignore[arg-type]
        ]
    width = 1 if sends_narrow(job, framework) else 2
    use: dict[str, Any] = {**shard, "where": "unit", "per": "micro_batch", "overlaps": True}
    return [
        CollectiveCost(collective="all_gather", when="forward", itemsize=width, numel=1, **use),
        CollectiveCost(collective="all_gather", when="backward", itemsize=width, numel=1, **use),
        CollectiveCost(collective="reduce_scatter", when="backward", itemsize=gradient, numel=1, **use),
        replicas,
    ]


def _messages(job: Row, framework: Framework) -> dict[str, float]:
    """How many messages the updated parameters take: one, or one from each rank that has a share of them."""
    count = job.zero_group if framework.broadcasts else 1
    return {"count": count, "numel": 1 / count}
