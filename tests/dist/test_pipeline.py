"""A pipeline gives one process's loss and gradients, whatever runs it (plugins/parallel/pipeline)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.logits import logits_of
from tests.sweeps import but_sweep, swept_case
from titan.contracts import Batch, BuildContext, Engine, Mesh, Model, ModelPart, ModelSpec, Precision, Technique
from titan.contracts.base.layout import Layout
from titan.contracts.base.spec import normal
from titan.plugins.losses.cross_entropy import CrossEntropy
from titan.plugins.memory.activation_checkpoint import ActivationCheckpoint
from titan.plugins.models.gpt import Gpt
from titan.plugins.models.llama import Llama
from titan.plugins.parallel.ddp import DistributedDataParallel
from titan.plugins.parallel.fsdp import FullyShardedDataParallel
from titan.plugins.parallel.pipeline import PipelineParallel
from titan.plugins.parallel.pipeline.stages import takes
from titan.plugins.parallel.tensor import TensorParallel
from titan.plugins.precision.bf16 import BFloat16
from titan.testing.ranks import RankError, run_ranks
from titan.training import phases
from titan.training.engine import SequentialEngine, StepLoss
from titan.training.gradients import global_norm

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)

SIZES: dict[str, Any] = {"dim": 16, "n_heads": 4, "vocab_size": 61, "max_seq_len": 8, "ffn_dim": 24}
MODELS: dict[str, type[Model]] = {"llama": Llama, "gpt": Gpt}
TECHNIQUES: dict[str, type[Technique]] = dict(
    pp=PipelineParallel, dp_replicate=DistributedDataParallel, dp_shard=FullyShardedDataParallel, tp=TensorParallel
)
MICRO, LENGTH = 2, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run: degrees per axis, options per technique."""

    axes: tuple[tuple[str, int], ...]
    schedule: str = "1F1B"
    layers: int = 5
    micro_batches: int = 4
    virtual_stages: int = 0
    split_points: tuple[str, ...] = ()
    model: str = "llama"
    tied: bool = False
    documents: bool = False
    zero_stage: int | None = None
    recompute: bool = False
    bf16: bool = False

    @property
    def degrees(self) -> dict[str, int]:
        return dict(self.axes)

    def build(self) -> Model:
        kind = MODELS[self.model]
        return kind(kind.Config(**SIZES, n_layers=self.layers, tied=self.tied))

    def batches(self, shard: int, shards: int) -> list[Batch]:
        """This shard's micro batches; a different number of tokens counts in each."""
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 61, (shards * self.micro_batches, MICRO, LENGTH + 1), generator=generator)
        labels = tokens[..., 1:].clone()
        labels[::3, 0, -3:] = -100
        documents = (torch.arange(LENGTH) >= 3).long().expand(MICRO, LENGTH) if self.documents else None
        mine = slice(shard * self.micro_batches, (shard + 1) * self.micro_batches)
        return [
            Batch(row.contiguous(), label, documents)
            for row, label in zip(tokens[mine, :, :-1], labels[mine], strict=True)
        ]


def _techniques(case: Case) -> list[Technique]:
    options: dict[str, dict[str, Any]] = {
        "pp": {"schedule": case.schedule, "virtual_stages": case.virtual_stages, "split_points": case.split_points},
        "dp_shard": {"zero_stage": case.zero_stage},
    }
    techniques: list[Technique] = [TECHNIQUES[a](TECHNIQUES[a].Config(**options.get(a, {}))) for a in case.degrees]
    if case.recompute:
        techniques.append(ActivationCheckpoint(ActivationCheckpoint.Config(mode="full")))
    if case.bf16:
        techniques.append(BFloat16(BFloat16.Config()))
    return techniques


