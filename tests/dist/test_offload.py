"""Offloading changes no bit: loss, gradient norm, weights and checkpoints are those of a run without."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from tests.dist.test_validation import validation
from tests.jobs import FOUR_LAYERS, SAVING, mesh
from tests.sweeps import but_sweep, sweep_but
from titan.testing.jobs import Outcome, assert_same_curve, saved_tensors, train_job, trained

OPTIMIZER = ("--plugins.offload.optimizer", "true", "--plugins.offload.buffer_mib", "0.02")  # several buckets
ACTIVATIONS = ("--plugins.offload.optimizer", "false", "--plugins.offload.activations", "true")
COMPILED = ("--plugins.compile.backend", "aot_eager")
OFF_AND_ON = ((), ACTIVATIONS)
SHORT = (*SAVING, "--train.steps", "4")
LAYOUTS = {
    "one rank": (1, []),
    "dp 2": (2, mesh(dp_shard=2)),
    "ddp 2": (2, mesh(dp_replicate=2)),
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
}


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm) and ours.loss
    assert [name for name, weight in ours.weights.items() if not torch.equal(weight, theirs.weights[name])] == []


def assert_saved_equal(ours: Outcome, theirs: Outcome, step: int) -> None:
    one, other = (saved_tensors(run.folder / "checkpoints" / f"step-{step:08}") for run in (ours, theirs))
    assert one.keys() == other.keys() and any(name.startswith("optimizer.") for name in one)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_the_same_run(folder: Path, ranks: int, words: Sequence[str], offloaded: Sequence[str]) -> None:
    plain, other = (train_job(folder, ranks, *words, *SHORT, *more, name=str(len(more))) for more in ((), offloaded))
    assert_equal(plain, other)
    assert_saved_equal(plain, other, 4)


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "ddp 2", "tp 2", "pp 2"))
def test_state_of_the_optimizer(layout: str, tmp_path: Path) -> None:
    assert_the_same_run(tmp_path, *LAYOUTS[layout], OPTIMIZER)


MODES = {
    "one rank": (1, []),
    "full": (1, ["--plugins.activation_checkpoint.mode", "full"]),
    "compiled, selective": (1, [*COMPILED, "--plugins.activation_checkpoint.mode", "selective"]),
    "zero 3": (2, [*mesh(dp_shard=2), "--plugins.fsdp.zero_stage", "3", "--train.micro_batch_size", "2"]),
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "split backward": (2, [*mesh(pp=2), *FOUR_LAYERS, "--plugins.pipeline.schedule", "InterleavedZeroBubble"]),
}


@pytest.mark.parametrize("mode", but_sweep(MODES, "full", "compiled, selective", "tp 2", "zero 3", "split backward"))
def test_what_layers_save(mode: str, tmp_path: Path) -> None:
    ranks, words = MODES[mode]
    runs = [train_job(tmp_path, ranks, *words, "--train.steps", "3", *more, name=f"{len(more)}") for more in OFF_AND_ON]
    assert_equal(*runs)


PARAMETERS = ("--plugins.fsdp.enabled", "true", "--plugins.bf16.enabled", "true", "--model.dim", "48")
SHARDED = {
    "one rank": (1, []),
    "dp 2, zero 3": (2, [*mesh(dp_shard=2), "--plugins.fsdp.zero_stage", "3", "--train.micro_batch_size", "2"]),
    "hsdp": (4, mesh(dp_shard=2, dp_replicate=2)),
    "pp 2": (2, mesh(pp=2)),
}


@pytest.mark.parametrize("layout", but_sweep(SHARDED, "hsdp", "pp 2"))
def test_weights(layout: str, tmp_path: Path) -> None:
    ranks, words = SHARDED[layout]
    assert_the_same_run(tmp_path, ranks, [*words, *PARAMETERS], ("--plugins.offload.parameters", "true"))


def _policies(folder: str, words: list[str], config: str) -> dict[str, torch.Tensor]:
    """On one rank: by unit, whether its weights are on the host."""
    run = trained(folder, words, config)
    units = {name: module for part in run.parts for name, module in part.module.named_modules()}
    groups = {n: u._get_fsdp_state()._fsdp_param_group for n, u in units.items() if isinstance(u, FSDPModule)}
    return {n: torch.tensor(isinstance(g.offload_policy, CPUOffloadPolicy)) for n, g in groups.items() if g is not None}


def test_the_units_of_weights_on_the_host_have_the_policy(tmp_path: Path) -> None:
    words = ("--plugins.offload.parameters", "true", "--plugins.fsdp.enabled", "true", "--train.steps", "1")
    found = train_job(tmp_path, 1, *words, run=_policies).weights
    assert len(found) >= 5 and all(found.values())


SWITCHED = list(product((True, False), (True, False)))


@pytest.mark.parametrize(("before", "after"), sweep_but(SWITCHED, (True, False), (True, True)))
def test_resumed_bit_for_bit_with_offloading_and_without(before: bool, after: bool, tmp_path: Path) -> None:
    whole = train_job(tmp_path, 1, *SAVING, name="whole")
    train_job(tmp_path, 1, *SHORT, *(OPTIMIZER if before else ()), name="pieces")
    assert_saved_equal(whole, train_job(tmp_path, 1, *SAVING, *(OPTIMIZER if after else ()), name="pieces"), 6)


def test_resumed_at_another_layout(tmp_path: Path) -> None:
    whole = train_job(tmp_path, 1, name="whole")
    train_job(tmp_path, 2, *mesh(dp_shard=2), *SHORT, *OPTIMIZER, name="pieces")
    assert_same_curve(whole, train_job(tmp_path, 2, *mesh(tp=2), *SAVING, *OPTIMIZER, name="pieces"))


def test_another_optimizer(tmp_path: Path) -> None:
    sgd = ("--optimizer.name", "sgd", "--optimizer.momentum", "0.9", "--train.steps", "4")
    assert_equal(*(train_job(tmp_path, 1, *sgd, *more, name=f"sgd {len(more)}") for more in ((), OPTIMIZER)))


SWITCHING = ("--optimizer.name", "schedule_free_adamw", "--lr_schedule.name", "constant")
HOSTED = {"optimizer": OPTIMIZER, "parameters": (*PARAMETERS[:2], "--plugins.offload.parameters", "true")}


@pytest.mark.parametrize("what", but_sweep(HOSTED, "parameters"))
def test_an_optimizer_with_other_weights_for_evaluation(what: str, tmp_path: Path) -> None:
    """Validated, saved, and resumed."""
    words, given = (*SWITCHING, *validation(tmp_path, every=2), *SAVING, *PARAMETERS[:2]), HOSTED[what]
    plain = train_job(tmp_path, 1, *words, "--train.steps", "6", name="plain")
    train_job(tmp_path, 1, *words, *given, "--train.steps", "4", name="offloaded")
    offloaded = train_job(tmp_path, 1, *words, *given, "--train.steps", "6", name="offloaded")
    assert_equal(plain, offloaded)
    assert_saved_equal(plain, offloaded, 6)
    losses = [[row.get("validation_loss") for row in run.rows.values()] for run in (plain, offloaded)]
    assert losses[0] == losses[1] and losses[0][1]
