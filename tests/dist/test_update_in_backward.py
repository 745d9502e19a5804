"""Updates within the backward pass: the bits of updates after it where ranks shard or copy; and what is refused."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import assert_same
from tests.jobs import LLAMA, MOE, SAVING, mesh, run_with_state
from tests.sweeps import but_sweep
from titan.cli import main
from titan.testing.jobs import assert_same_curve, train_job
from titan.testing.ranks import RankError

WITHIN = ("--plugins.update_in_backward.enabled", "true")
UNCLIPPED = ("--train.grad_clip", "0")
OFFLOADED = ("--plugins.offload.optimizer", "true", "--plugins.offload.buffer_mib", "0.02")
BF16 = ("--plugins.bf16.enabled", "true")
LAYOUTS = {
    "plain": (1, []),
    "fsdp": (1, [*BF16]),
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "hsdp 2x2, recompute": (4, [*mesh(dp_replicate=2, dp_shard=2), "--plugins.activation_checkpoint.mode", "full"]),
    "ddp 2, tied, sgd": (2, [*mesh(dp_replicate=2), "--model.tied", "true", "--optimizer.name", "sgd"]),
    "cp 2, zero 3": (2, [*mesh(cp=2), "--plugins.fsdp.zero_stage", "3"]),
    "offloaded, pure": (2, [*mesh(dp_shard=2), *OFFLOADED, *BF16, "--plugins.bf16.pure", "true"]),
}


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "fsdp", "dp_shard 2", "cp 2, zero 3", "offloaded, pure"))
def test_the_bits_are_those_of_updates_after_the_backward_pass(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    after = train_job(tmp_path, ranks, *UNCLIPPED, *words, name="after", run=run_with_state)
    within = train_job(tmp_path, ranks, *UNCLIPPED, *words, *WITHIN, name="within", run=run_with_state)
    assert within.loss == after.loss and within.grad_norm == pytest.approx(after.grad_norm, rel=1e-6)
    assert_same(within.weights, after.weights)


def test_experts_and_one_rank(same_curve) -> None:
    same_curve(2, [*UNCLIPPED, *WITHIN, *mesh(dp_shard=2, ep=2)], UNCLIPPED, MOE)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    saving = (*SAVING, *UNCLIPPED, *WITHIN)
    whole = train_job(tmp_path, 2, *saving, *mesh(dp_shard=2), name="whole")
    train_job(tmp_path, 2, *saving, *mesh(dp_shard=2), "--train.steps", "4", name="halves")
    assert_same_curve(whole, train_job(tmp_path, 1, *saving, name="halves"))


REFUSED = {
    "train.grad_clip = 1 scales gradients": ("--train.grad_clip", "1"),
    'train.non_finite = "skip" is decided': ("--train.non_finite", "skip"),
    "a step adds up 4 micro batches": ("--train.micro_batch_size", "2"),
    "[plugins.tensor] changes gradients": mesh(tp=2),
    "[plugins.pipeline] changes gradients": mesh(pp=2),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_needs_all_gradients_is_refused(sentence: str, capsys: pytest.CaptureFixture) -> None:
    words = ["config", "--config", str(LLAMA), "--train.grad_clip", "0", *WITHIN]
    assert main([*words, "--data.path", "text"]) == 0
    one_rank = ["--plugins.pipeline.schedule", "1F1B", "--plugins.tensor.sequence_parallel", "true"]
    assert main([*words, *one_rank, "--data.path", "text"]) == 0, "nothing is split"
    capsys.readouterr()
    assert main([*words, *REFUSED[sentence], "--data.path", "text"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"gave loss nan .* its update was made all the same; .*update_in_backward"):
        train_job(tmp_path, 1, *SAVING, *UNCLIPPED, *WITHIN, "--optimizer.lr", "1e30", "--metrics.every", "6")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_dry_run_needs_less_where_gradients_are_most_of_the_memory(capsys: pytest.CaptureFixture) -> None:
    short = ("--data.seq_len", "4", "--train.global_batch_size", "1", "--model.n_layers", "16", "--data.path", "text")
    words = ["plan", "--config", str(LLAMA), "--dry-run", "--json", "--train.grad_clip", "0", *short]
    peaks = []
    for more in ((), WITHIN):
        assert main([*words, *more]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[1] < 0.85 * peaks[0]