def _context(case: Case, techniques: Sequence[Technique], degrees: dict[str, int]) -> BuildContext:
    axes = [axis for technique in techniques for axis in technique.axes if axis.name in degrees]
    ordered = tuple(sorted(axes, key=lambda axis: axis.topology_order))
    layout = Layout(ordered, {axis.name: degrees[axis.name] for axis in ordered})
    mesh = Mesh(layout, torch.device("cpu"), dist.get_rank() if layout.world_size > 1 else 0, keep=tuple(degrees))
    model = case.build()
    # Zeros and ones would hide a wrong factor or a bias added twice.
    with torch.device("meta"):
        init = {name: normal(0.2) for name, _ in model.build().named_parameters()}
    precision = Precision()
    for technique in techniques:
        precision = technique.precision(precision)
    job: Any = SimpleNamespace(
        model=model,
        layout=layout,
        micro_batches=case.micro_batches,
        run=SimpleNamespace(seed=5),
        data=SimpleNamespace(seq_len=LENGTH),
        stating=lambda fact: (),
    )
    return BuildContext(job, mesh, replace(model.spec(), init=init), precision, list(techniques))


def _loss(tokens: int, parts: Sequence[ModelPart], spec: ModelSpec, chunk: int = 7) -> StepLoss:
    """Some tokens at a time."""
    loss = StepLoss(CrossEntropy(CrossEntropy.Config(chunk_tokens=chunk)), torch.device("cpu"))
    loss.end(parts, spec)
    loss.begin(torch.tensor(tokens))
    return loss


def _alone(case: Case) -> tuple[ModelPart, float]:
    """One process, all micro batches: the part with its gradients, and the loss; kept for cases of another layout."""
    alike = replace(case, axes=(), schedule="", virtual_stages=0, split_points=(), zero_stage=None, recompute=False)
    return _run_alone(alike, case.degrees.get("dp_shard", 1) * case.degrees.get("dp_replicate", 1))


@cache
def _run_alone(case: Case, shards: int) -> tuple[ModelPart, float]:
    context = _context(case, [], {})
    (part,) = phases.assemble(context).parts
    batches = [batch for shard in range(shards) for batch in case.batches(shard, shards)]
    tokens = sum(int((batch.labels >= 0).sum()) for batch in batches)
    loss = _loss(tokens, [part], context.spec, chunk=batches[0].labels.numel())
    SequentialEngine(part, []).forward_backward(batches)
    return part, loss.reported.item()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Found:
    """What a rank found: losses, norms, and each gradient's difference as a share of the largest number expected."""

    loss: float
    expected_loss: float
    norm: float
    expected_norm: float
    gradients: dict[str, float]
    logits: float | None


def _assemble(case: Case) -> tuple[Sequence[ModelPart], BuildContext, Engine]:
    techniques = _techniques(case)
    context = _context(case, techniques, case.degrees)
    engine = phases.assemble(context)
    return engine.parts, context, engine


def _compare(case: Case) -> Found:
    alone, expected_loss = _alone(case)
    expected = {name: _gradient(parameter) for name, parameter in alone.parameters()}
    expected_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    parts, context, engine = _assemble(case)
    layout, rank = context.mesh.layout, dist.get_rank()
    shards = layout.degree_of("dealt")
    batches = case.batches(layout.index_of(rank, "dealt"), shards)
    count = torch.tensor([int((batch.labels >= 0).sum()) for batch in batches]).sum()
    loss = _loss(int(context.mesh.sum(count, "dealt")), parts, context.spec)
    before = engine.forward(batches[0])
    engine.forward_backward(batches)
    for technique in context.techniques:
        technique.after_backward()
    reported = context.mesh.sum(loss.reported, "layers", "dealt").item()
    differences = {}
    for part in parts:
        for name, parameter in part.parameters():
            wanted = expected[name]
            # Some gradients are zero but for rounding, such as those of key biases.
            scale = max(wanted.abs().max().item(), 1e-3 * expected_norm)
            difference = (_whole(_gradient(parameter)) - wanted).abs().max() / scale
            differences[f"{part.stage}:{name}"] = difference.item()
    norm = global_norm(parts, context.mesh).item()
    after = engine.forward(batches[0])
    logits = None
    if before is not None and after is not None:
        with torch.no_grad():
            wanted = logits_of(alone.module, batches[0].tokens, batches[0].documents)
        logits = max((_whole(x) - wanted).abs().max().item() for x in (before, after))
    return Found(reported, expected_loss, norm, expected_norm, differences, logits)


def _of_each(function: Callable[[Case], Any], cases: Sequence[Case]) -> list[Any]:
    return [function(case) for case in cases]


def _each(names: Sequence[str] = SCHEDULES, **options: Any) -> list[Case]:
    """A case of each of these schedules that this PyTorch runs here; on two ranks, if nothing else is said."""
    return [Case(**{"axes": (("pp", 2),), "schedule": name, **options}) for name in names if name in SCHEDULES]


