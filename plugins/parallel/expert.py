"""Expert parallelism: the experts of each layer are dealt to the ranks of the axis `ep`, and tokens travel to them.

The axis folds dp_shard x cp: it multiplies the world by nothing. A rank of ep holds E / ep experts of each layer whole
(or their tensor-parallel slices), and sharded data parallelism shards these over the ranks that ep leaves, E / ep
experts over dp_shard x cp / ep ranks, while all other parameters stay sharded over dp_shard x cp (arXiv 2006.16668,
2101.03961). For R rows that a rank's router has chosen, sorted by expert:

    counts exchanged (all-to-all of E numbers), rows dispatched (all-to-all), results = expert(rows), combined (back).

Nothing is padded and nothing is dropped: splits are as uneven as the router is (arXiv 2211.15841). A rank whose experts
get no row still takes part in every collective, and its experts' gradients are zeros. Each row is computed by the same
kernels wherever it is, and added up at home in the order of its router's choice.

Cost for a micro batch of T tokens on a rank, k experts per token, width D, e bytes per number, per mixture layer:
    memory: parameters of experts / ep before they are sharded: gathered copies are ep times smaller.
    bytes sent: T k D e (ep - 1) / ep per all-to-all: 2 forward, 2 backward, and 2 more if the layer is recomputed.
    once per layer and forward: the host waits for the device, which knows how many rows go where.
All of this communication is on the critical path: keep ep within a node where that is possible.

Limits: ep divides the experts and dp_shard x cp. Not with torch.compile, whose graphs need sizes that are known before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan.contracts import Axis, BuildContext, Costs, Fact, Job, ModelPart, ModelSpec, Technique, register
from titan.contracts.base.cost import CollectiveCost, Matmul, When
from titan.contracts.base.sharding import slice_parameters
from titan.contracts.base.spec import nearest
from titan.layers.experts import Experts, StackedLinear, gather_rows, inverse


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.expert]`: none; its degree is `mesh.ep`."""


@register
class ExpertParallel(Technique):
    """Deals the experts of each layer to ranks, to which tokens travel and from which results return (EP)."""

    name = "expert"
    Config = Config
    phase = "partition"
    axes = (
        Axis(
            name="ep",
            folds=("dp_shard", "cp"),
            weights="slices",
            topology_order=35,
            doc="ranks of dp_shard x cp that share the experts of each layer",
        ),
    )

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        ep, stacks = job.layout.degree("ep"), sorted({op.stack for op in _stacks(spec)})
        if ep > 1 and not stacks:
            yield f"mesh.ep = {ep}: the model has no experts; set mesh.ep = 1"
        for experts in stacks:
            if experts % ep:
                degrees = nearest(ep, lambda degree, of=experts: of % degree == 0, most=experts)
                yield f"mesh.ep = {ep} cannot share {experts} experts evenly; nearest ep that fits: {degrees}"

    def facts(self) -> dict[Fact, str]:
        """The router decides how many rows are sent where."""
        return {
            "sizes_from_values": "[plugins.expert] sends as many rows as the router chooses; switch one of them off"
        }

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Stacks are shared; rows travel twice in each direction."""
        if job.layout.degree("ep") == 1:
            return costs
        kinds: tuple[When, ...] = ("forward", "recompute", "backward")
        stack = _stacks(job.spec)[0]  # all linears of an expert have the same rows, as wide as a hidden state
        travels = (
            CollectiveCost(
                axes=("ep",),
                collective="all_to_all",
                where="layer",
                when=when,
                numel=stack.used * costs.dim,
                count=2,
                of_layers=stack.of_layers,
            )
            for when in kinds
        )
        return replace(costs, stacks_over=(*costs.stacks_over, "ep"), collectives=(*costs.collectives, *travels))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Keep this rank's experts of each layer, and send rows to where theirs are."""
        if context.mesh.layout.degree("ep") == 1:
            return
        mesh = context.mesh["ep"]
        part.costly.add(torch.ops._c10d_functional.all_to_all_single.default)  # rows that have travelled
        for module in list(part.module.modules()):
            if isinstance(module, Experts):
                module.use(partial(_compute, module, mesh.get_group().group_name, mesh.size()), by=self.name)
                for linear in module.children():
                    assert isinstance(linear, StackedLinear)
                    slice_parameters(linear, mesh, {"weight": 0})


def _stacks(spec: ModelSpec) -> list[Matmul]:
    return [op for op in spec.layer_ops if isinstance(op, Matmul) and op.stack > 1]


# --- rows, sorted by expert -----------------------------------------------------------------------------------------


def _compute(experts: Experts, group: str, ranks: int, rows: Tensor, counts: Tensor) -> Tensor:
    """Results [R, D] of rows [R, D], in their order, whichever ranks hold the experts.  counts: [E], rows of each."""
    each = len(counts) // ranks
    arriving = _exchange(counts, group, [each] * ranks, [each] * ranks)  # from each rank, rows of each expert here
    sent, received = _sizes(rows, counts, arriving, ranks)
    here = torch.arange(each, device=rows.device).repeat(ranks)
    by_expert = here.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
    by_rank = inverse(by_expert)
    sorted_rows = gather_rows(_exchanged(rows, group, received, sent), by_expert, by_rank)
    results = experts.compute(sorted_rows, arriving.view(ranks, -1).sum(0))
    return _exchanged(gather_rows(results, by_rank, by_expert), group, sent, received)


def _sizes(rows: Tensor, counts: Tensor, arriving: Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """Rows that go to each rank, and that come from each; even where there are no numbers, as in a dry run."""
    if rows.is_meta:
        even = [len(rows) * (rank + 1) // ranks - len(rows) * rank // ranks for rank in range(ranks)]
        return even, even
    sent, received = torch.stack([counts, arriving]).view(2, ranks, -1).sum(-1).tolist()
    return sent, received


class _Exchanged(torch.autograd.Function):
    """Rows that have travelled; their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: str, received: list[int], sent: list[int]) -> Tensor:
        ctx.settings = group, sent, received
        return _exchange(rows, group, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.settings), None, None, None


_exchanged = _Exchanged.apply


def _exchange(rows: Tensor, group: str, received: list[int], sent: list[int]) -> Tensor:
    """An all-to-all of rows, by the numbers of rows to receive from each rank and to send to each."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(rows.contiguous(), received, sent, group))
