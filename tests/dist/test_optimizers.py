"""AdamW, Muon, Lion, schedule-free, Adafactor, groups: one curve at any layout, resumes, skipped updates, learning."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.dist.test_nonfinite import inject_nan
from tests.jobs import LLAMA, MOE, SAVING, mesh
from tests.sweeps import sweep_but, swept_case
from titan.contracts import NamedParameter
from titan.plugins.optimizers.adamw import AdamW, Config
from titan.plugins.optimizers.muon import dealing
from titan.testing import make_plugin
from titan.testing.jobs import assert_same_curve, saved_tensors, train_job, whole
from titan.testing.ranks import RankError, run_ranks

GUESTS = str(Path(__file__).parents[1] / "guests")
CONSTANT = ("--lr_schedule.name", "constant", "--lr_schedule.warmup_steps", "2")
MUON, LION, ADAFACTOR = (("--optimizer.name", name) for name in ("muon", "lion", "adafactor"))
FREE = ("--optimizer.name", "schedule_free_adamw", *CONSTANT)
_VECTORS = '{match = ["table", "vector"], lr = 1e-3, weight_decay = 0.2}'
GROUPS = ("--optimizer.groups", f'[{_VECTORS}, {{match = "layers.*.attn.wq.weight", betas = [0.5, 0.9]}}]')
SIZE = ("--optimizer.lr", "1e-3")
MUON_GROUPS = (*MUON, *SIZE, "--optimizer.groups", '[{match = ["head", "layers.*.attn.wq.weight"], lr = 1e-3}]')
LAYOUTS = {
    "dp 2": (2, mesh(dp_shard=2)),
    "hsdp 2 x 2": (4, mesh(dp_replicate=2, dp_shard=2)),
    "tp 2, pp 2": (4, mesh(tp=2, pp=2)),
    "hsdp 2 x 2, tp 2": (8, mesh(dp_replicate=2, dp_shard=2, tp=2)),
    "dp 3": (3, [*mesh(dp_shard=3), "--train.global_batch_size", "12"]),
    "cp 2, zero 3": (2, [*mesh(cp=2), "--plugins.fsdp.zero_stage", "3"]),
}
OPTIMIZERS = {"muon": (*MUON, *SIZE), "adafactor": ADAFACTOR, "groups": GROUPS, "free": FREE, "lion": LION}
RESUMED = {**OPTIMIZERS, "muon with groups": MUON_GROUPS}
KEPT = ["muon: hsdp 2 x 2", "adafactor: dp 2"]
WIDEST = ("hsdp 2 x 2, tp 2", "tp 2, pp 2")
CASES = [*KEPT, *(f"{optimizer}: {layout}" for optimizer in ("muon", "adafactor") for layout in WIDEST)]
CASES += ["muon: dp 3", "adafactor: cp 2, zero 3", "groups: tp 2, pp 2", "free: hsdp 2 x 2, tp 2", "lion: tp 2, pp 2"]
"""Those that look at whole matrices or at rows and columns at four; those that update each number alone at one."""


SHAPES = ((6, 4), (3, 5), (1, 4), (7,), (5, 9), (9, 5), (8, 8), (4, 3, 5), (3, 6, 4), (2, 5, 7))
PLACES: tuple[tuple[Placement, Placement] | None, ...] = ((Shard(0), Shard(1)), (Replicate(), Shard(0)))
PLACES += ((Shard(0), Replicate()), (Shard(0), Shard(0)), None, (Shard(1), Shard(1)))
PLACES += ((Replicate(), Replicate()), (Shard(0), Shard(1)), (Shard(2), Shard(0)), (Shard(1), Shard(2)))


def _trained(name: str, mesh: DeviceMesh | None) -> list[Tensor]:
    generator, named = torch.Generator().manual_seed(0), []
    for shape, places in zip(SHAPES, PLACES, strict=True):
        tensor = torch.randn(shape, generator=generator)
        if mesh is not None and places is not None:
            tensor = distribute_tensor(tensor, mesh, places if len(shape) > 1 else [Replicate(), Shard(0)])
        named.append(NamedParameter(str(shape), nn.Parameter(tensor), "matrix" if len(shape) > 1 else "vector", True))
    optimizer = make_plugin(name, kind="optimizer", lr=0.1).build(named)
    for _ in range(3):
        for one in named:
            one.parameter.grad = torch.cos(one.parameter.detach())
        optimizer.step()
    return [whole(one.parameter.detach()) for one in named]


def _on_a_mesh(name: str) -> list[Tensor]:
    return _trained(name, init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner")))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_tensors_that_lie_on_a_mesh_in_every_way_are_updated_as_if_they_were_whole(name: str) -> None:
    expected = _trained(name, None)
    for found in run_ranks(_on_a_mesh, 6, name):
        for tensor, one in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, one, rtol=1e-5, atol=1e-6)


def _computed() -> list[torch.Size]:
    """Shapes of what this rank makes orthogonal in two updates."""
    mesh, named = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner")), []
    for number in range(12):
        places = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate())][number % 3]
        weight = distribute_tensor(torch.ones(8, 6), mesh, places)
        named.append(NamedParameter(str(number), nn.Parameter(weight), "matrix", True))
    stack = distribute_tensor(torch.ones(6, 4, 4), mesh, [Shard(0), Shard(0)])
    named.append(NamedParameter("stack", nn.Parameter(stack), "matrix", True))
    matrices, shapes = make_plugin("muon", kind="optimizer").build(named), []
    gather = dealing.Batch.gather

    def noted(self: dealing.Batch, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        wholes = gather(self, shards)
        shapes.extend(whole.shape for whole in wholes.values())
        return wholes

    dealing.Batch.gather = noted  # type: ignore[method-assign]
    matrices.step()
    DeviceMesh.size = None  # type: ignore[assignment,method-assign]  # who sends what to whom is found once
    matrices.step()
    return shapes


def test_each_matrix_is_computed_once_and_ranks_have_equal_work() -> None:
    """Twelve matrices on six ranks, and of a stack of six each rank's own element, which stays there."""
    assert run_ranks(_computed, 6) == [[(8, 6), (8, 6), (1, 4, 4)] * 2] * 6


