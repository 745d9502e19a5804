"""Pure bf16: the same rounding at any layout, near mixed precision, resumed to the bit, and skipped as a whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.commands import run_titan
from tests.dist.test_nonfinite import SKIP, inject_nan
from tests.jobs import LLAMA, MOE, SAVING, mesh, settings
from tests.sweeps import sweep_but, swept_case
from titan.contracts import NamedParameter
from titan.plugins.optimizers.adamw import AdamW
from titan.plugins.optimizers.adamw import Config as AdamWConfig
from titan.plugins.optimizers.schedule_free_adamw import Config as ScheduleFreeConfig
from titan.plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from titan.plugins.precision.bf16 import BFloat16, Config
from titan.testing.jobs import Outcome, differences, saved_tensors, train_job
from titan.testing.ranks import run_ranks

LOSS_RTOL, NORM_RTOL = 2e-3, 2e-2
"""As between layouts in mixed precision (docs/correctness.md)."""
SHAPES = {"matrix": (6, 20), "vector": (13,), "stack": (4, 3, 10), "uneven": (5, 7)}
EACH_STEP = (*SAVING, "--checkpoint.every", "1", "--checkpoint.keep_latest", "0")


def pure(rounding: str = "stochastic") -> tuple[str, ...]:
    return ("--plugins.bf16.pure", "true", "--plugins.bf16.rounding", rounding)


def _updated(weights: dict[str, Tensor], rounding: str) -> dict[str, Tensor]:
    """Weights and state after three updates by the same gradients, whole."""
    named = [NamedParameter(name, nn.Parameter(weight), "matrix", True) for name, weight in weights.items()]
    technique = BFloat16(Config(pure=True, rounding=rounding))  # type: ignore[arg-type]
    optimizer = technique.optimizer(AdamW(AdamWConfig(lr=0.01)).build(named), named)
    for step in range(3):
        technique.before_step(step + 1)
        for each in named:
            each.parameter.grad = torch.cos(each.parameter.detach().float() * 100).bfloat16()
        optimizer.step()
    slots = {
        f"{each.name}.{slot}": value
        for each in named
        for slot, value in {"w": each.parameter.detach(), **optimizer.state[each.parameter]}.items()
    }
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in slots.items()}


def _whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def _strided(mesh: DeviceMesh) -> Tensor:
    """A matrix as tensor parallelism along rows and FSDP on top of it leave it."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(_whole()["matrix"], mesh["inner"], [Shard(0)]))
    fully_shard(module, mesh=mesh["outer"])
    return module.weight.detach()


def _sharded(rounding: str) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    ways = [
        (flat, [Shard(0)]),  # FSDP
        (mesh, [Replicate(), Shard(0)]),  # HSDP
        (mesh, [Shard(0), Shard(1)]),  # FSDP over columns of tensor parallelism
        (flat, [Replicate()]),
    ]
    found = []
    for on, placements in ways:
        fits = {name: weight for name, weight in _whole().items() if weight.ndim > 1 or Shard(1) not in placements}
        found.append(_updated({n: distribute_tensor(w, on, placements) for n, w in fits.items()}, rounding))
    return [*found, _updated({"matrix": _strided(mesh)}, rounding)]


@pytest.mark.parametrize("rounding", ["stochastic", swept_case("kahan")])
def test_an_update_has_the_same_bits_however_weights_are_sharded(rounding: str) -> None:
    expected = _updated(_whole(), rounding)
    drawn = torch.cat([expected[f"{name}.w"].flatten() for name in SHAPES]).float()
    near = torch.cat([value.flatten() for value in (_updated(_whole(), "nearest")[f"{n}.w"] for n in SHAPES)]).float()
    assert (drawn != near).float().mean() > 0.05, "nothing was drawn"
    for ways in run_ranks(_sharded, 4, rounding):
        assert len(ways) == 5 and set(ways[0]) == set(expected) and "matrix.w" in ways[-1]
        for number, way in enumerate(ways):
            wrong = [name for name, value in way.items() if not torch.equal(value, expected[name])]
            assert not wrong, f"way {number}: {wrong}"


def assert_near(one: Outcome, other: Outcome) -> None:
    assert differences(one, other, {"loss": LOSS_RTOL, "grad_norm": NORM_RTOL}) == []


