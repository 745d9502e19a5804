"""float8 trains at every layout, recipe by recipe: the curve of one rank, and close to the one without it.

How close depends on what a scale sees. A scale per row is a power of 2 and sees one token, so there the first step is
the same but for the order of sums; a scale per tensor sees the micro batch of a rank, and its slice of a matrix, which
differ. From the second step on the smallest difference flips roundings (1 in 16). Measured over five steps, on
PyTorch 2.11 and 2.13: loss within 3e-4, gradient norm within 6e-3. One step, where equal is meant: 1e-7 and 1e-5; where
scales differ: 1e-4 and 4e-3.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.dist.test_validation import validated, validation
from tests.jobs import LLAMA, mesh
from tests.sweeps import but_sweep, sweep_but, swept_case
from titan.testing.jobs import Outcome, one_rank, run_job, train_job, trained, write_text
from titan.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

SIZES = [w for key, value in {"n_layers": 2, "dim": 64, "ffn_dim": 128}.items() for w in (f"--model.{key}", str(value))]
EMULATED = ("--plugins.float8.emulate", "always")
"""The same numbers wherever the test runs. PyTorch's own products for CPUs take 86 ms each, however small."""
OWN = ("--plugins.float8.emulate", "auto")
STEPS = 3
BASE = (*SIZES, "--train.steps", str(STEPS), "--optimizer.lr", "1e-3")
GATHERED = ("--plugins.bf16.enabled", "true", "--plugins.float8.fsdp_all_gather", "true", *EMULATED)
COMPILED = ("--plugins.compile.backend", "aot_eager")
TWICE = ("--train.micro_batch_size", "2")
HEAD = ("--plugins.float8.head", "true", "--model.vocab_size", "320", "--model.n_kv_heads", "4")
LOSS_RTOL, NORM_RTOL = 1e-3, 2e-2
FIRST_LOSS_RTOL, FIRST_NORM_RTOL = 1e-5, 1e-4


def float8(recipe: str) -> list[str]:
    return ["--plugins.float8.recipe", recipe, *EMULATED]


MX = (*HEAD, "--data.seq_len", "32", *float8("mxfp8"))


def alone(*words: str) -> Outcome:
    return one_rank(*BASE, *words)


def assert_close(reference: Outcome, other: Outcome, loss: float, norm: float, steps: int = STEPS) -> None:
    assert len(reference.rows) == len(other.rows) == STEPS
    for step in range(1, steps + 1):
        ours, theirs = reference.rows[step], other.rows[step]
        assert math.isclose(ours["loss"], theirs["loss"], rel_tol=loss), (step, ours["loss"], theirs["loss"])
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=norm), (step, ours, theirs)


def assert_equal(reference: Outcome, other: Outcome) -> None:
    assert_close(reference, other, 0.0, 0.0)
    assert reference.weights.keys() == other.weights.keys() and reference.weights
    assert all(torch.equal(weight, other.weights[name]) for name, weight in reference.weights.items())


@pytest.mark.parametrize(
    ("recipe", "precision"), [("tensorwise", "fp32"), ("rowwise", "bf16"), swept_case(("rowwise_with_gw_hp", "bf16"))]
)
def test_the_curve_is_close_to_the_one_without_and_not_the_same(recipe: str, precision: str) -> None:
    words = ["--plugins.bf16.enabled", "true"] if precision == "bf16" else []
    off, on = alone(*words), alone(*words, *float8(recipe))
    assert_close(off, on, 5e-3, 3e-2)
    assert off.rows[1]["loss"] != on.rows[1]["loss"]


