"""What attention costs by each method: memory traffic and memory besides those on one rank, and collectives.

Counted per token of a rank and before heads are split, as everywhere in `Costs`: q and kv are the features of queries,
and of keys and values together. With tensors of e bytes per number, adding one to a float32 sum moves 8 + e bytes per
number, and merging two blocks' outputs 24 + e.
"""

from dataclasses import replace
from typing import Any

from titan.contracts.base.cost import Attention, CollectiveCost, Costs, SavedTensor

from .blocks import MOST_SCORES

Cost = tuple[Attention, list[CollectiveCost]]

FLOAT32 = 4
"""Bytes per number of gradients that ranks add up."""


def ring(op: Attention, ranks: int, costs: Costs) -> Cost:
    """A block per rank; the keys of later ranks are seen by half of the queries, so three quarters are merged."""
    q, kv = _features(op)
    e, op = costs.itemsize, _by_blocks(op, ranks, costs, costs.seq_len / (2 * ranks))
    forward, backward = 0.75 * q * (24 + e), 0.75 * q * (8 + e) + kv * (24 + e)
    passes: dict[str, Any] = {"collective": "send", "numel": kv, "count": ranks - 1, "overlaps": True}
    return _with(op, forward * ranks / e, backward * ranks / e, blocks=ranks, own=q + 3 * kv, sums=q + 4 * kv), [
        _sent("forward", **passes),
        _sent("recompute", **passes),
        _sent("backward", **passes, itemsize=e + FLOAT32),
        _sent("backward", collective="send", numel=kv, itemsize=FLOAT32),  # gradients go home after the last block
    ]


def gather(op: Attention, ranks: int, costs: Costs) -> Cost:
    """Two blocks for each half of the queries; gradients of all keys are put in the order of ranks, then summed."""
    q, kv = _features(op)
    e, op = costs.itemsize, _by_blocks(op, ranks, costs, costs.seq_len / 2)
    whole = ranks * kv
    forward, backward = 2 * q * (24 + e) + 2 * e * whole, 2 * q * (8 + e) + (36 + 4 * e) * whole
    return _with(op, forward / e, backward / e, blocks=4, own=q, sums=q + 3 * whole), [
        *(_sent(when, collective="all_gather", numel=whole) for when in ("forward", "recompute", "backward")),
        _sent("backward", collective="reduce_scatter", numel=whole, itemsize=FLOAT32),
    ]


def ulysses(op: Attention, ranks: int, slices: int) -> Cost:
    """All positions for some heads, at least one of keys and values; slices: ranks that share the heads anyway.

    Its exchanges stand beside attention, so recomputation that saves the results of collectives saves theirs.
    """
    q, kv = _features(op)
    repeated = kv * max(1.0, ranks * slices / op.kv_heads)
    copied = 4 * (q + repeated) + 4 * q
    saved = SavedTensor(numel=q + repeated - kv, region="tp_sharded")  # the output, before it is exchanged
    op = _with(op, copied, copied, own=q + 3 * (q + repeated))
    return replace(op, kv_heads=max(op.kv_heads, ranks * slices), saved=(*op.saved, saved)), [
        _sent(when, where="layer", collective="all_to_all", numel=numel)
        for when in ("forward", "recompute", "backward")
        for numel in (q + repeated, q)
    ]


def _by_blocks(op: Attention, ranks: int, costs: Costs, columns: float) -> Attention:
    """The operation where documents, biases or a window give blocks a mask; columns: scores per row of the largest.

    Of 4 cp^2 blocks of chunks, cp (2 cp + 1) are not skipped: those of keys up to the queries' own, and near enough.
    """
    if not (op.documents or op.biased) and op.keys(costs.seq_len) == costs.seq_len:
        return op
    keys = costs.seq_len * (2 * ranks + 1) / (4 * ranks)
    if op.window:
        keys = min(keys, op.window + costs.seq_len / (2 * ranks))
    tokens = costs.share("tp_sharded") / ranks
    # Backward has the softmax and the gradients of the scores.
    scores = SavedTensor(numel=2 * min(op.heads * columns, MOST_SCORES / tokens), region="tp_sharded", itemsize=FLOAT32)
    return replace(op, masked_blocks=keys, scratch=(*op.scratch, scores))


def _features(op: Attention) -> tuple[int, int]:
    return op.heads * op.head_dim, 2 * op.kv_heads * op.head_dim


def _with(
    op: Attention, forward: float, backward: float, *, own: float, sums: float = 0.0, blocks: int = 1
) -> Attention:
    """The operation with numbers copied; and held in backward, in the compute dtype and in float32."""
    held = (SavedTensor(numel=own, region="tp_sharded"), SavedTensor(numel=sums, region="tp_sharded", itemsize=FLOAT32))
    return replace(op, blocks=blocks, copied=(forward, backward), scratch=(*op.scratch, *held))


def _sent(when: Any, *, where: Any = "attention", **settings: Any) -> CollectiveCost:
    return CollectiveCost(axes=("cp",), where=where, when=when, region="tp_sharded", **settings)