OF_ONE_SAMPLE = (*mesh(dp_shard=2), "--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage")
LAYOUTS = {
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "tp 2": (2, mesh(tp=2)),
    "pp 2, tied": (2, [*mesh(pp=2), "--model.tied", "true"]),
    "hsdp 2x2": (4, mesh(dp_replicate=2, dp_shard=2)),
    "cp 2": (2, mesh(cp=2)),
    "experts, ep 2, tp 2": (4, mesh(dp_shard=2, ep=2, tp=2)),
    "four micro batches, zero 1": (2, [*OF_ONE_SAMPLE, "1"]),
    "four micro batches, zero 2": (2, [*OF_ONE_SAMPLE, "2"]),
    "four micro batches, zero 3": (2, [*OF_ONE_SAMPLE, "3"]),
}


@pytest.mark.parametrize("layout", sweep_but(LAYOUTS, "dp_shard 2", "four micro batches, zero 2"))
def test_layouts(layout: str, one_rank, tmp_path: Path) -> None:
    """Replicas of tensor parallelism, of HSDP and of a tied table have the same bits, which `train_job` asserts.

    Micro batches are summed in fp32 by stage 1, and shards in bf16 by 2 and 3, within the same bounds.
    """
    ranks, words = LAYOUTS[layout]
    config = MOE if "experts" in layout else LLAMA
    one = one_rank(*pure(), *settings(words, "--model.tied"), config=config)
    assert_near(one, train_job(tmp_path, ranks, *pure(), *words, config=config))


def test_all_but_counts_is_bf16_and_initial_values_are_those_of_fp32_rounded(tmp_path: Path) -> None:
    still = ("--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0", *EACH_STEP, "--train.steps", "1")
    train_job(tmp_path, 1, *still, config=MOE, name="wide")
    train_job(tmp_path, 1, *still, *pure("kahan"), config=MOE, name="narrow")
    wide, narrow = (saved_tensors(tmp_path / name / "checkpoints" / "step-00000001") for name in ("wide", "narrow"))
    buffers = {name for name in wide if name.startswith("model.") and f"optimizer.{name[6:]}.step" not in wide}
    assert buffers, "no bias of a router"
    for name, tensor in narrow.items():
        if name.startswith("model."):
            kept = name in buffers
            assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
            assert kept or torch.equal(tensor, wide[name].bfloat16()), name
        if name.startswith("optimizer.") and not name.endswith(".step"):
            assert tensor.dtype == torch.bfloat16, name
    assert {name.rpartition(".")[2] for name in narrow if name.startswith("optimizer.")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "compensation",
    }