LAYOUTS: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "tensorwise, tp 2": (2, float8("tensorwise"), mesh(tp=2)),
    "rowwise, dp_shard 2": (2, float8("rowwise"), mesh(dp_shard=2)),
    "rowwise, tp 2": (2, float8("rowwise"), mesh(tp=2)),
    "rowwise, split backward": (
        4,
        (*float8("rowwise"), "--model.n_layers", "8"),
        [*mesh(pp=4), "--plugins.pipeline.schedule", "InterleavedZeroBubble"],
    ),
    "rowwise_with_gw_hp, pp 2": (2, float8("rowwise_with_gw_hp"), mesh(pp=2)),
    "rowwise_with_gw_hp, tp 2": (2, float8("rowwise_with_gw_hp"), mesh(tp=2)),
    "rowwise_with_gw_hp, dp_shard 2": (2, float8("rowwise_with_gw_hp"), mesh(dp_shard=2)),
    "rowwise_with_gw_hp, a head whose logits are split, tp 2": (2, (*HEAD, *float8("rowwise_with_gw_hp")), mesh(tp=2)),
    "gathered, dp_shard 2": (2, GATHERED, mesh(dp_shard=2)),
    "gathered, dp_shard 2, accumulation": (2, GATHERED, [*mesh(dp_shard=2), *TWICE]),
    "gathered, dp_shard 2, accumulation, zero 3": (
        2,
        GATHERED,
        [*mesh(dp_shard=2), *TWICE, "--plugins.fsdp.zero_stage", "3"],
    ),
    "gathered, hsdp": (4, GATHERED, mesh(dp_replicate=2, dp_shard=2)),
    "gathered, dp_shard 2, tp 2": (4, GATHERED, mesh(dp_shard=2, tp=2)),
    "gathered beside a head, dp_shard 2": (2, (*GATHERED, *HEAD), mesh(dp_shard=2)),
    "products of the machine's own": (1, float8("rowwise"), OWN),
    "gathered, products of the machine's own, dp_shard 2": (2, GATHERED, [*OWN, *mesh(dp_shard=2)]),
}
KEPT = ("tensorwise, tp 2", "rowwise, dp_shard 2", "rowwise_with_gw_hp, pp 2")
KEPT += ("rowwise_with_gw_hp, a head whose logits are split, tp 2", "gathered, dp_shard 2")


@pytest.mark.parametrize("case", sweep_but(LAYOUTS, *KEPT))
def test_layouts(case: str, tmp_path: Path) -> None:
    ranks, same, words = LAYOUTS[case]
    reference, other = alone(*same), train_job(tmp_path, ranks, *BASE, *same, *words)
    assert_close(reference, other, LOSS_RTOL, NORM_RTOL)
    if case.startswith("rowwise"):  # the others' scales cover a rank's own tokens, and its own slice of a matrix
        assert_close(reference, other, FIRST_LOSS_RTOL, FIRST_NORM_RTOL, steps=1)


RECOMPUTED = {
    "tensorwise, full": (float8("tensorwise"), "full", ()),
    "rowwise, selective": (float8("rowwise"), "selective", ()),
    "rowwise_with_gw_hp, selective": (float8("rowwise_with_gw_hp"), "selective", ()),
    "tensorwise, selective, compiled": (float8("tensorwise"), "selective", COMPILED),
    "rowwise_with_gw_hp, selective, compiled": (float8("rowwise_with_gw_hp"), "selective", COMPILED),
    "mxfp8 and its head, selective, compiled": (MX, "selective", COMPILED),
}


@pytest.mark.parametrize("case", sweep_but(RECOMPUTED, "tensorwise, full", "rowwise, selective"))
def test_recomputing_changes_nothing(case: str) -> None:
    same, mode, compiled = RECOMPUTED[case]
    assert_equal(alone(*same), alone(*same, "--plugins.activation_checkpoint.mode", mode, *compiled))


@pytest.mark.slow
@pytest.mark.sweep
def test_compiled_to_kernels(tmp_path: Path) -> None:
    words = (*float8("tensorwise"), *mesh(tp=2), "--plugins.compile.enabled", "true")
    compiled = train_job(tmp_path, 2, *BASE, *words, timeout=400)
    assert_close(alone(*float8("tensorwise")), compiled, LOSS_RTOL, NORM_RTOL)


