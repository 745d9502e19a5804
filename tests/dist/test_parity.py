"""The same curve at any layout: loss and gradient norm of each of three steps, and the weights, against one rank.

The weights after steps of AdamW hide a gradient that is wrong by a factor; the gradient norm of each step does not.
"""

import pytest
import torch

from tests.jobs import BLOOM, FOUR_LAYERS, GEMMA, GPT, NEOX, OLMO2, QWEN3, mesh, settings
from tests.sweeps import but_sweep, sweep_but, swept_case

SCORES_RECOMPUTED = ("--model.attention", "unfused", "--plugins.activation_checkpoint.mode", "attention")
"""Against one rank with the kernel that writes no scores: the same numbers within the tolerances."""

COMPILED = ("--plugins.compile.backend", "aot_eager")
"""Traced and split into forward and backward as for a GPU, but not compiled to kernels, which takes long."""

LAYOUTS = {
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "dp_shard 3": (3, [*mesh(dp_shard=3), "--train.global_batch_size", "6"]),
    "ddp 4": (4, mesh(dp_replicate=4)),
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences, whole logits": (
        2,
        [*mesh(tp=2), "--plugins.tensor.sequence_parallel", "false", "--plugins.tensor.loss_parallel", "false"],
    ),
    "dp_shard 2, tp 2": (4, mesh(dp_shard=2, tp=2)),
    "hsdp 2x2, tp 2": (8, mesh(dp_replicate=2, dp_shard=2, tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "pp 4": (4, [*mesh(pp=4), *FOUR_LAYERS]),
    "dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2)),
    "ddp 2, pp 2": (4, mesh(dp_replicate=2, pp=2)),
    "accumulation": (1, ["--train.micro_batch_size", "2"]),
    "accumulation, hsdp 2x2, zero 1": (4, [*mesh(dp_replicate=2, dp_shard=2), "--train.micro_batch_size", "1"]),
    "accumulation, hsdp 2x2, zero 3": (
        4,
        [*mesh(dp_replicate=2, dp_shard=2), "--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", "3"],
    ),
    "pp 2, dp_shard 2, zero 3": (4, [*mesh(pp=2, dp_shard=2), "--plugins.fsdp.zero_stage", "3"]),
    "recompute full": (1, ["--plugins.activation_checkpoint.mode", "full"]),
    "recompute every 2, tp 2": (2, [*mesh(tp=2), "--plugins.activation_checkpoint.mode", "every_n"]),
    "compiled, recompute selective, dp_shard 2, tp 2": (
        4,
        [*mesh(dp_shard=2, tp=2), *COMPILED, "--plugins.activation_checkpoint.mode", "selective"],
    ),
    "compiled, tp 2, whole sequences": (2, [*mesh(tp=2), *COMPILED, "--plugins.tensor.sequence_parallel", "false"]),
    "recompute attention, tp 2": (2, [*mesh(tp=2), *SCORES_RECOMPUTED]),
    "recompute full, dp_shard 2, pp 2": (4, [*mesh(dp_shard=2, pp=2), "--plugins.activation_checkpoint.mode", "full"]),
}
CURVE = ("--train.global_batch_size", "--model.n_layers", "--model.tied", "--model.attention_cap", "--data.packing")
"""What a run is a function of, unlike its layout and its micro batches."""


SWEPT = (
    "ddp 2, pp 2", "pp 4", "dp_shard 2, tp 2, pp 2", "compiled, recompute selective, dp_shard 2, tp 2", "dp_shard 3",
    "accumulation, hsdp 2x2, zero 1", "pp 2, dp_shard 2, zero 3", "recompute full, dp_shard 2, pp 2",
)  # fmt: skip
"""Each combines what other layouts have singly."""


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_llama(layout: str, same_curve) -> None:
    ranks, words = LAYOUTS[layout]
    same_curve(ranks, words, settings(words, *CURVE))


SCHEDULES = {
    "GPipe": 4,
    "1F1B": 4,
    "LoopedBFS": 8,
    "Interleaved1F1B": 8,
    "InterleavedZeroBubble": 8,
    "ZBVZeroBubble": 8,
    "DualPipeV": 8,
}


@pytest.mark.parametrize("schedule", sweep_but(SCHEDULES, "ZBVZeroBubble"))
def test_schedules_over_four_stages(schedule: str, same_curve) -> None:
    if schedule in ("ZBVZeroBubble", "DualPipeV") and not torch.cuda.is_available() and torch.__version__ < "2.13":
        pytest.skip("gloo of this PyTorch cannot send to itself")
    words = ("--model.n_layers", "8")
    same_curve(4, [*words, *mesh(pp=4), "--plugins.pipeline.schedule", schedule], words)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, mesh(tp=2)), (2, mesh(pp=2)), swept_case((4, mesh(dp_shard=2, pp=2)))],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_gpt_with_its_tied_head(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, words, config=GPT)