@pytest.mark.parametrize(
    ("rounding", "words", "ranks"), [("stochastic", [], 1), swept_case(("kahan", mesh(dp_shard=2, tp=2), 4))]
)
def test_resumed_to_the_bit(rounding: str, words: list[str], ranks: int, tmp_path: Path) -> None:
    same = (*pure(rounding), *SAVING, *words)
    train_job(tmp_path, ranks, *same, name="whole")
    train_job(tmp_path, ranks, *same, "--train.steps", "5", name="pieces")
    train_job(tmp_path, ranks, *same, name="pieces")
    ours, theirs = (saved_tensors(tmp_path / name / "checkpoints" / "step-00000006") for name in ("whole", "pieces"))
    assert ours.keys() == theirs.keys() and any(name.startswith("optimizer.") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_resumed_on_another_layout_and_a_skipped_update_changes_nothing(tmp_path: Path) -> None:
    """What one rank saves, two load to the bit: a step that is skipped saves it again."""
    same = (*pure("kahan"), *EACH_STEP, *SKIP)
    train_job(tmp_path, 1, *same, "--train.steps", "2")
    train_job(tmp_path, 2, *same, *mesh(dp_shard=2), *inject_nan(3), "--train.steps", "3")
    before, after = (saved_tensors(tmp_path / "run" / "checkpoints" / f"step-0000000{step}") for step in (2, 3))
    assert any(name.endswith("compensation") for name in before)
    kept = [name for name in before if not name.startswith("rest.")]
    assert [name for name in kept if not torch.equal(before[name], after[name])] == []


def test_weights_of_fp32_and_back_and_for_others(tmp_path: Path) -> None:
    """An fp32 run's checkpoint starts a pure one and is resumed by one that rounds to nearest, and the other way."""
    train_job(tmp_path, 1, *SAVING, "--train.steps", "4", name="fp32")
    first = str(tmp_path / "fp32" / "checkpoints" / "step-00000004")
    still = ("--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0", "--checkpoint.init_from")
    rounded = train_job(tmp_path, 1, *pure(), *SAVING, *still, first, "--train.steps", "4", name="pure")
    back = train_job(tmp_path, 1, *still, str(tmp_path / "pure"), "--train.steps", "1", name="back")
    wide = saved_tensors(Path(first))
    for name, weight in back.weights.items():
        assert torch.equal(weight, rounded.weights[name]), name
        assert torch.equal(weight, wide[f"model.{name}"].bfloat16().float()), name

    assert len(train_job(tmp_path, 1, *pure("nearest"), *SAVING, "--train.steps", "8", name="fp32").rows) == 8
    held = saved_tensors(tmp_path / "fp32" / "checkpoints" / "step-00000008")
    assert {t.dtype for n, t in held.items() if n.startswith(("model.", "optimizer.")) and t.ndim} == {torch.bfloat16}
    assert len(train_job(tmp_path, 1, *SAVING, "--train.steps", "10", name="fp32").rows) == 10
    why = r"is AdamWRounded\w+ \(plugins\.bf16 = on, the checkpoint has unset\); restore the old values"
    with pytest.raises(Exception, match=f"holds optimizer state of AdamW, but this run's optimizer {why}"):
        train_job(tmp_path, 1, *pure(), *SAVING, "--train.steps", "12", name="fp32")

    words = ("--from", str(tmp_path / "pure"), "--output", str(tmp_path / "hf"), "--format", "hf")
    done = run_titan(["convert", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    given = train_job(tmp_path, 1, *still, str(tmp_path / "hf"), "--train.steps", "1", name="given", config=LLAMA)
    assert all(torch.equal(weight, rounded.weights[name]) for name, weight in given.weights.items())


@pytest.mark.parametrize("optimizer", [swept_case("adafactor"), "adamw_8bit"])
def test_float32_state_stays_where_a_resumed_run_turns_pure_on_or_off(optimizer: str, tmp_path: Path) -> None:
    """Row and column sums, and means of few numbers; means that are kept as codes begin at 4,096 numbers."""
    same = (*SAVING, "--optimizer.name", optimizer, "--model.dim", "72")
    mixed = train_job(tmp_path, 1, *same, "--train.steps", "9", name="mixed").loss
    for steps, words in enumerate([(), pure("nearest"), ()], 1):
        found = train_job(tmp_path, 1, *same, *words, "--train.steps", str(3 * steps), name="run")
        held = saved_tensors(tmp_path / "run" / "checkpoints" / f"step-{3 * steps:08}")
        slots = {n: t for n, t in held.items() if n.startswith("optimizer.") and t.ndim}
        assert len(slots) > 20 and {t.dtype for t in slots.values()} == {torch.float32}
        assert all(t.isfinite().all() for t in slots.values())
    assert found.loss == pytest.approx(mixed, rel=10 * LOSS_RTOL)


def test_an_average_of_pure_weights_is_fp32(tmp_path: Path) -> None:
    train_job(tmp_path, 2, *pure(), *EACH_STEP, *mesh(dp_shard=2), "--plugins.ema.decay", "0.5", "--train.steps", "3")
    second, third = (saved_tensors(tmp_path / "run" / "checkpoints" / f"step-0000000{step}") for step in (2, 3))
    for name, average in third.items():
        if name.startswith(start := "rest.techniques.ema.weights."):
            weight, decay = third[name.replace(start, "model.")].float(), 4 / 13
            torch.testing.assert_close(average, second[name] * decay + weight * (1 - decay), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_an_optimizer_with_other_weights_for_evaluation_keeps_them(rounding: str) -> None:
    named = [NamedParameter(name, nn.Parameter(weight), "matrix", True) for name, weight in _whole().items()]
    technique, inner = BFloat16(Config(pure=True, rounding=rounding)), ScheduleFreeAdamW(ScheduleFreeConfig(lr=0.1))
    optimizer: Any = technique.optimizer(inner.build(named), named)
    for each in named:
        each.parameter.grad = torch.ones_like(each.parameter)
    for step in range(3):
        technique.before_step(step + 1)
        optimizer.step()
    trained = [each.parameter.detach().clone() for each in named]
    optimizer.eval()
    assert not any(torch.equal(each.parameter, before) for each, before in zip(named, trained, strict=True))
    optimizer.train()
    assert all(torch.equal(each.parameter, before) for each, before in zip(named, trained, strict=True))
