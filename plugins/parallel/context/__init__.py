"""Context parallelism: the positions of every sequence are split over the ranks of the axis `cp`.

Each rank holds S / cp positions, of which it computes everything but attention alone. Attention reaches the keys and
values of other ranks by one of three methods:

ring     they travel round the ranks, block by block, while attention to the block at hand is computed (arXiv
         2310.01889). Causal work is even, as each rank holds a chunk of the first half and its mirror image of the
         second (head-tail order).
gather   every rank gathers them all (arXiv 2407.21783, section 3.3.2); head-tail order too.
ulysses  an all-to-all gives each rank all positions of some heads, and another one undoes it (arXiv 2309.14509).

Ranks along cp hold copies of the weights: whoever shards or replicates parameters sums gradients over cp too.

Cost for cp ranks, a micro batch of B sequences of S tokens, H query and K key-value heads of N features, e bytes per
number, and E = 2 B K N S / cp numbers in the keys and values of a rank:
    memory: activations / cp; state is shared out by those who sum gradients. In backward a layer's attention holds,
        besides: ring 3 E numbers of e and 4 E of 4 bytes, gather 3 cp E of 4 bytes. Ulysses saves its output twice.
    FLOPs: all / cp. Ring merges cp partial outputs in float32, gather two.
    bytes sent per rank and layer: ring (cp - 1) E e forward, (cp - 1) E (e + 4) + 4 E backward; gather (cp - 1) E e
        forward and (cp - 1) E (e + 4) backward; ulysses 2 (cp - 1) / cp (H + K) N B S / cp e each way, with K < cp
        counted as cp.
    once per step: nothing.
Ring's sends run beside attention to the block at hand. They outlast it where S / cp is below about K e / H times the
device's FLOP/s over a link's bytes/s: 2,000 positions for Llama 3 8B between nodes of H100. Gather and ulysses are on
the critical path. Ring and gather compute blocks that documents or a window cut without a fused kernel; they make no
S x S mask. Ulysses makes those of whole sequences, as without cp. With ALiBi all blocks are computed without one.

Limits: ring and gather need seq_len to be a multiple of 2 cp; ulysses a multiple of cp, and heads that it can deal: cp
divides n_heads / tp, and n_kv_heads / tp divides cp or is divided by it. Ring and gather have no soft caps of scores.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from titan.contracts import (
    Axis,
    Batch,
    BuildContext,
    Costs,
    Fact,
    Job,
    ModelPart,
    ModelSpec,
    Technique,
    option,
    register,
)
from titan.contracts.base.cost import Attention
from titan.contracts.base.spec import nearest
from titan.layers.attention import AttentionCore

from . import costs as methods
from .attention import OPERATIONS, Ranks, Scores, gather, positions_of, ring, ulysses


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Options of `[plugins.context]`; the degree is `mesh.cp`."""

    method: Literal["ring", "ulysses", "gather"] = option(
        "ring", "how attention reaches other ranks' keys: pass them round, exchange positions for heads, or gather them"
    )


