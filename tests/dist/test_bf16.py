"""bfloat16 has one meaning at every layout: the curve is that of bf16 on one rank, and not that of fp32."""

from pathlib import Path

import pytest
import torch

from tests.jobs import SAVING, THREE_STEPS, mesh
from tests.sweeps import swept_case
from titan.testing.jobs import Outcome, saved_tensors, train_job

BF16 = ("--plugins.bf16.enabled", "true")
LAYOUTS = [
    (2, {"dp_shard": 2}),
    swept_case((2, {"dp_replicate": 2})),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
    swept_case((8, {"dp_shard": 2, "tp": 2, "pp": 2})),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_job(tmp_path_factory.mktemp("one"), 1, *BF16, *THREE_STEPS)


def assert_near(ours: Outcome, theirs: Outcome) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=2e-3)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)


@pytest.mark.parametrize(("world_size", "degrees"), LAYOUTS, ids=str)
def test_layouts(world_size: int, degrees: dict[str, int], one_rank: Outcome, tmp_path: Path) -> None:
    assert_near(train_job(tmp_path, world_size, *BF16, *THREE_STEPS, *mesh(**degrees)), one_rank)


def test_it_is_on_at_degree_one(one_rank: Outcome, tmp_path: Path) -> None:
    fp32 = train_job(tmp_path, 1, *THREE_STEPS)
    assert fp32.loss != one_rank.loss and fp32.loss == pytest.approx(one_rank.loss, rel=1e-2)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--model.tied", "true"),
        ("--train.micro_batch_size", "1"),
        ("--plugins.activation_checkpoint.mode", "full"),
        ("--plugins.activation_checkpoint.mode", "full", "--plugins.compile.backend", "aot_eager"),
    ],
    ids=["untied", "tied", "micro batches", "recomputed", "compiled, recomputed"],
)
def test_a_rank_alone_casts_to_the_bits_of_a_gather(words: tuple[str, ...], tmp_path: Path) -> None:
    """FSDP2 gathers on one rank too with zero_stage = 3, from nobody."""
    settings = (*BF16, *SAVING, "--train.steps", "3", *words, "--plugins.fsdp.zero_stage")
    cast, gathered = (train_job(tmp_path / stage, 1, *settings, stage) for stage in ("2", "3"))
    assert (cast.loss, cast.grad_norm) == (gathered.loss, gathered.grad_norm) and cast.loss
    step = Path("run", "checkpoints", "step-00000003")
    ours, theirs = (saved_tensors(tmp_path / stage / step) for stage in ("2", "3"))
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_and_optimizer_state_stay_float32(tmp_path: Path) -> None:
    train_job(tmp_path, 1, *BF16, *SAVING, "--train.steps", "1")
    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000001")
    kept = [tensor.dtype for name, tensor in saved.items() if name.startswith(("model.", "optimizer."))]
    assert set(kept) == {torch.float32}


@pytest.mark.parametrize("stage", ["1", "2", swept_case("3")])
def test_accumulation_over_micro_batches_and_zero_stages(stage: str, one_rank: Outcome, tmp_path: Path) -> None:
    """Sums over micro batches stay fp32 at each stage: eight of one sample are one of eight up to bf16 rounding."""
    words = ("--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", stage)
    assert_near(train_job(tmp_path, 2, *BF16, *THREE_STEPS, *words), one_rank)
