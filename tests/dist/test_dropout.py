"""Dropout at any layout: the curve of one process, since each random number is a function of where it is used."""

from pathlib import Path

import pytest

from tests.dist.test_parity import COMPILED
from tests.jobs import FOUR_LAYERS, GPT, SAVING, mesh, settings
from tests.sweeps import but_sweep
from titan.testing.jobs import assert_same_curve, train_job, write_text

DROPOUT = ("--model.dropout", "0.2")
FULL, SELECTIVE = (("--plugins.activation_checkpoint.mode", mode) for mode in ("full", "selective"))
SCHEDULE = "--plugins.pipeline.schedule"

LAYOUTS = {
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences": (2, [*mesh(tp=2), "--plugins.tensor.sequence_parallel", "false"]),
    "pp 2": (2, mesh(pp=2)),
    "pp 2, ZBV": (2, [*mesh(pp=2), *FOUR_LAYERS, SCHEDULE, "ZBVZeroBubble"]),
    "cp 2, ring": (2, mesh(cp=2)),
    "cp 2, gather": (2, [*mesh(cp=2), "--plugins.context.method", "gather"]),
    "cp 2, ulysses": (2, [*mesh(cp=2), "--plugins.context.method", "ulysses"]),
    "recompute full": (1, [*FULL]),
    "recompute selective": (1, [*SELECTIVE]),
    "recompute full, pp 2, interleaved": (2, [*mesh(pp=2), *FOUR_LAYERS, *FULL, SCHEDULE, "Interleaved1F1B"]),
    "compiled, recompute selective, tp 2": (2, [*mesh(tp=2), *COMPILED, *SELECTIVE]),
    "accumulation": (1, ["--train.micro_batch_size", "2"]),
    "cp 2, tp 2": (4, mesh(cp=2, tp=2)),
    "dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2)),
}
SWEPT = ("compiled, recompute selective, tp 2", "tp 2, whole sequences", "cp 2, ulysses")
SWEPT += ("cp 2, gather", "recompute full, pp 2, interleaved", "cp 2, tp 2", "dp_shard 2, tp 2, pp 2")


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_the_curve_of_one_process(layout: str, same_curve) -> None:
    ranks, words = LAYOUTS[layout]
    same_curve(ranks, [*DROPOUT, *words], (*DROPOUT, *settings(words, "--model.n_layers")), GPT)


def test_resumed_on_other_layouts_in_other_micro_batches(one_rank, tmp_path: Path) -> None:
    words = (*DROPOUT, *SAVING)
    train_job(tmp_path, 2, *words, *mesh(dp_shard=2), "--train.steps", "3", config=GPT)
    train_job(tmp_path, 2, *words, *mesh(tp=2), "--train.micro_batch_size", "4", "--train.steps", "5", config=GPT)
    assert_same_curve(one_rank(*DROPOUT, config=GPT), train_job(tmp_path, 2, *words, *mesh(pp=2), config=GPT))


def test_each_step_draws_anew_and_validation_draws_nothing(tmp_path: Path) -> None:
    """One text again and again, which nothing is learned from: what moves the loss is the masks."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("again and again!")  # 16 bytes and an end: one sample
    write_text(tmp_path / "other")
    words = ["--optimizer.lr", "1e-30", "--validation.every", "1", "--validation.name", "text", "--validation.path"]
    words += [str(tmp_path / "other"), "--train.steps", "6"]
    plain = train_job(tmp_path, 1, *words, config=GPT, name="plain")
    noisy = train_job(tmp_path, 1, *words, *DROPOUT, config=GPT, name="noisy")
    losses, steady = ([row["loss"] for row in outcome.rows.values()] for outcome in (noisy, plain))
    assert len(set(losses)) == 6 and len(set(steady)) == 1
    assert all(abs(loss - steady[0]) < 0.1 for loss in losses)
    assert {row["validation_loss"] for outcome in (plain, noisy) for row in outcome.rows.values()} == {
        plain.rows[1]["validation_loss"]
    }