@register
class ContextParallel(Technique):
    """Splits the positions of each sequence over ranks; attention by ring, Ulysses or gathered keys and values."""

    name = "context"
    Config = ContextConfig
    config: ContextConfig
    phase = "convert"
    axes = (Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc="ranks that split each sequence"),)
    search_space: ClassVar = tuple({"method": method} for method in ("ring", "ulysses", "gather"))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._ranks = Ranks("", 1, 0)
        self._own: dict[tuple[int, torch.device], Tensor] = {}

    def facts(self) -> dict[Fact, str]:
        """Ring and gather compute attention themselves."""
        if self.config.method == "ulysses":
            return {}
        why = f'[plugins.context] method = "{self.config.method}" computes attention itself; set method = "ulysses"'
        return {"computes_attention": why}

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Positions and heads must come out even, and attention must be the host's module."""
        cp, method, length = job.layout.degree("cp"), self.config.method, job.data.seq_len
        if cp == 1:
            return
        pieces = cp if method == "ulysses" else 2 * cp
        if length % pieces:
            lengths = nearest(length, step=pieces, most=spec.max_seq_len)
            yield (
                f"[data] seq_len = {length} cannot be split into {pieces} pieces, as method = {method!r} with "
                f"mesh.cp = {cp} needs; nearest seq_len that fits: {lengths}"
            )
        if method == "ulysses":
            yield from _undealt(cp, job.layout.degree_of("slices"), length, spec)
        elif any(isinstance(op, Attention) and op.soft_cap for op in spec.layer_ops):
            yield f'method = {method!r} has no soft cap on scores, as the model has; use method = "ulysses"'
        elif any(isinstance(op, Attention) and op.scores_written for op in spec.layer_ops):
            yield f'method = {method!r} computes attention itself and writes no scores; use method = "ulysses"'

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Every tensor has a share of the positions; attention reaches the others as the method says."""
        cp = job.layout.degree("cp")
        if cp == 1:
            return costs
        layer, collectives = list(costs.layer), list(costs.collectives)
        for place, op in enumerate(layer):
            if isinstance(op, Attention):
                layer[place], sent = self._attention(op, cp, costs, job.layout.degree_of("slices"))
                collectives += [replace(one, of_layers=op.of_layers) for one in sent]
        splits = {region: ranks * cp for region, ranks in costs.splits.items()}
        return replace(costs, splits=splits, layer=tuple(layer), collectives=tuple(collectives))

    def _attention(self, op: Attention, cp: int, costs: Costs, tp: int) -> methods.Cost:
        match self.config.method:
            case "ring":
                return methods.ring(op, cp, costs)
            case "gather":
                return methods.gather(op, cp, costs)
            case "ulysses":
                return methods.ulysses(op, cp, tp)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Give every attention of the model an operation that reaches the keys of other ranks.

        Raises:
            PluginError: another technique has replaced it, or the model computes attention of its own.
        """
        if context.mesh.layout.degree("cp") == 1:
            return
        self._ranks = Ranks(
            context.mesh.group("cp").group_name, context.mesh.layout.degree("cp"), context.mesh.at("cp")
        )
        part.costly |= set(OPERATIONS)
        part.length_multiple *= self._ranks.size * (1 if self.config.method == "ulysses" else 2)
        heads = context.spec.n_heads // context.mesh.layout.degree_of("slices") // self._ranks.size
        for module in part.module.modules():
            if isinstance(module, AttentionCore):
                self._reach(module, self._ranks.rank * heads)

    def _reach(self, core: AttentionCore, first_head: int) -> None:
        """first_head: of those that ulysses deals to this rank, among the heads that it shares with ranks of cp."""
        if self.config.method == "ulysses":
            before = core.attend if core.operation is None else core.operation
            core.use(partial(_by_heads, self._ranks, before), self.name, wraps=True)
            core.first_head += first_head
        else:
            method = ring if self.config.method == "ring" else gather
            operation = partial(_by_blocks, method, self._ranks, core)
            core.use(operation, self.name, follows=("window", "scale", "slopes"))

    def batch(self, batch: Batch) -> Batch:
        """This rank's positions of each sequence; documents stay whole, for the keys of other ranks."""
        if self._ranks.size == 1:
            return batch
        own = self._positions(batch.tokens.shape[1], batch.tokens.device)
        return replace(
            batch, tokens=batch.tokens[:, own], labels=batch.labels[:, own], positions=batch.positions[:, own]
        )

    def _positions(self, length: int, device: torch.device) -> Tensor:
        if (length, device) not in self._own:
            own = positions_of(length, self._ranks.rank, self._ranks.size, self.config.method)
            self._own[length, device] = own.to(device)
        return self._own[length, device]


def _undealt(cp: int, tp: int, length: int, spec: ModelSpec) -> Iterable[str]:
    """What keeps ulysses from dealing a rank's heads to cp ranks; tp: ranks that share the heads already."""
    heads, kv_heads = spec.n_heads // tp, spec.n_kv_heads // tp
    among = f"of [model] n_heads = {spec.n_heads}" + (f" over mesh.tp = {tp}" if tp > 1 else "")

    def fits(ranks: int) -> bool:
        return length % ranks == 0 and heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    if kv_heads and not fits(cp):
        yield (
            f'method = "ulysses" cannot deal {heads} query heads and {kv_heads} key-value heads ({among}) to '
            f"mesh.cp = {cp} ranks; nearest cp that fits: {nearest(cp, fits, most=heads)}"
        )


def _by_blocks(
    method: Callable[..., Tensor],
    ranks: Ranks,
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    documents: Tensor | None,
) -> Tensor:
    scores = Scores(core.window or None, core.scale, core.own_slopes(q.shape[1]))
    return method(q, k, v, documents, ranks, scores)


def _by_heads(
    ranks: Ranks,
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    documents: Tensor | None,
) -> Tensor:
    whole = torch.arange(q.shape[2] * ranks.size, device=q.device).expand(len(q), -1)
    return ulysses(q, k, v, lambda q, k, v: attend(q, k, v, whole, documents), ranks)