def scales_after_training(folder: str, words: list[str]) -> list[tuple[str, float, float]]:
    """Of each weight on this rank: name, the scale its shard will be cast with, 448 over the maximum of the whole."""
    run = trained(folder, words, str(LLAMA))
    held: list[Any] = [weight._local_tensor for part in run.parts for _, weight in part.parameters()]
    assert all(getattr(local, "_precomputed_scale", None) is None for local in held), "a sample would be scaled by it"
    for technique in run.context.techniques:  # as before a step that came now
        technique.before_step(run.step + 1)
    found = []
    for part in run.parts:
        for name, weight in part.parameters():
            assert isinstance(weight, DTensor), name
            local: Any = weight._local_tensor  # the very one: what to_local() makes has no scale
            if hasattr(local, "_precomputed_scale"):
                largest = weight.full_tensor().abs().max().item()
                found.append((name, float(local._precomputed_scale), 448 / largest))
    return found


@pytest.mark.parametrize("other", but_sweep(["tp", "pp"], "pp"))
def test_one_scale_a_weight_is_ready_on_every_rank(other: str, tmp_path: Path) -> None:
    """Also where stages are copies of the model that was converted, and where ranks hold slices of a weight."""
    write_text(tmp_path / "text")
    text = ("--data.path", str(tmp_path / "text"))
    words = [*BASE, *GATHERED, *text, "--train.steps", "2", *mesh(dp_shard=2, **{other: 2})]
    layers = {"tp": 2, "pp": 1}[other]
    for scales in run_ranks(scales_after_training, 4, str(tmp_path), words, init=False):
        assert len(scales) == 7 * layers
        for name, scale, expected in scales:
            assert math.isclose(scale, expected, rel_tol=1e-6), name


def _scaled_as_gathered(folder: str, words: list[str], config: str) -> dict[str, torch.Tensor]:
    """On one rank: a run without scales made beforehand, as torchao makes them of the weights that it gathers."""
    from titan.plugins.precision.float8 import Float8

    Float8.before_step = lambda self, step: None  # type: ignore[method-assign]
    Float8.batch = lambda self, batch: batch  # type: ignore[method-assign]
    return run_job(folder, words, config)


def test_weights_for_evaluation_have_scales_of_their_own(tmp_path: Path) -> None:
    switching = ("--optimizer.name", "schedule_free_adamw", "--lr_schedule.name", "constant", "--optimizer.lr", "1e-2")
    words = (*BASE, *GATHERED, *switching, *validation(tmp_path))
    before = train_job(tmp_path, 1, *words, name="before")
    gathered = train_job(tmp_path, 1, *words, name="gathered", run=_scaled_as_gathered)
    assert_equal(before, gathered)
    assert len(losses := validated(before.folder)) == STEPS and losses == validated(gathered.folder)


def test_a_checkpoint_goes_on_exactly_and_is_read_without_float8(tmp_path: Path) -> None:
    """Four ranks, so that a scale of the first step after a resume must be the one of the whole weight again."""
    layout = (*BASE, *GATHERED, *mesh(dp_shard=2, tp=2))
    saving = ("--checkpoint.enabled", "true", "--checkpoint.async", "false")
    whole = train_job(tmp_path, 4, *layout, *saving, "--checkpoint.every", "2", name="whole")
    halfway = ("--checkpoint.resume", str(tmp_path / "whole" / "checkpoints" / "step-00000002"))
    half = train_job(tmp_path, 4, *layout, *saving, *halfway, name="half")
    assert sorted(half.rows) == [3]
    for step, row in half.rows.items():
        assert (row["loss"], row["grad_norm"]) == (whole.rows[step]["loss"], whole.rows[step]["grad_norm"])
    assert [name for name, weight in whole.weights.items() if not torch.equal(weight, half.weights[name])] == []
    # A process that never imports torchao.
    plain = train_job(tmp_path, 1, *BASE, *saving, "--plugins.bf16.enabled", "true", "--train.steps", "4", name="half")
    assert sorted(plain.rows) == [3, 4]
    assert plain.rows[4]["loss"] < plain.rows[3]["loss"]