@pytest.mark.parametrize("case", sweep_but(CASES, *KEPT))
def test_one_curve_at_any_layout(case: str, same_curve) -> None:
    optimizer, _, layout = case.partition(": ")
    ranks, words = LAYOUTS[layout]
    same = (*OPTIMIZERS[optimizer], *words[2:]) if layout == "dp 3" else OPTIMIZERS[optimizer]
    same_curve(ranks, [*OPTIMIZERS[optimizer], *words], same)


OF_EXPERTS = {
    "hsdp, ep 2": mesh(dp_replicate=2, dp_shard=2, ep=2),
    "dp 4": mesh(dp_shard=4),
    "dp 2, ep 2, tp 2": mesh(dp_shard=2, ep=2, tp=2),
}


@pytest.mark.parametrize("layout", sweep_but(OF_EXPERTS, "hsdp, ep 2"))
@pytest.mark.parametrize("optimizer", ["muon", swept_case("adafactor")])
def test_one_curve_of_experts(optimizer: str, layout: str, same_curve) -> None:
    own = ("--optimizer.name", optimizer)
    same_curve(4, [*own, *OF_EXPERTS[layout]], own, MOE)


def test_stacks_that_a_number_of_ranks_does_not_divide(same_curve) -> None:
    """Three ranks cut each of four experts: the pieces travel."""
    words = (*MUON, "--train.global_batch_size", "12")
    same_curve(3, [*words, *mesh(dp_shard=3)], words, MOE)


def _weights(folder: Path, step: int) -> dict[str, Tensor]:
    return saved_tensors(folder / "checkpoints" / f"step-{step:08}")


@pytest.mark.parametrize("optimizer", ["muon with groups", *map(swept_case, ("adafactor", "free", "groups"))])
def test_resumed_at_another_layout(optimizer: str, tmp_path: Path) -> None:
    words = (*RESUMED[optimizer], *SAVING)
    alone = train_job(tmp_path, 1, *words, name="alone")
    train_job(tmp_path, 4, *words, *mesh(dp_shard=2, tp=2), "--train.steps", "4")
    assert_same_curve(alone, train_job(tmp_path, 2, *words, *mesh(pp=2)))


@pytest.mark.parametrize("optimizer", ["muon", swept_case("free"), swept_case("adafactor")])
def test_resumed_at_the_same_layout_to_the_bit(optimizer: str, tmp_path: Path) -> None:
    words = (*OPTIMIZERS[optimizer], *SAVING, *mesh(dp_shard=2))
    train_job(tmp_path, 2, *words, name="whole")
    train_job(tmp_path, 2, *words, "--train.steps", "4", name="halves")
    train_job(tmp_path, 2, *words, name="halves")
    once, resumed = (_weights(tmp_path / name, 6) for name in ("whole", "halves"))
    state = [name for name in once if name.startswith(("model.", "optimizer."))]
    assert once.keys() == resumed.keys() and len(state) > 40
    assert all(torch.equal(once[name], resumed[name]) for name in state)


@pytest.mark.parametrize("optimizer", ["muon", swept_case("adafactor")])
def test_an_update_that_is_skipped_changes_nothing(optimizer: str, tmp_path: Path) -> None:
    """Of two ranks, one has a gradient of NaN in step 3: no rank takes part in the exchange of that update."""
    words = (*OPTIMIZERS[optimizer], *CONSTANT, "--train.non_finite", "skip", "--train.non_finite_limit", "5")
    saving = ("--checkpoint.enabled", "true", "--checkpoint.every", "1", "--checkpoint.keep_latest", "0")
    train_job(tmp_path, 2, *words, *inject_nan(3, rank=1), *saving, *mesh(dp_shard=2), "--train.steps", "3")
    before, after = (_weights(tmp_path / "run", step) for step in (2, 3))
    state = [name for name in before if name.startswith(("model.", "optimizer."))]
    assert len(state) > 20 and all(torch.equal(before[name], after[name]) for name in state)


