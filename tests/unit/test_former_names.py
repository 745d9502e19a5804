"""Former names of what plugins are written with: each works, and is reported once, with the present name."""

import copy
import importlib
import re
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.planned import job_of
from titan import contracts, errors
from titan.contracts import Axis, BuildContext, Costs, Model, Precision, Technique, deprecated
from titan.contracts.base import cost
from titan.contracts.base.cost import (
    CollectiveCost,
    Elementwise,
    GatherPolicy,
    Matmul,
    PersistentState,
    Recompute,
    SavedTensor,
    Stage,
)
from titan.contracts.plugin import registry
from titan.planner.step.layout import costs_of

AXIS: dict[str, Any] = {"name": "a", "data": "dealt", "weights": "copies", "doc": ""}


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The former names reported since the last call, in order."""
    monkeypatch.setattr(deprecated, "_reported", set())
    monkeypatch.setenv(errors._WARNED, "")

    def names() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        found = [re.fullmatch(r"warning: \S+\.py:\d+: (.*); titan 1\.0 drops the former name", line) for line in lines]
        assert all(found), lines
        return [line[1] for line in found if line]

    return names


@pytest.mark.parametrize("module", deprecated.CLASSES)
def test_a_class_is_found_under_its_former_name(module: str, reported) -> None:
    place = importlib.import_module(module)
    for old, new in deprecated.CLASSES[module].items():
        assert getattr(place, old) is getattr(place, old) is getattr(place, new)
        assert reported() == [f"{old} is now {new}"]
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Wurld'"):
        place.Wurld  # noqa: B018


def test_a_former_module_is_reported(reported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "titan.cost", raising=False)
    assert importlib.import_module("titan.cost") is importlib.import_module("titan.cost") is cost
    assert reported() == ["module titan.cost is now titan.contracts.base.cost"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("titan.costs")


@pytest.mark.parametrize(
    ("former", "present"),
    [
        (lambda: Axis(**AXIS, depth=3), Axis(**AXIS, topology_order=3)),
        (lambda: Precision(param=torch.bfloat16, reduce=torch.float64), Precision(torch.bfloat16, torch.float64)),
        (
            lambda: SavedTensor(numbers=2, bytes=4, region="inner"),
            SavedTensor(numel=2, itemsize=4, region="tp_sharded"),
        ),
        (lambda: Matmul(module="m", inputs=1, outputs=2, keeps=()), Matmul(module="m", inputs=1, outputs=2)),
        (
            lambda: Elementwise(region="whole", forward=1, backward=1),
            Elementwise(region="seq_full", forward=1, backward=1),
        ),
        (lambda: cost.linear("m", 2, 3, keeps=5, region="whole"), cost.linear("m", 2, 3, saved=5)),
        (
            lambda: PersistentState(component="buffers", bytes=2, units=3),
            PersistentState(component="buffers", bytes_per_param=2, gathered_units=3),
        ),
        (
            lambda: GatherPolicy(gathered="use", summed="step"),
            GatherPolicy(gather_every="use", reduce_every="step"),
        ),
        (
            lambda: CollectiveCost(
                axes=("a",), collective="all_reduce", where="stem", when="forward", numbers=1, bytes=2, over=("b",),
                kept=True, every="use",
            ),
            CollectiveCost(
                axes=("a",), collective="all_reduce", where="embeddings", when="forward", numel=1, itemsize=2,
                sharded_over=("b",), skip_last_unit=True, per="micro_batch",
            ),
        ),
        (lambda: Recompute(keeps="products", whole=True), Recompute(saved="products", full_layer=True)),
        (lambda: Stage(0, range(2), stem=False), Stage(0, range(2), embeddings=False)),
    ],
    ids=lambda value: "" if callable(value) else type(value).__name__,
)  # fmt: skip
def test_a_former_keyword_gives_the_same_object(former, present, reported) -> None:
    assert former() == former() == present
    said = reported()
    assert said and len(said) == len(set(said)), said


def test_former_fields_are_read_and_replaced(reported) -> None:
    costs = costs_of(job_of("--mesh.tp", "2"))
    assert (costs.stem, costs.traffic, costs.held, costs.units, costs.bytes, costs.reduce_bytes) == (
        costs.embeddings, costs.collectives, costs.state, costs.gather, costs.itemsize, costs.reduce_itemsize,
    )  # fmt: skip
    sent = (CollectiveCost(axes=("tp",), collective="all_gather", where="head", when="forward", numel=1),)
    changed = replace(costs, traffic=sent, units=None)
    assert changed.collectives == sent == changed.traffic
    assert changed == replace(costs, collectives=sent, gather=None)
    assert reported() == [
        "Costs.stem is now embeddings", "Costs.traffic is now collectives", "Costs.held is now state",
        "Costs.units is now gather", "Costs.bytes is now itemsize", "Costs.reduce_bytes is now reduce_itemsize",
        "Costs(traffic=) is now collectives=", "Costs(units=) is now gather=",
    ]  # fmt: skip


def test_regions_go_by_their_former_names(reported) -> None:
    costs = costs_of(job_of("--mesh.tp", "2"))
    assert costs.share("inner") == costs.share("tp_sharded") and costs.cut("inner") == costs.splits["inner"] == 2
    assert (
        replace(costs, splits={"hidden": 1, "whole": 3, "inner": 6, "logits": 6}).share("seq_full") == costs.tokens / 3
    )
    with pytest.raises(KeyError):
        costs.splits["outer"]  # type: ignore[index]
    assert reported() == ["'inner' is now 'tp_sharded'", "'whole' is now 'seq_full'"]


def test_what_hooks_are_given_has_its_former_attributes(reported) -> None:
    job = job_of()
    context = BuildContext(job=job, mesh=None, plan=job.plan, precision=job.precision)  # type: ignore[call-arg,arg-type]
    assert context.plan is context.spec is job.plan is job.spec
    assert (job.spec.stem, job.spec.stem_params) == (job.spec.embeddings, job.spec.embedding_params)
    assert (job.precision.param, job.precision.reduce) == (torch.float32, torch.float32)
    assert job.layout.axes[0].depth == job.layout.axes[0].topology_order
    assert (job.checkpoint.keep, job.run.sample) == (job.checkpoint.keep_latest, job.run.sample_prompt)
    assert reported() == [
        "Job.plan is now spec", "BuildContext(plan=) is now spec=", "BuildContext.plan is now spec",
        "ModelSpec.stem is now embeddings", "ModelSpec.stem_params is now embedding_params",
        "Precision.param is now param_dtype", "Precision.reduce is now reduce_dtype",
        "Axis.depth is now topology_order", "CheckpointSection.keep is now keep_latest",
        "RunSection.sample is now sample_prompt",
    ]  # fmt: skip


# --- what a plugin defines ----------------------------------------------------------------------------------------

FORMER = '''
from dataclasses import dataclass, replace
from titan.contracts import Axis, Technique, register

@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""

class Base(Technique):
    """Halves the regions inside of a layer."""
    choices = ({},)

    def plan(self, plan):
        return replace(plan, max_seq_len=plan.max_seq_len + 1)

@register
class Former(Base):
    """Halves the regions inside of a layer."""
    name = "former"
    Config = Config
    phase = "shard"
    parity = False
    optional = True

    def plan(self, plan):
        return replace(super().plan(plan), dim=2 * plan.dim)

    def check(self, job, plan):
        return [f"dim {plan.dim}"]

    def cost(self, costs, job):
        splits = {region: ranks * (2 if region == "inner" else 1) for region, ranks in costs.splits.items()}
        return replace(costs, splits=splits, held=())

    def apply(self, part, world):
        pass
'''


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Technique]:
    """A technique as it was written for titan 0.1; other tests do not see it."""
    registry.load_plugins()
    for name in ("_plugins", "_opened"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    (tmp_path / "former.py").write_text(FORMER)
    registry.load_plugins([tmp_path])
    found = registry.find("technique", "former")
    assert found is not None and issubclass(found, Technique)
    return found


def test_hooks_and_attributes_are_called_by_their_present_names(reported, former: type[Technique]) -> None:
    assert {line.partition(" is now ")[0] for line in reported()} >= {
        "Technique.plan", "Technique.choices", "Technique.parity", "Technique.optional",
        "parameter plan of Technique.check()", "parameter world of Technique.apply()",
    }  # fmt: skip
    assert (former.search_space, former.search_toggle, former.preserves_numerics) == (({},), True, False)
    assert (former.choices, former.optional, former.parity) == (({},), True, False)  # type: ignore[attr-defined]
    technique, spec = former(former.Config()), job_of().spec
    changed = technique.spec(spec)
    assert (changed.dim, changed.max_seq_len) == (2 * spec.dim, spec.max_seq_len + 1)
    assert technique.plan(spec) == changed  # type: ignore[attr-defined]


def test_a_cost_hook_sees_the_regions_it_knows(former: type[Technique]) -> None:
    technique, job = former(former.Config()), job_of("--mesh.tp", "2")
    costs = costs_of(job)
    changed = technique.cost(costs, job)
    assert dict(changed.splits) == {**costs.splits, "tp_sharded": 4}
    assert changed.state == () and costs.splits["tp_sharded"] == 2


def test_a_model_by_a_former_hook_may_derive_from_a_present_one() -> None:
    class Present(Model):
        def spec(self) -> str:  # type: ignore[override]
            return "spec"

        def build(self) -> None:  # type: ignore[override]
            return None

    class Former(Present):
        def plan(self) -> str:
            return f"plan over {super().plan()}"  # type: ignore[misc]

    assert Former(None).spec() == Former(None).plan() == "plan over spec"
    assert Present(None).plan() == "spec"  # type: ignore[attr-defined]


def test_a_former_after_step_takes_the_step_alone(reported) -> None:
    class Former(Technique):
        seen: ClassVar[list[int]] = []

        @torch.no_grad()
        def after_step(self, step: int) -> None:  # type: ignore[override]
            self.seen.append(step)

    class Below(Former):
        def after_step(self, step: int) -> None:  # type: ignore[override]
            super().after_step(step + 1)  # type: ignore[call-arg]

    assert reported() == ["Technique.after_step(step) is now after_step(step, updated)"]
    assert signature(Below.after_step) == signature(Former.after_step) == signature(Technique.after_step)
    Below(None).after_step(3, torch.tensor(True))
    assert Former.seen == [4]


class _Whole(nn.Module):
    """A forward of titan 0.1, whose positions are all of the sequence."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x, documents