def _check(*cases: Case) -> None:
    ranks = math.prod(cases[0].degrees.values())
    for case, *of_case in zip(cases, *run_ranks(_of_each, ranks, _compare, cases), strict=True):
        for rank in of_case:
            assert rank.loss == pytest.approx(rank.expected_loss, rel=1e-5), case
            assert rank.norm == pytest.approx(rank.expected_norm, rel=1e-5), case
            assert {name: share for name, share in rank.gradients.items() if not share < 1e-4} == {}, case
        logits = [rank.logits for rank in of_case if rank.logits is not None]
        assert len(logits) == ranks // case.degrees["pp"]
        assert max(logits) < 1e-4, case
        names = {name.partition(":")[2] for rank in of_case for name in rank.gradients}
        with torch.device("meta"):
            assert names == {name for name, _ in case.build().build().named_parameters()}, case


@pytest.mark.parametrize("pp", but_sweep([2, 4], 4))
def test_every_schedule_gives_the_loss_and_gradients_of_one_process(pp: int) -> None:
    _check(*_each(axes=(("pp", pp),), layers=2 * pp + 1, micro_batches=2 * pp))


@pytest.mark.parametrize("pp", but_sweep([2, 4], 4))
def test_every_schedule_runs_the_fewest_micro_batches_it_takes(pp: int) -> None:
    fewest = {"1F1B": pp, "DualPipeV": 2 * pp}
    cases = _each(axes=(("pp", pp),), layers=8)
    _check(*(replace(case, micro_batches=fewest.get(case.schedule, 1)) for case in cases))


@pytest.mark.parametrize("pp", but_sweep([2, 4], 4))
def test_every_schedule_runs_a_number_of_micro_batches_that_ranks_do_not_divide(pp: int) -> None:
    count = 2 * pp + 2 if pp > 2 else 5
    names = [name for name in SCHEDULES if takes(name, pp, count)]
    _check(*_each(names, axes=(("pp", pp),), layers=8, micro_batches=count))


@pytest.mark.sweep
def test_stages_may_be_uneven_or_chosen_and_as_many_a_rank_as_wanted() -> None:
    _check(
        Case(axes=(("pp", 4),), layers=5),
        Case(axes=(("pp", 4),), layers=6, split_points=("layers.1", "layers.2", "layers.5")),
        Case(axes=(("pp", 4),), layers=8, schedule="Interleaved1F1B", virtual_stages=1),
    )
    _check(
        Case(axes=(("pp", 2),), layers=6, schedule="Interleaved1F1B", virtual_stages=3),
        Case(axes=(("pp", 2),), layers=8, schedule="LoopedBFS", virtual_stages=4),
        Case(axes=(("pp", 2),), layers=7, schedule="InterleavedZeroBubble", virtual_stages=3),
    )


def test_every_stage_is_told_which_document_a_token_is_of() -> None:
    _check(*_each(("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"), documents=True))


@pytest.mark.parametrize("pp", but_sweep([2, 4], 4))
def test_tied_weights_get_the_gradients_of_both_ends(pp: int) -> None:
    _check(*_each(axes=(("pp", pp),), layers=8, micro_batches=8, model="gpt", tied=True))