def test_qwen3_with_norms_of_heads(same_curve) -> None:
    words = (*mesh(tp=2, pp=2), "--data.packing", "document_mask")
    same_curve(4, words, settings(words, *CURVE), QWEN3)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, mesh(tp=2)),
        swept_case((2, [*mesh(tp=2), *COMPILED, "--plugins.activation_checkpoint.mode", "selective"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_neox_with_parallel_branches(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, words, config=NEOX)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, [*mesh(tp=2, pp=2), "--data.packing", "document_mask"]),
        swept_case((2, [*mesh(tp=2), *COMPILED, "--plugins.tensor.sequence_parallel", "false"])),
        swept_case((4, [*mesh(tp=2, pp=2), *FOUR_LAYERS, "--plugins.pipeline.schedule", "InterleavedZeroBubble"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_olmo2_with_norms_over_all_heads(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, words, settings(words, *CURVE), OLMO2)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, mesh(tp=2)),
        swept_case((2, [*mesh(tp=2), *COMPILED, "--plugins.activation_checkpoint.mode", "selective"])),
        swept_case((4, [*mesh(tp=2, pp=2), "--data.packing", "document_mask"])),
        (4, [*mesh(tp=2, cp=2), "--plugins.context.method", "ulysses"]),
        swept_case((2, [*mesh(tp=2), "--model.attention", "unfused", "--data.packing", "document_mask"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_bloom_with_slopes_of_heads(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, words, settings(words, *CURVE, "--model.attention"), BLOOM)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, mesh(tp=2)),
        (2, [*mesh(cp=2), "--plugins.context.method", "ulysses", "--data.packing", "document_mask"]),
        swept_case((4, [*mesh(tp=2, pp=2), "--plugins.tensor.loss_parallel", "false"])),
        swept_case((2, [*mesh(tp=2), *COMPILED, "--plugins.activation_checkpoint.mode", "attention"])),
        swept_case((2, [*mesh(cp=2), "--model.attention_cap", "0"])),
        swept_case((2, [*mesh(pp=2), "--model.tied", "false"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_gemma_with_soft_caps(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, words, settings(words, *CURVE), GEMMA)


WINDOW = ("--model.sliding_window", "5", "--data.packing", "document_mask")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, mesh(tp=2)), swept_case((2, mesh(cp=2)))],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_sliding_window(ranks: int, words: list[str], same_curve) -> None:
    same_curve(ranks, [*WINDOW, *words], WINDOW)


@pytest.mark.parametrize("packing", [swept_case("document_mask"), "pad"])
def test_packings(packing: str, same_curve) -> None:
    """Of sequences so long that one in nine is the last of its document, and has padding."""
    words = ("--data.packing", packing, "--data.seq_len", "128", "--model.max_seq_len", "128")
    same_curve(4, [*words, *mesh(dp_shard=2, pp=2)], words)
