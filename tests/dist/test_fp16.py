"""float16 with a loss scale: one meaning at every layout, true gradients, and a scale that all ranks move alike."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.dist.test_nonfinite import inject_nan
from tests.jobs import FOUR_LAYERS, MOE, SAVING, mesh
from tests.signals import TEN
from tests.sweeps import sweep_but, swept_case
from titan.testing.jobs import Outcome, differences, one_rank, read_rows, saved_tensors, train_job
from titan.testing.ranks import RankError

FP16 = ("--plugins.fp16.enabled", "true")
LOSS_RTOL, NORM_RTOL = 2e-5, 1e-3
RECOMPUTE = ("--plugins.activation_checkpoint.mode", "full")
COMPILED = ("--plugins.compile.backend", "aot_eager")
LAYOUTS = {
    "dp 2": (2, mesh(dp_shard=2)),
    "replicas 2": (2, mesh(dp_replicate=2)),
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "cp 2": (2, mesh(cp=2)),
    "accumulation, zero 3": (2, ["--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", "3"]),
    "compiled, recompute": (1, [*COMPILED, *RECOMPUTE]),
    "dp 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2)),
}


def assert_near(one: Outcome, other: Outcome) -> None:
    assert differences(one, other, {"loss": LOSS_RTOL, "grad_norm": NORM_RTOL}) == []


@pytest.mark.parametrize("layout", sweep_but(LAYOUTS, "dp 2", "tp 2", "pp 2"))
def test_layouts(layout: str, tmp_path: Path) -> None:
    world_size, words = LAYOUTS[layout]
    assert_near(one_rank(*FP16), train_job(tmp_path, world_size, *FP16, *words))


def test_losses_and_norms_are_those_of_float32_whatever_the_scale(tmp_path: Path) -> None:
    fp16, fp32 = one_rank(*FP16), one_rank()
    assert_near(fp32, fp16)
    assert any(fp32.rows[step]["loss"] != fp16.rows[step]["loss"] for step in fp32.rows)
    small = train_job(tmp_path, 1, *FP16, "--plugins.fp16.init_scale", "64")
    assert_near(fp32, small)
    assert [outcome.rows[6]["loss_scale"] for outcome in (fp16, small)] == [65536, 64]


def test_weights_and_optimizer_state_stay_float32(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *FP16, *SAVING, "--train.steps", "1")
    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000001")
    kept = [str(tensor.dtype) for name, tensor in saved.items() if name.startswith(("model.", "optimizer."))]
    assert set(kept) == {"torch.float32"}


SCALED = (*FP16, "--plugins.fp16.init_scale", "1024", "--plugins.fp16.growth_interval", "3", "--train.steps", "8")
SPOILT = (2, 5)
SCALES = [1024, 512, 512, 512, 256, 256, 256, 512]
"""After each step: halved by those that are spoilt, doubled three updates after it last changed."""


def scales(outcome: Outcome) -> list[float]:
    return [outcome.rows[step]["loss_scale"] for step in sorted(outcome.rows)]


@pytest.mark.parametrize("layout", sweep_but(("dp 2", "pp 2", "tp 2", "dp 2, tp 2, pp 2"), "dp 2", "pp 2"))
def test_an_overflow_on_one_rank_is_skipped_by_all(layout: str, tmp_path: Path) -> None:
    """By default, where other runs end. `train_job` compares the weights of replicas."""
    one, (world_size, words) = one_rank(*SCALED, *inject_nan(*SPOILT)), LAYOUTS[layout]
    many = train_job(tmp_path, world_size, *words, *SCALED, *inject_nan(*SPOILT, rank=world_size - 1))
    for outcome in (one, many):
        assert scales(outcome) == SCALES
        assert [step for step, row in outcome.rows.items() if row["grad_norm"] is None] == list(SPOILT)
        assert outcome.rows[8]["skipped_updates"] == len(SPOILT)
    assert_near(one, many)


def test_a_scale_that_overflows_falls_until_it_fits(tmp_path: Path) -> None:
    outcome = train_job(tmp_path, 2, *mesh(pp=2), *FP16, "--plugins.fp16.init_scale", str(2.0**24), *TEN)
    row, first = outcome.rows[10], one_rank().rows[1]["loss"]
    assert 0 < row["skipped_updates"] < 10 and row["grad_norm"] is not None
    assert row["loss_scale"] == 2.0 ** (24 - row["skipped_updates"])
    assert outcome.rows[1]["loss"] == pytest.approx(first, rel=LOSS_RTOL) and row["loss"] < first


@pytest.mark.parametrize("what", [swept_case("gradient"), "loss"])
def test_at_the_least_scale_a_step_that_is_not_finite_ends_the_run(what: str, tmp_path: Path) -> None:
    words = (*FP16, "--plugins.fp16.init_scale", "4", *inject_nan(3, 4, 6, what=what, rank=1))
    said = r"step 6 gave loss .* its update was skipped; \[plugins.fp16\] scales the loss, by 1 at the least"
    with pytest.raises(RankError, match=said):
        train_job(tmp_path, 2, *mesh(pp=2), *words)
    rows = read_rows(tmp_path / "run")
    assert [rows[step]["loss_scale"] for step in range(1, 7)] == [4, 4, 2, 1, 1, 1]


class Resume(NamedTuple):
    """A run of four steps, the second spoilt on rank 1, that another goes on with, and the scales of both."""

    before: tuple[int, list[str]]
    after: tuple[int, list[str]]
    scales: list[float]


WORKERS = [*mesh(worker=2), "--plugins.local_steps.every", "5"]
ONCE = [1024, 512, 512, 512, 1024, 1024, 1024, 2048]
OF_WORKERS = [1024, 768, 1280, 1280, 1536, 2560, 2560, 3072]
"""The mean of `ONCE` and of those of a worker that is never spoilt: doubled by every third step."""

RESUMES = {
    "dp 2, then pp 2": Resume((2, mesh(dp_shard=2)), (2, mesh(pp=2)), ONCE),
    "workers": Resume((2, WORKERS), (2, WORKERS), OF_WORKERS),
    # 1,280 is no power of 2, and updates since the scales changed are 1.5 on average: 1,024 and 1.
    "workers, then one": Resume((2, WORKERS), (1, []), [*OF_WORKERS[:4], 1024, 2048, 2048, 2048]),
}


@pytest.mark.parametrize("case", sweep_but(RESUMES, "dp 2, then pp 2"))
def test_a_resumed_run_goes_on_with_its_scale(case: str, tmp_path: Path) -> None:
    spoil = (*SAVING, *SCALED, *inject_nan(2, rank=1))
    before, after, expected = RESUMES[case]
    train_job(tmp_path, before[0], *before[1], *spoil, "--train.steps", "4")
    assert scales(train_job(tmp_path, after[0], *after[1], *spoil)) == expected


BALANCE = ("--model.balance", "sequence", "--model.balance_rate", "3")
SIDE = (*FOUR_LAYERS, *BALANCE, "--train.steps", "2", "--train.grad_clip", "0")
PLAIN = ("--optimizer.name", "sgd", "--optimizer.lr", "0.1")
SIDES = {"one": (1, []), **{name: LAYOUTS[name] for name in ("pp 2", "tp 2", "compiled, recompute")}}


@pytest.mark.parametrize("layout", sweep_but(SIDES, "pp 2"))
def test_a_side_loss_is_scaled_as_the_objective_is(layout: str, tmp_path: Path) -> None:
    """Its gradient, here most of what a router gets, is that of float32: the routers move alike."""
    start = one_rank(*SIDE, *PLAIN, "--optimizer.lr", "1e-12", config=MOE)
    fp32 = one_rank(*SIDE, *PLAIN, config=MOE)
    world_size, words = SIDES[layout]
    fp16 = train_job(tmp_path, world_size, *FP16, *SIDE, *PLAIN, *words, config=MOE)
    routers = [name for name in fp32.weights if name.endswith("router.weight")]
    assert len(routers) == 3
    for name in routers:
        moved, wanted = (outcome.weights[name] - start.weights[name] for outcome in (fp16, fp32))
        assert (moved - wanted).norm() < 1e-2 * wanted.norm(), name
    assert_near(fp32, fp16)