class _Placed(nn.Module):
    """A present forward, though its documents have another name."""

    def forward(self, x: Tensor, positions: Tensor, of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        return x, positions, of


class _Bare(nn.Module):
    """Neither: nothing says that what follows the tokens is documents."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x, mask


def _built(module: type[nn.Module]) -> nn.Module:
    class Builder(Model):
        def build(self) -> nn.Module:
            return module()

        def spec(self) -> contracts.ModelSpec:
            raise NotImplementedError

    return Builder(None).build()


def test_a_forward_of_tokens_and_documents_alone_is_given_no_positions(reported) -> None:
    x, positions, documents = torch.zeros(3)
    former = _built(_Whole)
    assert reported() == [f"forward(x, documents) of _Whole in {__file__} is now forward(x, positions, documents)"]
    assert former(x, positions, documents) == (x, documents) and former(x, positions) == (x, None)
    assert isinstance(former, _Whole) and type(former).__name__ == "_Whole"
    assert copy.deepcopy(former)(x, positions, documents) == (x, documents), "as a pipeline copies it"


@pytest.mark.parametrize("module", [_Placed, _Bare])
def test_other_forwards_are_left_as_they_are(module: type[nn.Module], reported) -> None:
    built, (x, positions) = _built(module), torch.zeros(2)
    assert type(built) is module and built(x, positions)[1] is positions and reported() == []


def test_present_names_are_not_reported(reported) -> None:
    Costs(seq_len=1, dim=1, micro_batch=1, micro_batches=1, embeddings=(), layer=(), head=(), styles={})
    assert contracts.ModelSpec and job_of("--mesh.tp", "2").spec and reported() == []


MIXED = '''
from dataclasses import dataclass, replace
from titan.contracts import Technique, register

@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""

class Shared:
    """Not a technique by itself."""
    parity = False
    optional = True

    def plan(self, plan):
        return replace(plan, dim=plan.dim + 1)

@register
class First(Shared, Technique):
    """With the former names of a mixin."""
    name = "first"
    Config = Config
    phase = "shard"

@register
class Second(First):
    """With the present name, over the former one."""
    name = "second"
    Config = Config
    parity, preserves_numerics = False, True

    def spec(self, spec):
        return replace(super().spec(spec), dim=10 * super().spec(spec).dim)

@register
class Third(Second):
    """With the former name, over the present one."""
    name = "third"
    Config = Config

    def plan(self, plan):
        return replace(plan, dim=super().plan(plan).dim + 1000)
'''


def test_former_and_present_names_in_one_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.load_plugins()
    for name in ("_plugins", "_opened"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    (tmp_path / "mixed.py").write_text(MIXED)
    registry.load_plugins([tmp_path])
    found: list[Any] = [registry.find("technique", name) for name in ("first", "second", "third")]
    assert [plugin.search_toggle for plugin in found] == [True] * 3
    assert [plugin.preserves_numerics for plugin in found] == [False, True, True]
    spec = job_of("--model.dim", "128").spec
    assert [plugin(plugin.Config()).spec(spec).dim for plugin in found] == [129, 1290, 2290]
