"""Where the pipeline cuts, what it refuses, and what each stage holds (plugins/parallel/pipeline)."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from titan.contracts import ModelPart, ModelSpec, Technique
from titan.contracts.base.layout import Layout
from titan.errors import PluginError
from titan.layers.attention import AttentionCore
from titan.plugins.compile import Compile
from titan.plugins.memory.activation_checkpoint import ActivationCheckpoint
from titan.plugins.models.gpt import Gpt
from titan.plugins.models.llama import Llama
from titan.plugins.parallel.fsdp import FullyShardedDataParallel
from titan.plugins.parallel.pipeline import PipelineConfig, PipelineParallel
from titan.plugins.parallel.pipeline.stages import V_SHAPED, balanced, carve, check_ends, cut, placement, takes

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _preset(name: str, **sizes: Any) -> ModelSpec:
    return Llama(Llama.Config(**{**Llama.presets[name], **sizes})).spec()


def _layers(spec: ModelSpec, stages: int, points: tuple[str, ...] = ()) -> list[int]:
    runs = cut(spec, 2048, stages, points)
    assert [layer for run in runs for layer in run] == list(range(spec.n_layers))
    return [len(run) for run in runs]


def test_layers_are_cut_at_points_or_evenly_but_for_large_ends() -> None:
    assert _layers(_preset("tiny", n_layers=6), 3, ("layers.1", "layers.5")) == [1, 4, 1]
    assert _layers(_preset("65b"), 8) == [10] * 8
    assert _layers(_preset("65b"), 3) == [27, 27, 26]
    # The head of the 8b has the FLOPs of about two layers, and the table and the head the parameters of two each.
    first, *middle, last = _layers(_preset("llama3-8b"), 4)
    assert last < first < min(middle)


def test_the_cut_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.rand(7, generator=generator).tolist()

        def worth(starts: tuple[int, ...], costs: list[float] = costs) -> tuple[float, float]:
            sums = [sum(costs[a:b]) for a, b in pairwise(starts)]
            return round(max(sums), 9), round(sum(x * x for x in sums), 9)

        every = [(0, a, b, 7) for a in range(1, 6) for b in range(a + 1, 7)]
        runs = balanced(tuple(costs), 3)
        assert worth((*(run.start for run in runs), 7)) == min(worth(starts) for starts in every)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_live_where_torch_looks_for_them(schedule: str, ranks: int) -> None:
    theirs = generate_stage_to_rank_mapping(ranks, 2 * ranks, "v" if schedule in V_SHAPED else "loop")
    assert dict(enumerate(placement(schedule, ranks, 2 * ranks))) == theirs


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_every_parameter_under_its_own_name(tied: bool) -> None:
    model = Gpt(Gpt.Config(n_layers=5, dim=8, n_heads=2, vocab_size=11, max_seq_len=4, tied=tied))
    spec = model.spec()
    with torch.device("meta"):
        whole = model.build()
    runs = cut(spec, 4, 3, ())
    stages = [carve(whole, spec, run, first=i == 0, last=i == 2) for i, run in enumerate(runs)]
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert {name for held in names for name in held} == {name for name, _ in whole.named_parameters()}
    twice = {name for held in names for name in held if sum(name in other for other in names) > 1}
    assert twice == ({"embed.weight"} if tied else set())
    for stage, run in zip(stages, runs, strict=True):
        assert stage.get_submodule("layers").keys() <= {str(i) for i in run}
    assert "embed.weight" in names[0]
    middle = ModelPart(stages[1], 1, 3)
    assert not middle.holds("embed") and not middle.holds("norm") and not middle.holds("output")
    if tied:
        last = stages[2]
        assert last.get_parameter("output.weight") is last.get_parameter("embed.weight")
        assert [len(unit) for unit in ModelPart(last, 2, 3).units(spec)][-1] == 3
    assert len(whole.get_submodule("layers").keys()) == 5, "the model itself must stay whole"


def _tiny(**options: Any) -> tuple[nn.Module, ModelSpec]:
    model = Llama(Llama.Config(**{**Llama.presets["tiny"], **options}))
    with torch.device("meta"):
        return model.build(), model.spec()


def test_a_parameter_without_a_stage_and_a_tie_that_the_head_owns_are_refused() -> None:
    whole, spec = _tiny()
    check_ends(whole, spec)
    whole.register_parameter("lost", nn.Parameter(torch.zeros(1)))
    with pytest.raises(PluginError, match="lost must be in its embeddings"):
        check_ends(whole, spec)
    whole, spec = _tiny(tied=True)
    with pytest.raises(PluginError, match=r"embed\.weight must be"):
        check_ends(whole, replace(spec, tied=(("embed.weight", "output.weight"),)))


def test_a_module_that_holds_a_process_group_is_refused() -> None:
    whole, spec = _tiny()
    core = whole.get_submodule("layers.0.attn.core")
    assert isinstance(core, AttentionCore)
    core.use(partial(_over, dist.ProcessGroup(0, 1)), "mine")
    with pytest.raises(PluginError) as refused:
        carve(whole, spec, range(1), first=True, last=False)
    said = str(refused.value)
    assert said.startswith("the model cannot be cut into stages: cannot pickle ") and "ProcessGroup" in said
    assert said.endswith("; a module holds what has no copy, such as a process group: hold its name")
    core.use(partial(_over, "its name"), "mine", wraps=True)
    carve(whole, spec, range(1), first=True, last=False)


def _over(group: Any, q: Tensor, *_: Any) -> Tensor:
    return q


def _torch_takes(schedule: str, ranks: int, micro_batches: int) -> bool:
    kind: Any = torch_schedules.get_schedule_class(schedule)
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    stages = [
        SimpleNamespace(num_stages=ranks * (1 if single else 2), group_size=ranks, group_rank=0, submod=None)
        for _ in range(1 if single else 2)
    ]
    try:
        kind(stages[0] if single else stages, micro_batches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_are_taken_as_torch_takes_them(schedule: str) -> None:
    counts = [(ranks, count) for ranks in (2, 3, 4) for count in range(1, 14)]
    ours = [(ranks, count) for ranks, count in counts if takes(schedule, ranks, count)]
    assert ours == [(ranks, count) for ranks, count in counts if _torch_takes(schedule, ranks, count)]


def _check(
    spec: ModelSpec,
    pp: int,
    schedule: str = "1F1B",
    *,
    batch: int = 32,
    micro: int = 1,
    ranks: int = 1,
    device: str = "cuda",
    techniques: Any = (),
    **options: Any,
) -> list[str]:
    technique = PipelineParallel(PipelineConfig(schedule=schedule, **options))
    job: Any = SimpleNamespace(
        layout=Layout(tuple(technique.axes), {"pp": pp}),
        micro_batch=micro,
        batch_ranks=ranks,
        micro_batches=batch // (micro * ranks),
        train=SimpleNamespace(global_batch_size=batch),
        run=SimpleNamespace(device=device),
        stating=lambda fact: [facts[fact] for t in techniques if fact in (facts := t.facts())],
    )
    return list(technique.check(job, spec))


SMALL = _preset("tiny", n_layers=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_fits_is_not_refused(schedule: str) -> None:
    assert _check(SMALL, 2, schedule) == []
    assert _check(SMALL, 1, schedule, virtual_stages=7) == []


def test_more_stages_than_layers_are_refused_with_the_nearest_degree() -> None:
    assert _check(SMALL, 4, "LoopedBFS") == [
        "[model] n_layers = 4 cannot fill 8 stages (mesh.pp = 4 with 2 per rank); nearest mesh.pp that fits: 2"
    ]
    (text,) = _check(SMALL, 2, "LoopedBFS", virtual_stages=5)
    assert text.endswith("nearest mesh.pp that fits: none, with 5 stages per rank")


@pytest.mark.parametrize(
    "schedule, given, held", [("1F1B", 2, 1), ("GPipe", 3, 1), ("ZBVZeroBubble", 1, 2), ("DualPipeV", 4, 2)]
)
def test_schedules_that_hold_a_fixed_number_of_stages_say_so(schedule: str, given: int, held: int) -> None:
    said = f"virtual_stages = {given}: {schedule} holds exactly {held} on each rank"
    assert _check(SMALL, 2, schedule, virtual_stages=given) == [said]


@pytest.mark.parametrize(
    "points, fault",
    [
        (("layers.1", "layers.9", "norm"), "layers.9, norm not among layers.1 to layers.3"),
        (("layers.0", "layers.1", "layers.2"), "layers.0 not among layers.1 to layers.3"),
        (("layers.2",), "1 given, but 4 stages have 3"),
        (("layers.2", "layers.1", "layers.3"), "layers.2, layers.1, layers.3 must be in the model's order"),
        (("layers.1", "layers.1", "layers.3"), "layers.1, layers.1, layers.3 must be in the model's order"),
    ],
)
def test_split_points_must_be_layers_in_order_one_for_each_stage(points: tuple[str, ...], fault: str) -> None:
    assert _check(SMALL, 4, split_points=points) == [f"split_points: {fault}"]


NEAREST = {
    "1F1B": (8, "16"),
    "DualPipeV": (24, "32"),
    "Interleaved1F1B": (56, "48 or 60"),
    "InterleavedZeroBubble": (36, "32 or 40"),
}


@pytest.mark.parametrize("schedule", NEAREST)
def test_micro_batches_that_a_schedule_cannot_run_are_refused(schedule: str) -> None:
    batch, nearest = NEAREST[schedule]
    check = partial(_check, _preset("tiny", n_layers=8), 4, schedule, micro=2, ranks=2)
    (text,) = check(batch=batch)
    assert text.startswith(f"[train] global_batch_size = {batch} makes {batch // 4} micro batches of 2 on each of 2 ")
    assert text.endswith(f"nearest global_batch_size that fits: {nearest}")
    for size in nearest.split(" or "):
        assert check(batch=int(size)) == []


def test_what_a_split_backward_cannot_bear_is_refused() -> None:
    sharded = _technique(FullyShardedDataParallel, zero_stage=3)
    three = (_technique(Compile), sharded, _technique(ActivationCheckpoint, mode="selective"))
    assert _check(SMALL, 2, "Interleaved1F1B", techniques=three) == []
    texts = _check(SMALL, 2, "InterleavedZeroBubble", techniques=three)
    assert ["[plugins.compile] compiles it as one" in text for text in texts] == [True, False, False]
    assert "[plugins.activation_checkpoint]" in texts[1] and 'set mode = "full"' in texts[1]
    assert "zero_stage = 3 reduces gradients per micro batch; set zero_stage = 1" in texts[2]
    bearable = _technique(FullyShardedDataParallel, zero_stage=1), _technique(ActivationCheckpoint, mode="full")
    assert _check(SMALL, 2, "InterleavedZeroBubble", techniques=bearable) == []


def _technique(kind: type[Technique], **options: Any) -> Technique:
    return kind(kind.Config(**options))
