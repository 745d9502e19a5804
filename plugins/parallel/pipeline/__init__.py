"""Pipeline parallelism: consecutive layers live on different ranks, and micro batches flow through them.

The layers are cut into `mesh.pp` x `virtual_stages` stages. Stage s lives on rank s mod pp, or, for the V-shaped
schedules, rank r holds stages r and 2 pp - 1 - r. The schedules are those of `torch.distributed.pipelining`; its
stages get their shapes in advance, so that no micro batch is run to infer them.

Where to cut: stages are runs of whole layers, the first with the embeddings, the last with the head. A stage costs the
mean of its share of the forward FLOPs and its share of the parameters; of all cuts with the cheapest most expensive
stage, the one with the smallest sum of squared costs is taken. `split_points` overrides this.

Bubble of a step (idle time divided by compute time) for p ranks, v stages per rank and m micro batches; F, B and W are
a rank's times for forward, backward, and the weight-gradient part of backward of one micro batch in all its stages. The
last column is the peak number of stage activations (one stage, one micro batch) that rank r holds:

                                                            bubble                                 activations
    GPipe (arXiv 1811.06965)                                (p - 1) / m                            m
    1F1B (2104.04473)                                       (p - 1) / m                            p - r
    LoopedBFS (2211.05953)                                  (p - 1) / (v m)                        v m
    Interleaved1F1B (2104.04473)                            (p - 1) / (v m)                        p (v + 1) - 2 r - 1
    InterleavedZeroBubble (ZB-H1 of 2401.10241)             (p - 1) (F + B - 2 W) / (v m (F + B))  v p
    ZBVZeroBubble (2401.10241), where F = W = B / 2         (p - 1) F / (2 m (F + B))              2 p
    DualPipeV (2412.19437, folded in a V), same F, B, W     (p - 1) F / (2 m (F + B))              2 p + 1

Cost per rank: parameters, gradients and optimizer state of its own stages only. Before 2.15, PyTorch allocates a
receive buffer for each micro batch of each stage, forward and backward: 2 v m times B S D / hidden_split numbers. Each
micro batch sends B S D / hidden_split numbers forward between neighboring stages on different ranks, and as many
backward.

A tied tensor (an embedding that is also the head) lives on the first and on the last stage. Their gradients are added
after backward, which sends the tensor's local size once each way per step, so both copies stay bit-identical. With the
V schedules one rank holds both copies. A checkpoint has one copy, and both are loaded from it.

Limits: at `mesh.pp = 1` it does nothing. Schedules that split the backward pass (the zero-bubble ones and DualPipeV)
do not work with compiled layers, selective recomputation, or data parallelism that reduces gradients per micro batch.
Blocks that are recomputed whole are recomputed there for each group of weights, and each copy stays until the last of
them has its gradient: several forwards more, and more memory than without. Plans count one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from titan.contracts import Axis, BuildContext, Costs, Engine, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Order, Stage
from titan.contracts.base.spec import nearest
from titan.packages import torch_release

from .orders import order
from .stages import LOOPED, ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, carve, check_ends, cut, placement, shared_names, takes

if TYPE_CHECKING:
    from .engine import TiedGradients

KEEPS_BUFFERS = torch_release() < (2, 15)
"""Whether torch has buffers for all micro batches; else it frees them as it goes, and for each stage of several on a
rank as many wait as there are."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Options of `[plugins.pipeline]`; the degree is `mesh.pp`."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = option("1F1B", "pipeline schedule, by PyTorch's names")
    virtual_stages: int = option(
        0, "stages per rank; 0: 1 for GPipe and 1F1B, 2 for the other schedules", unit="stages", at_least=0
    )
    split_points: tuple[str, ...] = option(
        (), 'first layer of each stage after the first, as in ["layers.3", "layers.7"]; empty: balanced by cost'
    )

    @property
    def stages_per_rank(self) -> int:
        """Stages per rank: `virtual_stages`, or the default of the schedule."""
        return self.virtual_stages or (1 if self.schedule in ONE_STAGE else 2)