def test_a_checkpoint_has_the_mean_and_a_run_goes_on_from_where_it_trains(tmp_path: Path) -> None:
    validating = ("--validation.every", "4", "--validation.name", "text", "--validation.path", str(tmp_path / "text"))
    run = train_job(tmp_path, 2, *FREE, *SAVING, *mesh(dp_shard=2), *validating, "--train.steps", "8")
    saved = _weights(tmp_path / "run", 8)
    for name, trained in run.weights.items():
        torch.testing.assert_close(saved[f"optimizer.{name}.y"], trained, rtol=0, atol=0)
        mean = (trained - 0.1 * saved[f"optimizer.{name}.z"]) / 0.9
        torch.testing.assert_close(saved[f"model.{name}"], mean, rtol=1e-5, atol=1e-6)
    assert any((saved[f"model.{name}"] - tensor).abs().max() > 1e-4 for name, tensor in run.weights.items())
    plain = train_job(tmp_path, 2, *FREE, *mesh(dp_shard=2), "--train.steps", "8", name="plain")
    assert all(torch.equal(tensor, run.weights[name]) for name, tensor in plain.weights.items())
    still = ("--checkpoint.init_from", str(tmp_path / "run"), "--optimizer.lr", "1e-30", "--train.steps", "4")
    begun = train_job(tmp_path, 1, *still, *validating, name="begun")
    assert begun.rows[4]["validation_loss"] == pytest.approx(run.rows[8]["validation_loss"], rel=1e-5)


def test_a_technique_that_hides_the_mean_is_refused(tmp_path: Path) -> None:
    lookahead = ("--plugins.path", GUESTS, "--plugins.lookahead.every", "2")
    with pytest.raises(RankError, match=r"technique 'lookahead'.*optimizer\(\) returned one without eval"):
        train_job(tmp_path, 1, *FREE, *lookahead)
    groups = ("--optimizer.groups", '[{match = "head", lr = 1e-3}]')
    train_job(tmp_path, 1, *groups, *lookahead, "--train.steps", "2", name="groups")


def test_a_technique_that_hides_itself_is_refused(tmp_path: Path) -> None:
    """The fact `wraps_optimizer` decides how gradients are clipped, and what goes with servers."""
    source = Path(GUESTS, "lookahead.py").read_text().replace("def facts(self)", "def _unstated(self)")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "hidden.py").write_text(source)
    words = ("--plugins.path", str(tmp_path / "plugins"), "--plugins.lookahead.every", "2")
    with pytest.raises(RankError, match=r'returned another one, but facts\(\) does not state "wraps_optimizer"'):
        train_job(tmp_path, 1, *words)


LEARNING = {
    "muon": ((*MUON, "--optimizer.lr", "1e-2"), 1.0),
    "lion": ((*LION, "--optimizer.lr", "1e-3"), 2.6),
    "adafactor": ((*ADAFACTOR, "--optimizer.lr", "5e-2"), 1.2),
    "free": ((*FREE, "--optimizer.lr", "1e-2"), 1.1),
}


@pytest.mark.parametrize("optimizer", sweep_but(LEARNING, "muon"))
def test_a_hundred_steps_learn(optimizer: str, tmp_path: Path) -> None:
    """From 5.5 nats per byte. Measured: muon 0.77, lion 2.41, adafactor 0.92, schedule-free 0.86 (AdamW 0.88)."""
    words, bound = LEARNING[optimizer]
    schedule = () if optimizer == "free" else CONSTANT
    run = train_job(tmp_path, 1, *words, *schedule, "--train.steps", "100", config=LLAMA)
    assert run.loss[0] > 5.4 and sum(run.loss[-10:]) / 10 < bound, run.loss[-10:]


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((6, 4), (3, 5), (1, 4), (7,), (5, 2))]


def _train(tensors: list[Tensor]) -> list[Tensor]:
    named = [NamedParameter(str(i), nn.Parameter(t), "matrix", i % 2 == 0) for i, t in enumerate(tensors)]
    optimizer = AdamW(Config(lr=0.1)).build(named)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    for _ in range(3):
        for n in named:
            n.parameter.grad = torch.cos(n.parameter.detach())
        optimizer.step()
    return [whole(n.parameter.detach()) for n in named]


def _split() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    a, b, empty_on_some, plain, both = _tensors()
    return _train(
        [
            distribute_tensor(a, mesh["outer"], [Shard(0)]),
            distribute_tensor(b, mesh["inner"], [Shard(1)]),
            distribute_tensor(empty_on_some, mesh["outer"], [Shard(0)]),
            plain,
            distribute_tensor(both, mesh, [Shard(0), Replicate()]),
        ]
    )


def test_mixed_parameters() -> None:
    expected = _train(_tensors())
    for results in run_ranks(_split, 4):
        torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-7)