def test_sharded_stages_reduce_gradients_once_or_per_micro_batch() -> None:
    axes = (("pp", 2), ("dp_shard", 2))
    _check(
        *(replace(case, tied=case.schedule != "GPipe") for case in _each(axes=axes)),
        *_each(("1F1B", "Interleaved1F1B"), axes=axes, zero_stage=3, tied=True),
        Case(axes=axes, zero_stage=2),
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("others", "names", "model"),
    [
        ({"dp_replicate": 2}, ("1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"), "llama"),
        ({"tp": 2}, ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"), "llama"),
        ({"dp_shard": 2, "tp": 2}, ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "gpt"),
    ],
    ids=["replicated", "split by tensor parallelism", "three parallelisms at once"],
)
def test_tied_stages_over_other_axes(others: dict[str, int], names: Sequence[str], model: str) -> None:
    _check(*_each(names, axes=(("pp", 2), *others.items()), model=model, tied=True))


def test_stages_may_recompute_their_layers() -> None:
    _check(*_each(recompute=True))


def _same_sums(axis: str, schedules: Sequence[str]) -> dict[str, float]:
    """Largest difference between the bf16 gradients of 4 data-parallel ranks and those of 2 with 2 stages."""
    alone = Case(axes=((axis, 4),), micro_batches=2, bf16=True)
    techniques = _techniques(alone)
    context = _context(alone, techniques, alone.degrees)
    (part,) = phases.assemble(context).parts
    _loss(100, [part], context.spec)
    SequentialEngine(part, techniques).forward_backward(alone.batches(dist.get_rank(), 4))
    expected = {name: _whole(_gradient(parameter)) for name, parameter in part.parameters()}
    differences = {}
    for schedule in schedules:
        case = Case(axes=(("pp", 2), (axis, 2)), schedule=schedule, bf16=True)
        parts, context, engine = _assemble(case)
        _loss(100, parts, context.spec)
        engine.forward_backward(case.batches(context.mesh.layout.index_of(dist.get_rank(), "dealt"), 2))
        here = [
            (_whole(_gradient(parameter)) - expected[name]).abs().max() / expected[name].abs().max()
            for part in parts
            for name, parameter in part.parameters()
        ]
        differences[schedule] = torch.stack(here).max().item()
    return differences


@pytest.mark.parametrize("axis", but_sweep(["dp_shard", "dp_replicate"], "dp_replicate"))
def test_bf16_gradients_are_summed_in_fp32_by_every_schedule(axis: str) -> None:
    for differences in run_ranks(_same_sums, 4, axis, SCHEDULES):
        assert {name: share for name, share in differences.items() if not share < 1e-6} == {}


def _train(case: Case) -> list[tuple[float, dict[str, Tensor]]]:
    """Three updates with an evaluation between them: the loss before each, and this rank's copies of tied weights."""
    parts, context, engine = _assemble(case)
    optimizer = torch.optim.SGD([p for part in parts for _, p in part.parameters()], lr=3.0, momentum=0.9)
    layout = context.mesh.layout
    batches = case.batches(layout.index_of(dist.get_rank(), "dealt"), layout.degree_of("dealt"))
    seen, loss = [], _loss(100, parts, context.spec)
    for _ in range(3):
        loss.begin(torch.tensor(100))
        engine.forward_backward(batches)
        for technique in context.techniques:
            technique.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        logits = engine.forward(batches[0])
        assert (logits is None) == (parts[-1].stage != parts[-1].stages - 1)
        copies = {f"{part.stage}": part.module.get_parameter("embed.weight") for part in parts if part.holds("embed")}
        whole = {stage: _whole(copy.detach()).clone() for stage, copy in copies.items()}
        seen.append((context.mesh.sum(loss.reported, "layers", "dealt").item(), whole))
    return seen


@pytest.mark.parametrize("axes", [(("pp", 2),), swept_case(((("pp", 2), ("dp_shard", 2)),))], ids=["plain", "sharded"])
def test_training_goes_the_same_way_under_every_schedule_and_tied_weights_stay_one(axes: Any) -> None:
    cases, curves = _each(axes=axes, model="gpt", tied=True), []
    for ranks in zip(*run_ranks(_of_each, math.prod(dict(axes).values()), _train, cases), strict=True):
        curves.append([loss for loss, _ in ranks[0]])
        for step in range(3):
            copies = [copy for rank in ranks for copy in rank[step][1].values()]
            assert len({stage for rank in ranks for stage in rank[step][1]}) == 2
            assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert curves[0][2] < curves[0][0] - 0.05
    assert all(curve == pytest.approx(curves[0], rel=1e-5) for curve in curves)


def _promise_other_hidden_states() -> None:
    case = Case(axes=(("pp", 2),))
    _, context, engine = _assemble(case)
    context.precision = Precision(param_dtype=torch.bfloat16)
    engine.forward(case.batches(0, 1)[0])


def test_hidden_states_that_do_not_fit_the_buffer_are_refused_before_they_are_sent() -> None:
    said = r"hidden states \[2, 8, 16\] torch.float32 .* require \[2, 8, 16\] torch.bfloat16"
    with pytest.raises(RankError, match=said):
        run_ranks(_promise_other_hidden_states, 2)