@register
class PipelineParallel(Technique):
    """Spreads layers over ranks; micro batches flow through them (GPipe, 1F1B, interleaved, zero bubble, DualPipeV)."""

    name = "pipeline"
    Config = PipelineConfig
    config: PipelineConfig
    phase = "split"
    axes = (
        Axis(
            name="pp",
            data="same",
            weights="layers",
            topology_order=0,
            doc="pipeline ranks; each holds some of the layers",
        ),
    )
    search_space: ClassVar = (
        *({"schedule": schedule, "virtual_stages": 1} for schedule in ONE_STAGE),
        *({"schedule": schedule, "virtual_stages": v} for schedule in LOOPED for v in (2, 3, 4, 5, 6, 8)),
        *({"schedule": schedule, "virtual_stages": 2} for schedule in V_SHAPED),
    )

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._tied: TiedGradients | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Stages need layers, the schedule its number of micro batches, and some things cannot go together."""
        ranks = job.layout.degree("pp")
        if ranks == 1:
            return
        yield from self._check_stages(ranks, spec)
        yield from self._check_micro_batches(ranks, job)
        yield from self._check_company(job)

    def _check_stages(self, ranks: int, spec: ModelSpec) -> Iterator[str]:
        config, each = self.config, self.config.stages_per_rank
        stages, layers = ranks * each, spec.n_layers
        allowed = 1 if config.schedule in ONE_STAGE else 2 if config.schedule in V_SHAPED else each
        if each != allowed:
            yield f"virtual_stages = {each}: {config.schedule} holds exactly {allowed} on each rank"
        elif layers < stages:
            degrees = _nearest_degree(ranks, each, layers) or f"none, with {each} stages per rank"
            yield (
                f"[model] n_layers = {layers} cannot fill {stages} stages (mesh.pp = {ranks} with {each} per rank); "
                f"nearest mesh.pp that fits: {degrees}"
            )
        elif config.split_points:
            names = spec.layer_names()
            unknown = [point for point in config.split_points if point not in names[1:]]
            at = [names.index(point) for point in config.split_points if not unknown]
            if unknown:
                yield f"split_points: {', '.join(unknown)} not among {names[1]} to {names[-1]}"
            elif len(at) != stages - 1:
                yield f"split_points: {len(at)} given, but {stages} stages have {stages - 1}"
            elif at != sorted(set(at)):
                yield f"split_points: {', '.join(config.split_points)} must be in the model's order"

    def _check_micro_batches(self, ranks: int, job: Job) -> Iterator[str]:
        schedule, unit, size = self.config.schedule, job.micro_batch * job.batch_ranks, job.train.global_batch_size
        if not job.micro_batches or takes(schedule, ranks, job.micro_batches):
            return
        need = {
            "1F1B": f"at least {ranks}, one per stage",
            "DualPipeV": f"at least {2 * ranks}, one per stage",
        }.get(schedule, f"a multiple of {job.micro_batches // ranks}, the whole rounds of {ranks} in it")
        sizes = _nearest_batch(schedule, ranks, unit, size)
        yield (
            f"[train] global_batch_size = {size} makes {job.micro_batches} micro batches of {job.micro_batch} on each "
            f"of {job.batch_ranks} data-parallel ranks, but {schedule} with mesh.pp = {ranks} needs {need}; "
            f"nearest global_batch_size that fits: {sizes}"
        )

    def _check_company(self, job: Job) -> Iterator[str]:
        if self.config.schedule not in SPLIT_BACKWARD:
            return
        own = f"[plugins.pipeline] schedule = {self.config.schedule!r}"
        for why in job.stating("one_backward"):
            yield f"{own} splits the backward pass, and {why}, or use '1F1B' or 'Interleaved1F1B'"
        for why in job.stating("reduces_per_micro_batch"):
            yield f"{own} splits the backward pass, so gradients are reduced once per step; {why}"

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Stages on their ranks, in the schedule's order, with torch's buffers to receive into."""
        ranks = job.layout.degree("pp")
        if ranks == 1:
            return costs
        each = self.config.stages_per_rank
        stages = ranks * each
        layers = cut(job.spec, job.data.seq_len, stages, self.config.split_points)
        return replace(
            costs,
            stages=_placed(self.config.schedule, ranks, tuple(layers)),
            order=_order(self.config.schedule, ranks, stages),
            pipeline_axis="pp",
            receive_buffers=job.micro_batches if KEEPS_BUFFERS else each * (each > 1),
            transfers_kept=KEEPS_BUFFERS,
        )

    def split(self, model: nn.Module, context: BuildContext) -> Engine | None:
        """The schedule of the stages of this rank, each a copy of the model without what it does not hold.

        Raises:
            PluginError: parameters lie outside of embeddings, layers and head, or are tied in a way stages cannot be.
        """
        ranks, spec = context.mesh.layout.degree("pp"), context.spec
        if ranks == 1:
            return None
        check_ends(model, spec)
        last = ranks * self.config.stages_per_rank - 1
        layers = cut(spec, context.job.data.seq_len, last + 1, self.config.split_points)
        parts, ranks_of = [], placement(self.config.schedule, ranks, last + 1)
        for stage, rank in enumerate(ranks_of):
            if rank == context.mesh.at("pp"):
                module = carve(model, spec, layers[stage], first=stage == 0, last=stage == last)
                parts.append(ModelPart(module, stage, last + 1, shared_names(spec) if stage == last else frozenset()))
        from .engine import Pipeline, TiedGradients  # here: torch's schedules bring its compiler, a second to import

        self._tied = TiedGradients(parts, context, ranks_of)
        return Pipeline(parts, context, self.config.schedule, ranks_of)

    def after_backward(self) -> None:
        """Add the gradients of tied tensors of the first and the last stage."""
        if self._tied is not None:
            self._tied.add()


@cache
def _order(schedule: str, ranks: int, stages: int) -> Callable[[int], Order]:
    """The schedule's order as a function of the micro batches; the same object each time, so that it is known again."""
    return partial(order, schedule, ranks, stages)


# A search asks these of thousands of layouts.


@cache
def _placed(schedule: str, ranks: int, layers: tuple[range, ...]) -> tuple[Stage, ...]:
    """Stages of these layers where the schedule has them."""
    homes, last = placement(schedule, ranks, len(layers)), len(layers) - 1
    return tuple(Stage(homes[s], held, s == 0, s == last) for s, held in enumerate(layers))


@cache
def _nearest_degree(ranks: int, each: int, layers: int) -> str:
    """Degrees near `ranks` at which every stage has a layer."""
    return nearest(ranks, most=layers // each)


@cache
def _nearest_batch(schedule: str, ranks: int, unit: int, size: int) -> str:
    """Global batches of whole `unit`s near a size, of which the schedule takes the micro batches."""
    return nearest(size, lambda near: takes(schedule, ranks, near // unit), step=unit)
